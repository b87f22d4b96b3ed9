// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"fmt"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// computeMode: it is changed for the claim, and changed back.
type computeMode struct{ gpus GPUs }

// ComputeMode is the step for a claim that wants the mode.
func ComputeMode(now *Observed, want nvml.ComputeMode) []ledger.Step {
	if now.Compute == nil || *now.Compute == want {
		return nil
	}
	return []ledger.Step{{Kind: ledger.StepComputeMode, Before: string(*now.Compute), Want: string(want)}}
}

// Restorable refuses a compute mode that the agent does not know: it could not be put back, and the GPU would be in
// quarantine for ever.
func Restorable(mode *nvml.ComputeMode) error {
	if mode == nil || mode.Known() {
		return nil
	}
	return fmt.Errorf("compute mode is %s, which this agent could not put back: use nvidia-smi -c DEFAULT on the node", *mode)
}

func (c computeMode) do(ctx context.Context, _ *Claim, step ledger.Step) error {
	return c.set(ctx, step, step.Want)
}

func (c computeMode) undo(ctx context.Context, _ *ledger.Entry, step ledger.Step) error {
	return c.set(ctx, step, step.Before)
}

// set changes what is not so already: a GPU that refuses a change is no worse for being left as it is.
func (c computeMode) set(ctx context.Context, step ledger.Step, mode string) error {
	return c.gpus.act(ctx, step, func(d nvml.Device) error {
		if now, err := d.ComputeMode(); err != nil || string(now) == mode {
			return err
		}
		return d.SetComputeMode(nvml.ComputeMode(mode))
	})
}
