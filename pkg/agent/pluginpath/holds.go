// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginpath

import (
	"context"
	"errors"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/advertise"
	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/hold"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare"
)

// Allocated implements deviceplugin.Holder. The kubelet has not yet written down who gets the devices.
func (p *Path) Allocated(ctx context.Context, resource string, devices []deviceplugin.Device) (err error) {
	end, err := p.begin(resource, devices)
	if err != nil {
		return err
	}
	defer func() { end(err) }()
	// Those that are recorded may be asked for again by the pod that has them. If it is another pod, its container does not start.
	fresh, err := notRecorded(p.opts.Records, resource, devices)
	if err == nil {
		err = p.refuse(ctx, (*listed).offering, resource, fresh)
	}
	if err != nil {
		return err
	}
	return p.hold(ctx, resource, devices, func(ledger.PluginDevice) []types.UID { return nil })
}

// notRecorded are those that nobody has here.
func notRecorded(in *ledger.Ledger, resource string, devices []deviceplugin.Device) (fresh []deviceplugin.Device, err error) {
	records, err := in.Records()
	if err != nil {
		return nil, err
	}
	for _, device := range devices {
		of := ledger.PluginDevice{Resource: resource, ID: device.ID}
		if !slices.ContainsFunc(records, func(r *ledger.Record) bool { return r.Entry != nil && r.Entry.Claim.Plugin == of }) {
			fresh = append(fresh, device)
		}
	}
	return fresh, nil
}

// Starting implements deviceplugin.Holder. By now the kubelet has written down whose the devices are. If they were another pod's before,
// that pod has ended: the kubelet gives a device to one pod at a time. What it has left behind is cleared first.
func (p *Path) Starting(ctx context.Context, resource string, devices []deviceplugin.Device) (err error) {
	end, err := p.begin(resource, devices)
	if err != nil {
		return err
	}
	defer func() { end(err) }()
	checkpoint, err := p.source.Checkpoint()
	if err != nil {
		klog.FromContext(ctx).Info("It is not known which pod has the devices, what it leaves behind will not be looked for",
			"reason", err.Error())
		if err := p.refuse(ctx, (*listed).anew, resource, devices); err != nil {
			return err
		}
		return p.Allocated(ctx, resource, devices)
	}
	var begin []deviceplugin.Device // for another pod than before
	pods := map[ledger.PluginDevice][]types.UID{}
	anew := p.source // one of the pods has come just now
	anew.Pods = p.opts.Pods
	for _, device := range devices {
		of := ledger.PluginDevice{Resource: resource, ID: device.ID}
		if pods[of], err = givenOnce(ctx, &anew, of, checkpoint.PodsWith(of)); err != nil {
			return err
		}
		runs, err := p.clear(ctx, of, pods[of])
		if err != nil {
			return err
		}
		if !runs {
			begin = append(begin, device)
		}
	}
	if err := p.refuse(ctx, (*listed).anew, resource, begin); err != nil {
		return err
	}
	return p.hold(ctx, resource, devices, func(of ledger.PluginDevice) []types.UID { return pods[of] })
}

// givenOnce returns an error if the kubelet has given the device to two pods that have not ended. It may do that when a pod ends while it
// gives devices to another one and is asked what pods have. Which of the two starts is not known, so no container of either does.
// Otherwise it returns the pod that has the device, without those that have ended and that the kubelet remembers still.
func givenOnce(ctx context.Context, source *hold.Source, of ledger.PluginDevice, pods []types.UID) ([]types.UID, error) {
	if len(pods) < 2 {
		return pods, nil
	}
	running, err := source.Running(ctx, pods)
	switch {
	case err != nil:
		return nil, fmt.Errorf("which pods have %s: %w", of, err)
	case len(running) == 0: // and a container of one starts
		return nil, fmt.Errorf("the kubelet has given %s to the pods %s and %s, and the API server knows neither", of, pods[0], pods[1])
	case len(running) > 1:
		return nil, fmt.Errorf("the kubelet has given %s to the pods %s and %s: no container starts with it before one of them is gone",
			of, running[0], running[1])
	}
	return running, nil
}

