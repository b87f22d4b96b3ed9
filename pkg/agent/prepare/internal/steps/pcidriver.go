// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// pciDriver: a PCI function is taken from its driver for vfio-pci, and given back.
type pciDriver struct {
	gpus GPUs
	pci  PCI
}

// PCIDrivers are the steps for a claim that has the group. Functions that vfio-pci has stay with it: an administrator
// wants it so.
func (p PCI) PCIDrivers(ctx context.Context, group *vfio.Group) (steps []ledger.Step, err error) {
	for _, f := range group.Functions {
		if f.Driver == vfio.Driver {
			continue
		}
		step := ledger.Step{Kind: ledger.StepPCIDriver, Target: f.Address, Before: f.Driver, Want: vfio.Driver}
		var override string
		if err := p.act(ctx, func(ctx context.Context) (err error) {
			override, err = p.Binder.Override(ctx, f.Address)
			return err
		}); err != nil {
			return nil, err
		}
		if override != vfio.Driver {
			step.Override = override
		}
		steps = append(steps, step)
	}
	return steps, nil
}

// do gives a function to vfio-pci. The NVIDIA driver lets go of a GPU only while nobody, this agent included, has it open.
func (p pciDriver) do(ctx context.Context, claim *Claim, step ledger.Step) error {
	sysfs, err := p.pci.Kernel()
	if err != nil {
		return err
	}
	f, err := vfio.ReadFunction(sysfs, step.Target)
	if err != nil {
		return err
	}
	bind := func(ctx context.Context) error {
		return p.pci.act(ctx, func(ctx context.Context) error { return p.pci.Binder.Take(ctx, step.Target) })
	}
	if f.Driver != nvidiaDriver {
		return bind(ctx)
	}
	gpu := claim.passed(step.GPU)
	if gpu == nil {
		return fmt.Errorf("the claim has no GPU %s for a virtual machine", step.GPU)
	}
	return p.gpus.Apart(ctx, func(ctx context.Context) error {
		if err := p.pci.CheckUnused(ctx, gpu); err != nil {
			return err
		}
		return bind(ctx)
	})
}

// undo gives the function back. One that has been unplugged needs none of that.
func (p pciDriver) undo(ctx context.Context, _ *ledger.Entry, step ledger.Step) error {
	if _, err := p.pci.Kernel(); err != nil {
		return err
	}
	err := p.pci.act(ctx, func(ctx context.Context) error {
		return p.pci.Binder.GiveBack(ctx, step.Target, step.Before, step.Override)
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
