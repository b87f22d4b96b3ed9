// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"errors"
	"fmt"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// partition: the MIG instances in a place are made for the claim, and destroyed after it.
type partition struct {
	gpus GPUs
	pci  PCI
}

// Partition is the step for a claim that has the place. One with a compute place must be there: the agent makes no such.
func Partition(now *Observed, at *ledger.Partition) ([]ledger.Step, error) {
	if at.ComputeSize > 0 {
		_, err := migDeviceIn(now.Instances, at)
		return nil, err
	}
	// An instance that is there was made by an administrator: of ours there would be a holder.
	if inPlace(now.Instances, at) != nil {
		return nil, nil
	}
	return []ledger.Step{{Kind: ledger.StepPartition, Partition: at}}, nil
}

// ErrPlaceTaken: somebody else has made an instance in the place, or where it would overlap, since the agent looked.
var ErrPlaceTaken = errors.New("somebody else has made a MIG instance there")

// do makes what is missing of a GPU instance and its compute instance. If nothing has been done for the claim what is
// there is not the agent's.
func (p partition) do(ctx context.Context, claim *Claim, step ledger.Step) error {
	return p.gpus.act(ctx, step, func(d nvml.Device) error {
		at := step.Partition
		instances, err := d.GPUInstances()
		if err != nil {
			return err
		}
		found := inPlace(instances, at)
		if found != nil && claim.Fresh {
			return ErrPlaceTaken
		}
		if found == nil {
			profile := nvml.MIGProfile{Name: at.Profile, ID: at.ProfileID}
			id, err := d.CreateGPUInstance(profile, nvml.Placement{Start: at.Start, Size: at.Size})
			if errors.Is(err, nvml.ErrNoResources) {
				return fmt.Errorf("%w: %w", ErrPlaceTaken, err)
			}
			if err != nil {
				return err
			}
			found = &nvml.GPUInstance{ID: id}
		}
		if len(found.Devices) == 0 {
			_, err = d.CreateComputeInstance(found.ID)
		}
		return err
	})
}

// undo ends the instances in the place, which the ledger says were made by the agent.
func (p partition) undo(ctx context.Context, _ *ledger.Entry, step ledger.Step) error {
	return p.gpus.act(ctx, step, func(d nvml.Device) error {
		instances, err := d.GPUInstances()
		if err != nil {
			return err
		}
		found := inPlace(instances, step.Partition)
		if found == nil {
			return nil
		}
		for _, device := range found.Devices {
			if err := d.DestroyComputeInstance(device.GPUInstance, device.ComputeInstance); err != nil && !errors.Is(err, nvml.ErrNotFound) {
				return p.pci.held(ctx, d, err)
			}
		}
		if err := d.DestroyGPUInstance(found.ID); !errors.Is(err, nvml.ErrNotFound) {
			return p.pci.held(ctx, d, err)
		}
		return nil
	})
}

// Identify enters the UUIDs of the claim's MIG devices, which are made.
func (g GPUs) Identify(ctx context.Context, entry *ledger.Entry) error {
	for i := range entry.Devices {
		device := &entry.Devices[i]
		if device.Partition == nil {
			continue
		}
		uuid, err := Ask(ctx, g, device.GPU, device.PhysicalUUID(), func(d nvml.Device) (string, error) {
			instances, err := d.GPUInstances()
			if err != nil {
				return "", err
			}
			found, err := migDeviceIn(instances, device.Partition)
			if err != nil {
				return "", err
			}
			return found.UUID, nil
		})
		if err != nil {
			return fmt.Errorf("claim %s, request %s, device %s: %w", entry.Claim, device.Request, device.Device, err)
		}
		device.UUID = uuid
	}
	return nil
}

// inPlace returns the instance in that very place, nil if there is none.
func inPlace(instances []nvml.GPUInstance, at *ledger.Partition) *nvml.GPUInstance {
	for i := range instances {
		found := &instances[i]
		if found.ProfileID == at.ProfileID && found.Placement.Start == at.Start && found.Placement.Size == at.Size {
			return found
		}
	}
	return nil
}

// migDeviceIn returns the MIG device of that very place.
func migDeviceIn(instances []nvml.GPUInstance, at *ledger.Partition) (*nvml.MIGDevice, error) {
	found := inPlace(instances, at)
	switch {
	case found == nil:
		return nil, fmt.Errorf("there is no MIG device %s", at)
	case at.ComputeSize == 0 && len(found.Devices) == 1:
		return &found.Devices[0], nil
	case at.ComputeSize == 0:
		return nil, fmt.Errorf("%s has %d compute instances now, and the device is one that has all of it", at, len(found.Devices))
	}
	for i, device := range found.Devices {
		if device.Compute.Start == at.ComputeStart && device.Compute.Size == at.ComputeSize {
			return &found.Devices[i], nil
		}
	}
	return nil, fmt.Errorf("there is no MIG device %s: %s has %d others", at, at.Profile, len(found.Devices))
}