// clear takes the device back from pods that have ended, if it is recorded for none of these. It reports whether one of these has it
// already.
func (p *Path) clear(ctx context.Context, of ledger.PluginDevice, pods []types.UID) (runs bool, err error) {
	record, err := p.opts.Records.Get(hold.UID(of))
	if err != nil || record == nil || record.Entry == nil || len(record.Entry.Pods) == 0 || len(pods) == 0 {
		return false, err
	}
	if slices.ContainsFunc(record.Entry.Pods, func(pod types.UID) bool { return slices.Contains(pods, pod) }) {
		return true, nil
	}
	if _, err := p.opts.Claims.UnprepareUnused(ctx, record.Entry); err != nil {
		return false, fmt.Errorf("take %s back from a pod that has ended: %w", of, err)
	}
	return false, nil
}

// shareFor is what the device takes of a GPU that is shared; nil for one that is not. A pod that has it keeps
// what it has, whatever the flags are by now.
func (p *Path) shareFor(of ledger.PluginDevice, device string) *ledger.Share {
	if record, _ := p.opts.Records.Get(hold.UID(of)); record != nil && record.State() == ledger.PrepareCompleted &&
		len(record.Entry.Devices) > 0 {
		return record.Entry.Devices[0].Share
	}
	node := p.opts.Hardware.Node()
	if of.Resource != SharedResource || node == nil {
		return nil
	}
	for i := range node.GPUs {
		gpu := &node.GPUs[i]
		for o := range gpu.Offers {
			if gpu.Offers[o].Name != device {
				continue
			}
			if share := p.shareOf(gpu, &gpu.Offers[o]); share != nil {
				return share
			}
		}
	}
	return nil
}

// keepHeld adds the devices that pods have and that nobody else is offered, because the flags are others by now: without them in the list
// no container of these pods would start again. A GPU that is on another path leaves the list when no pod has it any more.
func (p *Path) keepHeld(node *discovery.Node, offered map[string][]deviceplugin.Device) error {
	records, err := p.opts.Records.Records()
	if err != nil {
		return fmt.Errorf("which devices pods have: %w", err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	paths := p.pathsOf(node)
	for _, record := range records {
		if record.State() != ledger.PrepareCompleted || record.Entry.Claim.Plugin == (ledger.PluginDevice{}) || len(record.Entry.Devices) == 0 {
			continue
		}
		of, has := record.Entry.Claim.Plugin, &record.Entry.Devices[0]
		if len(has.CDIDeviceIDs) == 0 || slices.ContainsFunc(offered[of.Resource], func(d deviceplugin.Device) bool { return d.ID == of.ID }) {
			continue
		}
		offered[of.Resource] = append(offered[of.Resource],
			deviceplugin.Device{ID: of.ID, Name: has.Device, UUID: has.UUID, CDIName: has.CDIDeviceIDs[0]})
		if path, known := paths[has.GPU]; known && path != advertise.DevicePlugin {
			p.moving.leaving.Insert(has.GPU)
		}
	}
	return nil
}

// hold prepares the devices, each by itself, as claims are.
func (p *Path) hold(ctx context.Context, resource string, devices []deviceplugin.Device,
	podsWith func(ledger.PluginDevice) []types.UID,
) error {
	claims := make([]*resourceapi.ResourceClaim, len(devices))
	for i, device := range devices {
		of := ledger.PluginDevice{Resource: resource, ID: device.ID}
		claims[i] = hold.Claim(p.opts.Driver, p.opts.Node, of, device.Name, p.shareFor(of, device.Name), podsWith(of))
	}
	results := p.opts.Claims.PrepareAll(ctx, claims)
	p.opts.Quarantined() // one may have come into it, or out of it
	var errs []error
	for _, claim := range claims {
		err := results[claim.UID].Err
		var held *prepare.HeldError
		if errors.As(err, &held) {
			err = fmt.Errorf("%w: %w", deviceplugin.ErrRefused, err)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
