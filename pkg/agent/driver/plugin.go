// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/pluginpath"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/reconcile"
)

// Kubelet is what the kubelet tells.
type Kubelet struct {
	// Socket of its PodResources service; below KubeletRoot if empty.
	Socket string
	// Pods that it gives resources to.
	Pods func(context.Context) ([]reconcile.KubeletPod, error)
	// Devices that device plugins offer or pods have from them.
	Devices pluginpath.Devices
}

// plugin answers the kubelet's calls.
type plugin struct {
	claims   *prepare.Manager
	hardware *Hardware
	pool     string
	reporter *reporter
	failures failures
	// noteQuarantined has the taints of GPUs in quarantine brought up to date, and told waits until the API server has those of the GPUs.
	noteQuarantined func()
	told            func(ctx context.Context, gpus []string)
	check           *selfCheck
	// refuse says by UID which claims must not be prepared on this node, and why.
	refuse func(context.Context, []*resourceapi.ResourceClaim) map[types.UID]error
	// fail ends the agent.
	fail context.CancelCauseFunc
}

var _ kubeletplugin.DRAPlugin = &plugin{}

// PrepareResourceClaims implements kubeletplugin.DRAPlugin. The context ends when the kubelet gives up (45 s).
func (p *plugin) PrepareResourceClaims(ctx context.Context,
	claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	start := time.Now()
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	prepared := p.prepareAll(ctx, claims)
	p.noteQuarantined() // one may have come into it, or out of it
	for _, claim := range claims {
		p.reporter.prepared(claim, prepared[claim.UID].Err)
		p.check.prepared(prepared[claim.UID].Err)
	}
	for uid, result := range prepared {
		observe("prepare", start, result.Err)
		if p.failures.changed("prepare "+string(uid), result.Err) {
			utilruntime.HandleErrorWithContext(ctx, result.Err, "Claim could not be prepared", "claimUID", uid, "others", prepare.Others(result.Err))
		}
		results[uid] = kubeletplugin.PrepareResult{Err: result.Err, Devices: devicesFor(result.Devices)}
	}
	return results, nil
}

// prepareAll does not begin with claims that are refused.
func (p *plugin) prepareAll(ctx context.Context, claims []*resourceapi.ResourceClaim) map[types.UID]prepare.Result {
	refused := p.refuse(ctx, claims)
	results := p.claims.PrepareAll(ctx,
		slices.DeleteFunc(slices.Clone(claims), func(c *resourceapi.ResourceClaim) bool { return refused[c.UID] != nil }))
	for uid, err := range refused {
		results[uid] = prepare.Result{Err: err}
	}
	return results
}

// UnprepareResourceClaims implements kubeletplugin.DRAPlugin.
func (p *plugin) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	start := time.Now()
	uids := make([]types.UID, 0, len(claims))
	for _, claim := range claims {
		uids = append(uids, claim.UID)
	}
	gpus := p.reporter.gpusOf(uids)
	results := p.claims.UnprepareAll(ctx, uids)
	// Once the kubelet has the answer the pod goes, and then the GPUs are free to the scheduler.
	p.noteQuarantined()
	p.told(ctx, gpus)
	for _, claim := range claims {
		err := results[claim.UID]
		observe("unprepare", start, err)
		p.reporter.unprepared(ledger.Claim{UID: claim.UID, Namespace: claim.Namespace, Name: claim.Name}, err)
		if p.failures.changed("unprepare "+string(claim.UID), err) {
			utilruntime.HandleErrorWithContext(ctx, err, "Claim could not be unprepared", "claimUID", claim.UID)
		}
		if err == nil {
			p.failures.changed("prepare "+string(claim.UID), nil)
		}
	}
	return results, nil
}

// HandleError implements kubeletplugin.DRAPlugin. Recoverable errors are retried or outlived by who reports
// them; after any other one a server of ours has stopped, and the agent with it, to be started again.
func (p *plugin) HandleError(ctx context.Context, err error, msg string) {
	utilruntime.HandleErrorWithContext(ctx, err, msg)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		p.fail(fmt.Errorf("%s: %w", msg, err))
	}
}

func devicesFor(prepared []ledger.Device) []kubeletplugin.Device {
	devices := make([]kubeletplugin.Device, 0, len(prepared))
	for _, device := range prepared {
		devices = append(devices, kubeletplugin.Device{
			Requests:     []string{device.Request},
			PoolName:     device.Pool,
			DeviceName:   device.Device,
			CDIDeviceIDs: device.CDIDeviceIDs,
			ShareID:      device.ShareID,
		})
	}
	return devices
}

// observe counts one claim of a call that began at start.
func observe(operation string, start time.Time, err error) {
	outcome := "ok"
	if err != nil {
		outcome = "error"
	}
	callSeconds.WithLabelValues(operation, outcome).Observe(time.Since(start).Seconds())
}

// failures are what failed, so that what is tried every few seconds, and fails each time for the same reason, is logged once.
type failures struct {
	mu   sync.Mutex
	last map[string]string
}

// changed tells whether what has this name failed, and for another reason than the last time. Success, which is nil, forgets the reason.
func (f *failures) changed(name string, err error) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err == nil {
		delete(f.last, name)
		return false
	}
	if f.last[name] == err.Error() {
		return false
	}
	if f.last == nil {
		f.last = map[string]string{}
	}
	f.last[name] = err.Error()
	return true
}
