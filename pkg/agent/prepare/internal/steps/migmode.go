// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"errors"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// migMode: MIG is switched on for the first claim that has a partition of the GPU, and off with the last.
type migMode struct {
	gpus GPUs
	pci  PCI
}

// MIGMode is the step for a claim with partitions. ours tells that the agent has switched MIG on for other claims, and
// switches that it can be done without a reset.
func MIGMode(now *Observed, ours, switches bool) ([]ledger.Step, error) {
	switch {
	case !now.MIG.Enabled && !switches:
		return nil, errors.New("MIG mode is disabled, and on this GPU it can only be enabled with a reset: use nvidia-smi -mig 1 on the node " +
			"and reset the GPU")
	case !now.MIG.Enabled, ours:
		return []ledger.Step{{Kind: ledger.StepMIGMode}}, nil
	}
	return nil, nil
}

func (m migMode) do(ctx context.Context, _ *Claim, step ledger.Step) error {
	return m.gpus.act(ctx, step, func(d nvml.Device) error {
		mode, err := d.MIGMode()
		if err != nil || mode.Enabled {
			return err
		}
		err = d.SetMIGMode(true)
		if errors.Is(err, nvml.ErrInUse) {
			// What was asked for stays pending, and would come with the next reset, when nobody wants it any more.
			err = errors.Join(m.pci.held(ctx, d, err), d.SetMIGMode(false))
		}
		return err
	})
}

// undo leaves MIG on as long as there are instances, of other claims or of an administrator.
func (m migMode) undo(ctx context.Context, _ *ledger.Entry, step ledger.Step) error {
	return m.gpus.act(ctx, step, func(d nvml.Device) error {
		mode, err := d.MIGMode()
		if err != nil || !mode.Enabled {
			return err
		}
		instances, err := d.GPUInstances()
		if err != nil || len(instances) > 0 {
			return err
		}
		return m.pci.held(ctx, d, d.SetMIGMode(false))
	})
}
