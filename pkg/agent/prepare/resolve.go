// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
)

// Target is what is behind a published device.
type Target struct {
	// GPU is the physical one.
	GPU cdi.GPU
	// Partition is nil for a whole GPU.
	Partition *ledger.Partition
	// Attributes are what is published of the device.
	Attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute
	// MemoryBytes is all that the GPU has.
	MemoryBytes uint64
	// Passthrough: the whole GPU goes to a virtual machine.
	Passthrough bool
	// SwitchesMIG tells that the GPU's MIG mode can be changed without a reset.
	SwitchesMIG bool
}

func (t *Target) kind() config.Kind {
	if t.Passthrough {
		return config.KindVFIO
	}
	if t.Partition != nil {
		return config.KindMIG
	}
	return config.KindGPU
}

// job is a claim on its way through prepare. The devices of the entry, the targets and the settings are parallel.
type job struct {
	entry *ledger.Entry
	// podClaim is the name by which its pods' specs know the claim, if it was made from a template.
	podClaim string
	targets  []Target
	settings []config.Settings
	// refused is why the claim must not be prepared anew. A claim that is prepared stays so.
	refused error
	// prepared: the claim was, when this began.
	prepared bool
	// begun is how many of the entry's steps have been begun.
	begun int
}

// doing is the job as its steps see it.
func (j *job) doing(fresh bool) *steps.Claim {
	claim := &steps.Claim{Entry: j.entry, Fresh: fresh}
	for i := range j.targets {
		if j.targets[i].Passthrough {
			claim.Passed = append(claim.Passed, j.targets[i].GPU)
		}
	}
	return claim
}

// byGPU returns the indices of the devices that hold each physical GPU, or a part of it.
func (j *job) byGPU() map[string][]int {
	held := map[string][]int{}
	for i, device := range j.entry.Devices {
		if !device.AdminAccess {
			held[device.GPU] = append(held[device.GPU], i)
		}
	}
	return held
}

// resolver finds what is behind a claim's devices, and how they are to be used.
type resolver struct {
	driver   string
	hardware Hardware
	holders  *holders
	rules    config.Rules
}

func adminAccess(result *resourceapi.DeviceRequestAllocationResult) bool {
	return ptr.Deref(result.AdminAccess, false)
}

// resolve turns allocation results into the beginning of a ledger entry.
func (r *resolver) resolve(
	ctx context.Context, claim *resourceapi.ResourceClaim, results []resourceapi.DeviceRequestAllocationResult, parameters *config.Set,
) (*job, error) {
	j := &job{
		entry:    &ledger.Entry{Claim: claimRef(claim), Pods: podsOf(claim)},
		podClaim: claim.Annotations[resourceapi.PodResourceClaimAnnotation],
	}
	rules := r.rules
	before := r.holders.preparedBefore(claim.UID)
	j.prepared = before != nil
	var devices []config.Device
	for i := range results {
		want := &results[i]
		rules.Shares = r.sharedBy(before, want)
		target, err := r.hardware.Find(ctx, want.Device)
		if err != nil {
			if gpu := target.GPU.Name; gpu != "" && !adminAccess(want) {
				// Who gave it to a virtual machine may be about to go, and is waited for then.
				if _, held := r.holders.of(j.entry, &ledger.Device{Request: want.Request, Device: want.Device, GPU: gpu}); held != nil {
					return nil, held
				}
			}
			return nil, fmt.Errorf("claim %s, request %s, device %s: %w", name(claim), want.Request, want.Device, err)
		}
		described := config.Device{
			Request: want.Request, Kind: target.kind(), AdminAccess: adminAccess(want), Share: want.ShareID != nil && !adminAccess(want),
		}
		settings, refused, err := parameters.Resolve(described, &rules)
		if err != nil {
			return nil, fmt.Errorf("claim %s: %w", name(claim), err)
		}
		if refused != nil && j.refused == nil {
			j.refused = fmt.Errorf("claim %s, request %s, device %s: %w", name(claim), want.Request, want.Device, refused)
		}
		device := ledger.Device{
			Request:      want.Request,
			Pool:         want.Pool,
			Device:       want.Device,
			GPU:          target.GPU.Name,
			UUID:         target.GPU.UUID,
			Partition:    target.Partition,
			AdminAccess:  adminAccess(want),
			ShareID:      want.ShareID,
			CDIDeviceIDs: []string{cdi.DeviceID(claim.UID, want.Request, want.Device)},
		}
		switch {
		case target.Passthrough:
			device.UUID, device.Passthrough = target.GPU.PCIBusID, true
		case device.Partition != nil:
			device.UUID, device.GPUUUID = "", target.GPU.UUID
		}
		if device.Share, err = shareOf(r.driver, want, &target, settings); err != nil {
			return nil, fmt.Errorf("claim %s, request %s, device %s: %w", name(claim), want.Request, want.Device, err)
		}
		if device.Share != nil {
			device.CDIDeviceIDs = []string{cdi.ShareDeviceID(claim.UID, want.Request, want.Device, *device.ShareID)}
		}
		if other := overlapping(j.entry, &device); other != nil {
			return nil, fmt.Errorf("claim %s: device %s and device %s overlap, allocated for the requests %s and %s", name(claim), other.Device,
				device.Device, other.Request, device.Request)
		}
		j.entry.Devices = append(j.entry.Devices, device)
		j.targets = append(j.targets, target)
		j.settings = append(j.settings, settings)
		devices = append(devices, described)
	}
	if err := parameters.Check(devices); err != nil && j.refused == nil {
		j.refused = fmt.Errorf("claim %s: %w", name(claim), err)
	}
	return j, nil
}

// sharedBy is the strategy that shares of a device are used with: a prepared claim keeps what it has, whatever the node's rules are by now.
func (r *resolver) sharedBy(before *ledger.Entry, want *resourceapi.DeviceRequestAllocationResult) config.Strategy {
	if before == nil {
		return r.rules.Shares
	}
	i := slices.IndexFunc(before.Devices, func(d ledger.Device) bool {
		return d.Share != nil && d.Request == want.Request && d.Device == want.Device
	})
	switch {
	case i < 0:
		return r.rules.Shares
	case before.Devices[i].Share.Setup == string(config.MPS):
		return config.MPS
	}
	return config.TimeSlicing
}
