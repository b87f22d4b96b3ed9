// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"errors"
	"fmt"
	"time"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// hidden: NVML does not see the GPU while it is with a virtual machine.
type hidden struct {
	gpus GPUs
	pci  PCI
}

// returnPoll is the pause after the first look for a GPU that was given back. Each look is one at the whole node, so the pauses grow.
const returnPoll = 200 * time.Millisecond

// is tells whether the GPU has left NVML for the claim, so that what was to be done to it before that is done.
func (h hidden) is(claim *Claim, step ledger.Step) (bool, error) {
	gpu := claim.passed(step.GPU)
	if gpu == nil {
		return false, nil
	}
	sysfs, err := h.pci.Kernel()
	if err != nil {
		return false, err
	}
	f, err := vfio.ReadFunction(sysfs, gpu.PCIBusID)
	return f.Driver != nvidiaDriver, err // also where it was left between the two drivers
}

// undo returns when NVML sees the GPU again.
func (h hidden) undo(ctx context.Context, _ *ledger.Entry, step ledger.Step) error {
	seen := func(ctx context.Context) error {
		_, err := Ask(ctx, h.gpus, step.GPU, step.Target, nvml.Device.UUID)
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, h.gpus.Timeout)
	defer cancel()
	for pause := returnPoll; ; pause *= 2 {
		err := h.gpus.Look(ctx)
		if err == nil {
			err = seen(ctx)
		}
		if err == nil {
			return nil
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("the GPU was given back to its driver, and NVML does not see it: %w", errors.Join(ctx.Err(), err))
		}
	}
}
