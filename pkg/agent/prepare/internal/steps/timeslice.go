// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// TimeSlices are set for a claim, and set to the default after it: no GPU says which one it had.
type TimeSlices struct {
	GPUs GPUs
	Tool sharing.TimeSlicer
}

// TimeSlice is the step for a claim with these settings.
func TimeSlice(settings config.Settings) []ledger.Step {
	if settings.Strategy != config.TimeSlicing || settings.Interval == config.IntervalDefault {
		return nil
	}
	return []ledger.Step{{Kind: ledger.StepTimeSlice, Want: string(settings.Interval)}}
}

func (t TimeSlices) do(ctx context.Context, _ *Claim, step ledger.Step) error {
	return t.set(ctx, step, config.Interval(step.Want))
}

func (t TimeSlices) undo(ctx context.Context, _ *ledger.Entry, step ledger.Step) error {
	return t.Reset(ctx, step)
}

// Reset sets the default on the step's GPU.
func (t TimeSlices) Reset(ctx context.Context, step ledger.Step) error {
	return t.set(ctx, step, config.IntervalDefault)
}

// set is an act on the GPU like those through NVML: the program that does it cannot be ended, either, while the driver
// hangs, and no second one is started meanwhile.
func (t TimeSlices) set(ctx context.Context, step ledger.Step, interval config.Interval) error {
	ctx, cancel := context.WithTimeout(ctx, t.GPUs.Timeout)
	defer cancel()
	return t.GPUs.act(ctx, step, func(d nvml.Device) error {
		address, err := d.PCIBusID()
		if err != nil {
			return err
		}
		return t.Tool.SetTimeSlice(ctx, address, interval)
	})
}
