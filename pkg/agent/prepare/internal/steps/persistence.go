package steps

import (
	"context"
	"slices"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// persistence: without the mode the driver forgets settings whenever nobody has the GPU open, so it is switched on for
// a claim. While it is on NVIDIA's daemon has the GPU open, so it is switched off for a virtual machine.
type persistence struct{ gpus GPUs }

// Persistence is the step for a claim that wants the mode on, or off.
func Persistence(now *Observed, on bool) []ledger.Step {
	switch {
	case now.Persistence == nil || *now.Persistence == on:
		return nil
	case on:
		return []ledger.Step{{Kind: ledger.StepPersistence}}
	}
	return []ledger.Step{{Kind: ledger.StepNoPersistence}}
}

func (p persistence) do(ctx context.Context, claim *Claim, step ledger.Step) error {
	err := p.set(ctx, step, true)
	if refused(err) && !hasSettings(claim.Entry, step.GPU) {
		klog.FromContext(ctx).Info("Persistence mode cannot be switched on, and the claim has no settings that the driver could forget", "device", step.GPU, "reason", err.Error())
		return nil
	}
	return err
}

func (p persistence) undo(ctx context.Context, _ *ledger.Entry, step ledger.Step) error {
	return p.set(ctx, step, false)
}

// noPersistence is persistence the other way round.
type noPersistence struct{ persistence }

func (p noPersistence) do(ctx context.Context, _ *Claim, step ledger.Step) error {
	return p.set(ctx, step, false)
}

func (p noPersistence) undo(ctx context.Context, _ *ledger.Entry, step ledger.Step) error {
	return p.set(ctx, step, true)
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
