// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// decider lists the steps of a claim, by what it finds. It does none of them, and refuses claims that could not be
// undone.
type decider struct {
	gpus        steps.GPUs
	pci         steps.PCI
	timeSlices  steps.TimeSlices
	daemons     steps.Daemons
	keeper      steps.Keeper
	files       steps.Files
	processes   sharing.Processes
	holders     *holders
	quarantines quarantines
}

// decide looks at the claim's GPUs and lists what is going to be done to them, without doing it. The caller has
// the GPUs' locks.
func (d *decider) decide(ctx context.Context, j *job) error {
	var err error
	if j.entry.BootID, err = d.gpus.BootID(); err != nil {
		return err
	}
	held := j.byGPU()
	for _, gpu := range slices.Sorted(maps.Keys(held)) {
		devices := held[gpu]
		if j.targets[devices[0]].Passthrough {
			list, err := d.passthroughSteps(ctx, &j.targets[devices[0]])
			if err != nil {
				return fmt.Errorf("device %s: %w", j.entry.Devices[devices[0]].Device, err)
			}
			for _, step := range list {
				step.GPU = gpu
				j.entry.Undo = append(j.entry.Undo, step)
			}
			continue
		}
		uuid := j.targets[devices[0]].GPU.UUID
		now, err := steps.Ask(ctx, d.gpus, gpu, uuid, steps.Observe)
		if err != nil {
			return err
		}
		if err := checkCondition(ctx, gpu, &now.Readings); err != nil {
			return err
		}
		if err := d.checkProcesses(j, gpu, &now); err != nil {
			return err
		}
		list, err := d.stepsOn(j, gpu, devices, &now)
		if err != nil {
			return fmt.Errorf("device %s: %w", j.entry.Devices[devices[0]].Device, err)
		}
		for _, step := range list {
			step.GPU, step.Target = gpu, uuid
			if err := d.checkTimeSlice(ctx, j, step); err != nil {
				return err
			}
			j.entry.Undo = append(j.entry.Undo, step)
		}
	}
	if daemon, err := j.daemon(false); err != nil {
		return err
	} else if daemon != nil {
		if err := d.checkEnded(j.entry.Claim, daemon); err != nil {
			return err
		}
		if err := d.checkDaemon(ctx, daemon); err != nil {
			return err
		}
		j.entry.Undo = append(j.entry.Undo, ledger.Step{Kind: ledger.StepMPSDaemon, Target: daemon.Name, GPU: daemon.gpu, Shared: daemon.shared})
	}
	j.entry.Undo = append(j.entry.Undo, d.files.CDIFile(j.entry.Claim.UID))
	return nil
}

// stepsOn lists what has to be done to one GPU, of which the claim has one device or several partitions.
func (d *decider) stepsOn(j *job, gpu string, devices []int, now *steps.Observed) ([]ledger.Step, error) {
	if j.entry.Devices[devices[0]].Share != nil {
		return d.shareSteps(j, gpu, j.settings[devices[0]], now)
	}
	if j.targets[devices[0]].Partition == nil {
		return wholeSteps(j.settings[devices[0]], now)
	}
	ours, err := d.holders.switchedMIG(gpu, j.entry.BootID)
	if err == nil && !ours {
		ours, err = d.quarantines.switchedMIG(gpu, j.entry.BootID)
	}
	if err != nil {
		return nil, err
	}
	list, err := steps.MIGMode(now, ours, j.targets[devices[0]].SwitchesMIG)
	if err != nil {
		return nil, err
	}
	for _, i := range devices {
		made, err := steps.Partition(now, j.targets[i].Partition)
		if err != nil {
			return nil, err
		}
		list = append(list, made...)
	}
	for _, i := range devices {
		list = append(list, ledger.Step{Kind: ledger.StepProcesses, Partition: j.targets[i].Partition})
	}
	return list, nil
}

// wholeSteps bring a GPU to a known state, and to what its settings ask for.
func wholeSteps(settings config.Settings, now *steps.Observed) ([]ledger.Step, error) {
	want := nvml.ComputeDefault
	if settings.Strategy == config.Exclusive || settings.Strategy == config.MPS {
		// With MPS the one process is the daemon's server.
		want = nvml.ComputeExclusiveProcess
	}
	if now.MIG.Enabled {
		return nil, errPartitioned
	}
	if err := steps.Restorable(now.Compute); err != nil {
		return nil, err
	}
	switch {
	case now.Compute == nil && want != nvml.ComputeDefault:
		return nil, fmt.Errorf("sharing.strategy: %q: the GPU has no compute modes", settings.Strategy)
	case now.Compute != nil && *now.Compute == nvml.ComputeProhibited:
		return nil, fmt.Errorf("compute mode is %s: an administrator keeps everybody off the GPU", nvml.ComputeProhibited)
	}
	return slices.Concat(steps.Persistence(now), steps.ComputeMode(now, want), steps.TimeSlice(settings), steps.Processes(now)), nil
}

var errPartitioned = errors.New("MIG mode is enabled, so the GPU can only be used in partitions")

// passthroughSteps lists what has to be done to give a whole GPU to a virtual machine.
func (d *decider) passthroughSteps(ctx context.Context, target *Target) ([]ledger.Step, error) {
	sysfs, err := d.pci.Kernel()
	if err != nil {
		return nil, err
	}
	group, err := vfio.GroupOf(sysfs, target.GPU.PCIBusID)
	if err != nil {
		return nil, err
	}
	var list []ledger.Step
	if on, err := steps.OnNVIDIA(group, &target.GPU); err != nil {
		return nil, err
	} else if on {
		if list, err = d.leaveNVML(ctx, target); err != nil {
			return nil, err
		}
	}
	functions, err := d.pci.PCIDrivers(ctx, group)
	if err != nil {
		return nil, err
	}
	return append(slices.Concat(list, functions), ledger.Step{Kind: ledger.StepIOMMUGroup, Target: group.ID}), nil
}

