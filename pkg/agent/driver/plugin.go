package driver

import (
	"context"
	"errors"
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"stowage.dev/stowage/pkg/agent/prepare"
)

// plugin answers the kubelet's calls.
type plugin struct {
	claims   *prepare.Manager
	hardware *Hardware
	pool     string
	reporter *reporter
	// fail ends the agent.
	fail context.CancelCauseFunc
}

var _ kubeletplugin.DRAPlugin = &plugin{}

// PrepareResourceClaims implements kubeletplugin.DRAPlugin. The context ends when the kubelet gives up (45 s).
func (p *plugin) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	start := time.Now()
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	prepared := p.claims.PrepareAll(ctx, claims)
	for _, claim := range claims {
		p.reporter.prepared(claim, prepared[claim.UID].Err)
	}
	for uid, result := range prepared {
		observe("prepare", start, result.Err)
		if result.Err != nil {
			utilruntime.HandleErrorWithContext(ctx, result.Err, "Claim could not be prepared", "claimUID", uid)
		}
		results[uid] = kubeletplugin.PrepareResult{Err: result.Err, Devices: devicesFor(result.Devices)}
	}
	return results, nil
}

// UnprepareResourceClaims implements kubeletplugin.DRAPlugin.
func (p *plugin) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	start := time.Now()
	uids := make([]types.UID, 0, len(claims))
	for _, claim := range claims {
		uids = append(uids, claim.UID)
	}
	results := p.claims.UnprepareAll(ctx, uids)
	for uid, err := range results {
		observe("unprepare", start, err)
		p.reporter.unprepared(uid)
		if err != nil {
			utilruntime.HandleErrorWithContext(ctx, err, "Claim could not be unprepared", "claimUID", uid)
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

func devicesFor(prepared []prepare.Device) []kubeletplugin.Device {
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
