package prepare

import (
	"context"
	"errors"
	"fmt"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// A GPU or a node may refuse a setting for ever. That is the claim's fault, not the GPU's: what cannot be read back is found out before anything is
// recorded, since undoing it would be refused, too. The rest is read first when it is undone.

// refused tells that NVML does not do it on this GPU, now or later.
func refused(err error) bool {
	return errors.Is(err, nvml.ErrNotSupported) || errors.Is(err, nvml.ErrNoPermission)
}

// checkTimeSlice finds out whether the time slice can be set, with the default: that is what is put back in the end. One that others have set
// for those who share the GPU can.
func (m *Manager) checkTimeSlice(ctx context.Context, j *job, step ledger.Step) error {
	if step.Kind != ledger.StepTimeSlice {
		return nil
	}
	if step.Shared {
		if kept, err := m.keptByOthers(j.entry, step.GPU); kept || err != nil {
			return err
		}
	}
	if err := m.setTimeSlice(ctx, step, config.IntervalDefault); err != nil {
		return fmt.Errorf("%sno time slice can be set: %w", j.field(step), err)
	}
	return nil
}

// checkDaemon finds out whether the MPS daemon could be started.
func (m *Manager) checkDaemon(ctx context.Context, daemon *served) error {
	ctx, cancel := context.WithTimeout(ctx, m.opts.GPUTimeout)
	defer cancel()
	if err := m.opts.Tools.Daemons.Check(ctx, daemon.Daemon); err != nil {
		return fmt.Errorf("sharing.strategy: %q: %w", config.MPS, err)
	}
	return nil
}

// sets tells whether the claim has a setting on the GPU that the driver keeps.
func (j *job) sets(gpu string) bool {
	for _, step := range j.entry.Undo {
		if step.GPU == gpu && (step.Kind == ledger.StepTimeSlice || step.Kind == ledger.StepComputeMode) {
			return true
		}
	}
	return false
}

// field names the parameter that a step is for, with what it says; empty if none is.
func (j *job) field(step ledger.Step) string {
	switch {
	case step.Kind == ledger.StepTimeSlice:
		return fmt.Sprintf("sharing.timeSlicingConfig.interval: %q: ", step.Want)
	case step.Kind == ledger.StepMPSDaemon:
		return fmt.Sprintf("sharing.strategy: %q: ", config.MPS)
	case step.Kind == ledger.StepComputeMode && step.Want != string(nvml.ComputeDefault):
		for i, settings := range j.settings {
			if device := &j.entry.Devices[i]; device.GPU == step.GPU && !device.AdminAccess {
				return fmt.Sprintf("sharing.strategy: %q: ", settings.Strategy)
			}
		}
	}
	return ""
}
