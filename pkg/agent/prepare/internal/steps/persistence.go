// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// persistence: without the mode the driver forgets settings whenever nobody has the GPU open, so it is switched on for
// a claim.
type persistence struct{ gpus GPUs }

// Persistence is the step for a claim that wants the mode on.
func Persistence(now *Observed) []ledger.Step {
	if now.Persistence == nil || *now.Persistence {
		return nil
	}
	return []ledger.Step{{Kind: ledger.StepPersistence}}
}

func (p persistence) do(ctx context.Context, claim *Claim, step ledger.Step) error {
	err := p.set(ctx, step, true)
	if refused(err) && !hasSettings(claim.Entry, step.GPU) {
		klog.FromContext(ctx).Info("Persistence mode cannot be switched on, and the claim has no settings that the driver could forget",
			"device", step.GPU, "reason", err.Error())
		return nil
	}
	return err
}

func (p persistence) undo(ctx context.Context, _ *ledger.Entry, step ledger.Step) error {
	return p.set(ctx, step, false)
}

// noPersistence: a GPU that NVIDIA's daemon keeps open does not leave its driver, so it is asked to let go of it for a
// virtual machine. Without the daemon the mode is the driver's own.
type noPersistence struct {
	persistence
	keeper Keeper
	pci    PCI
}

// Keeper is NVIDIA's daemon.
type Keeper struct {
	Tool sharing.PersistenceDaemon
	// Timeout is for one question.
	Timeout time.Duration
}

// Keeps tells whether the daemon keeps the GPU at the PCI address open, and in which process.
func (k Keeper) Keeps(ctx context.Context, address string) (keeps bool, pid uint32, err error) {
	ctx, cancel := context.WithTimeout(ctx, k.Timeout)
	defer cancel()
	return k.Tool.Keeps(ctx, address)
}

// byDaemon is Before of a step for a GPU that the daemon kept open.
const byDaemon = "nvidia-persistenced"

// NoPersistence is the step for a claim that wants the mode off, which the daemon may have switched on.
func NoPersistence(now *Observed, daemon bool) []ledger.Step {
	switch {
	case daemon:
		return []ledger.Step{{Kind: ledger.StepNoPersistence, Before: byDaemon}}
	case now.Persistence == nil || !*now.Persistence:
		return nil
	}
	return []ledger.Step{{Kind: ledger.StepNoPersistence}}
}

func (p noPersistence) do(ctx context.Context, _ *Claim, step ledger.Step) error {
	if step.Before == byDaemon {
		if err := p.keep(ctx, step, false); err != nil {
			return err
		}
	}
	return p.set(ctx, step, false)
}

// undo has the daemon keep the GPU as before. If it has ended since, so has its mode. One that does not open the GPU again, which it does
// not where all GPUs were away (kubernetes-sigs/dra-driver-nvidia-gpu 1037), leaves it to the driver.
func (p noPersistence) undo(ctx context.Context, _ *ledger.Entry, step ledger.Step) error {
	if step.Before == byDaemon {
		err := p.keep(ctx, step, true)
		switch {
		case err == nil, errors.Is(err, sharing.ErrNoPersistenced):
			return nil
		case !errors.Is(err, sharing.ErrPersistencedRefuses):
			return err
		}
		klog.FromContext(ctx).Info("Persistence mode is switched on without nvidia-persistenced", "device", step.GPU, "reason", err.Error())
	}
	return p.set(ctx, step, true)
}

// keep has the daemon keep the GPU or let go of it. It is an act on the GPU: the daemon waits for the driver.
func (p noPersistence) keep(ctx context.Context, step ledger.Step, on bool) error {
	ctx, cancel := context.WithTimeout(ctx, p.keeper.Timeout)
	defer cancel()
	return p.gpus.act(ctx, step, func(d nvml.Device) error {
		address, err := d.PCIBusID()
		if err != nil {
			return err
		}
		err = p.keeper.Tool.Keep(ctx, address, on)
		if err == nil || on {
			return err
		}
		if keeps, pid, unknown := p.keeper.Keeps(ctx, address); keeps && unknown == nil {
			err = fmt.Errorf("%w: %w", p.pci.InUse(step.GPU, pid), err)
		}
		return err
	})
}

// set changes what is not so already: a GPU that refuses a change is no worse for being left as it is.
func (p persistence) set(ctx context.Context, step ledger.Step, on bool) error {
	return p.gpus.act(ctx, step, func(d nvml.Device) error {
		if now, err := d.Persistence(); err != nil || now == on {
			return err
		}
		return d.SetPersistence(on)
	})
}

// hasSettings tells whether the claim has a setting on the GPU that the driver keeps.
func hasSettings(entry *ledger.Entry, gpu string) bool {
	return slices.ContainsFunc(entry.Undo, func(s ledger.Step) bool {
		return s.GPU == gpu && (s.Kind == ledger.StepTimeSlice || s.Kind == ledger.StepComputeMode)
	})
}