// leaveNVML lists what has to be done to a GPU while NVML sees it, and refuses one that is not idle.
func (d *decider) leaveNVML(ctx context.Context, target *Target) ([]ledger.Step, error) {
	gpu, uuid := target.GPU.Name, target.GPU.UUID
	now, err := steps.Ask(ctx, d.gpus, gpu, uuid, steps.Observe)
	if err != nil {
		return nil, err
	}
	if err := checkCondition(ctx, gpu, &now.Readings); err != nil {
		return nil, err
	}
	switch {
	case now.MIG.Enabled:
		return nil, errPartitioned
	case len(now.Processes) > 0:
		// Whosever it is: the driver does not let go of a GPU that is in use.
		return nil, d.pci.InUse(gpu, now.Processes[0].PID)
	}
	kept, keeper, err := d.keeper.Keeps(ctx, target.GPU.PCIBusID)
	if err != nil {
		return nil, err
	}
	except := []uint32{uint32(os.Getpid())}
	if kept {
		except = append(except, keeper)
	}
	if err := d.pci.CheckUnused(ctx, &target.GPU, except...); err != nil {
		return nil, err
	}
	if err := steps.Restorable(now.Compute); err != nil {
		return nil, err
	}
	list := slices.Concat(steps.ComputeMode(&now, nvml.ComputeDefault), steps.NoPersistence(&now, kept))
	list = append(list, ledger.Step{Kind: ledger.StepHidden})
	for i := range list {
		list[i].Target = uuid
	}
	return list, nil
}

// recoveryActions are NVML's, in the words of nvidia-smi.
var recoveryActions = []string{"none", "reset the GPU", "reboot the node", "drain P2P traffic", "drain and reset the GPU"}

// checkCondition refuses a GPU that cannot work. Memory errors in the past are no reason, but worth a
// line.
func checkCondition(ctx context.Context, gpu string, r *nvml.Readings) error {
	logger := klog.FromContext(ctx)
	if action := r.RecoveryAction; action != nil && *action != 0 {
		what := fmt.Sprintf("action %d", *action)
		if int(*action) < len(recoveryActions) {
			what = recoveryActions[*action]
		}
		return fmt.Errorf("GPU %s: the driver says that it does not work before this is done: %s", gpu, what)
	}
	if ecc := r.ECC; ecc != nil && ecc.Uncorrected > 0 {
		logger.Info("GPU has had memory errors since the driver was loaded", "device", gpu, "uncorrected", ecc.Uncorrected)
	}
	if rows := r.Rows; rows != nil && (rows.Pending || rows.Failed) {
		logger.Info("GPU has rows of memory to be replaced", "device", gpu, "pending", rows.Pending, "failed", rows.Failed)
	}
	return nil
}

// checkProcesses refuses a device that a process of another pod is on. Processes of the host, such as monitoring, and
// of pods with admin access are no reason. On a GPU that others have shares of, any may be of theirs: it takes
// until the next reconcile to learn which pods have come to use a claim after it was prepared.
func (d *decider) checkProcesses(j *job, gpu string, now *steps.Observed) error {
	entry := j.entry
	if hasShare(entry, gpu) {
		if others, err := d.holders.sharers(gpu, entry.Claim.UID, entry.BootID); err != nil || len(others) > 0 {
			return err
		}
	}
	for _, process := range now.Processes {
		if !concerns(entry, gpu, now.Instances, process) {
			continue
		}
		pod, err := d.processes.PodOf(process.PID)
		if errors.Is(err, sharing.ErrNoProcess) || err == nil && (pod == "" || slices.Contains(entry.Pods, pod)) {
			continue
		}
		if err != nil {
			return fmt.Errorf("claim %s: who uses GPU %s: %w", entry.Claim, gpu, err)
		}
		admins, err := d.holders.adminPods(gpu)
		if err != nil {
			return err
		}
		if !admins[pod] {
			return &BusyError{Claim: entry.Claim, GPU: gpu, PID: process.PID, Pod: pod}
		}
	}
	return nil
}

// concerns tells whether the process is on one of the claim's devices.
func concerns(entry *ledger.Entry, gpu string, instances []nvml.GPUInstance, process nvml.Process) bool {
	for _, device := range entry.Devices {
		if device.AdminAccess || device.GPU != gpu {
			continue
		}
		if device.Partition == nil || steps.IsIn(process, instances, device.Partition) {
			return true
		}
	}
	return false
}

// A GPU or a node may refuse a setting for ever. That is the claim's fault, not the GPU's: what cannot be read back is found out before
// anything is recorded, since undoing it would be refused, too. The rest is read first when it is undone.

// checkTimeSlice finds out whether the time slice can be set, with the default: that is what is put back in the end. One that others
// have set for those who share the GPU can.
func (d *decider) checkTimeSlice(ctx context.Context, j *job, step ledger.Step) error {
	if step.Kind != ledger.StepTimeSlice {
		return nil
	}
	if step.Shared {
		if kept, err := d.holders.kept(j.entry, step.GPU); kept || err != nil {
			return err
		}
	}
	if err := d.timeSlices.Reset(ctx, step); err != nil {
		return fmt.Errorf("%sno time slice can be set: %w", j.field(step), err)
	}
	return nil
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
