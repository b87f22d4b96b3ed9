package prepare

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// job is a claim on its way through prepare. The devices of the entry, the targets and the settings are parallel.
type job struct {
	entry *ledger.Entry
	// podClaim is the name by which its pods' specs know the claim, if it was made from a template.
	podClaim string
	targets  []Target
	settings []config.Settings
	// refused is why the claim must not be prepared anew. A claim that is prepared stays so.
	refused error
	// prepared: the claim was, when this began.
	prepared bool
	// begun is how many of the entry's steps have been begun.
	begun int
}

// byGPU returns the indices of the devices that hold each physical GPU, or a part of it.
func (j *job) byGPU() map[string][]int {
	held := map[string][]int{}
	for i, device := range j.entry.Devices {
		if !device.AdminAccess {
			held[device.GPU] = append(held[device.GPU], i)
		}
	}
	return held
}

// decide looks at the claim's GPUs and lists what is going to be done to them, without doing it. The caller has
// the GPUs' locks.
func (m *Manager) decide(ctx context.Context, j *job) error {
	var err error
	if j.entry.BootID, err = m.opts.Hardware.BootID(); err != nil {
		return err
	}
	held := j.byGPU()
	for _, gpu := range slices.Sorted(maps.Keys(held)) {
		devices := held[gpu]
		if j.targets[devices[0]].Passthrough {
			steps, err := m.passthroughSteps(ctx, j, devices[0])
			if err != nil {
				return fmt.Errorf("device %s: %w", j.entry.Devices[devices[0]].Device, err)
			}
			for _, step := range steps {
				step.GPU = gpu
				j.entry.Undo = append(j.entry.Undo, step)
			}
			continue
		}
		uuid := j.targets[devices[0]].GPU.UUID
		now, err := ask(ctx, m, gpu, uuid, observe)
		if err != nil {
			return err
		}
		if err := checkCondition(ctx, gpu, &now.readings); err != nil {
			return err
		}
		if err := m.checkProcesses(j, gpu, &now); err != nil {
			return err
		}
		steps, err := m.stepsOn(j, gpu, devices, &now)
		if err != nil {
			return fmt.Errorf("device %s: %w", j.entry.Devices[devices[0]].Device, err)
		}
		for _, step := range steps {
			step.GPU, step.Target = gpu, uuid
			if err := m.checkTimeSlice(ctx, j, step); err != nil {
				return err
			}
			j.entry.Undo = append(j.entry.Undo, step)
		}
	}
	if daemon, err := j.daemon(false); err != nil {
		return err
	} else if daemon != nil {
		if err := m.checkEnded(j.entry.Claim, daemon); err != nil {
			return err
		}
		if err := m.checkDaemon(ctx, daemon); err != nil {
			return err
		}
		j.entry.Undo = append(j.entry.Undo, ledger.Step{Kind: ledger.StepMPSDaemon, Target: daemon.Name, GPU: daemon.gpu, Shared: daemon.shared})
	}
	j.entry.Undo = append(j.entry.Undo, ledger.Step{Kind: ledger.StepCDIFile, Target: m.store.Path(j.entry.Claim.UID)})
	return nil
}

// stepsOn lists what has to be done to one GPU, of which the claim has one device or several partitions.
func (m *Manager) stepsOn(j *job, gpu string, devices []int, now *observed) ([]ledger.Step, error) {
	if j.entry.Devices[devices[0]].Share != nil {
		return m.shareSteps(j, gpu, j.settings[devices[0]], now)
	}
	if j.targets[devices[0]].Partition == nil {
		return wholeSteps(j.settings[devices[0]], now)
	}
	var steps []ledger.Step
	modeIsOurs, err := m.switchedMIG(gpu, j.entry.BootID)
	switch {
	case err != nil:
		return nil, err
	case !now.mig.Enabled && !j.targets[devices[0]].SwitchesMIG:
		return nil, errors.New("MIG mode is disabled, and on this GPU it can only be enabled with a reset: use nvidia-smi -mig 1 on the node and reset the GPU")
	case !now.mig.Enabled, modeIsOurs:
		steps = append(steps, ledger.Step{Kind: ledger.StepMIGMode})
	}
	for _, i := range devices {
		at := j.targets[i].Partition
		if at.ComputeSize > 0 {
			// The agent makes no such.
			if _, err := migDeviceIn(now.instances, at); err != nil {
				return nil, err
			}
			continue
		}
		// An instance that is there was made by an administrator: of ours there would be a holder.
		if inPlace(now.instances, at) == nil {
			steps = append(steps, ledger.Step{Kind: ledger.StepPartition, Partition: at})
		}
	}
	for _, i := range devices {
		steps = append(steps, ledger.Step{Kind: ledger.StepProcesses, Partition: j.targets[i].Partition})
	}
	return steps, nil
}

// wholeSteps bring a GPU to a known state, and to what its settings ask for.
func wholeSteps(settings config.Settings, now *observed) ([]ledger.Step, error) {
	if now.mig.Enabled {
		return nil, errors.New("MIG mode is enabled, so the GPU can only be used in partitions")
	}
	var steps []ledger.Step
	if now.persistence != nil && !*now.persistence {
		// Without it the driver forgets the settings whenever nobody has the GPU open.
		steps = append(steps, ledger.Step{Kind: ledger.StepPersistence})
	}
	want := nvml.ComputeDefault
	if settings.Strategy == config.Exclusive || settings.Strategy == config.MPS {
		// With MPS the one process is the daemon's server.
		want = nvml.ComputeExclusiveProcess
	}
	if err := restorable(now.compute); err != nil {
		return nil, err
	}
	switch {
	case now.compute == nil && want != nvml.ComputeDefault:
		return nil, fmt.Errorf("sharing.strategy: %q: the GPU has no compute modes", settings.Strategy)
	case now.compute != nil && *now.compute == nvml.ComputeProhibited:
		return nil, fmt.Errorf("compute mode is %s: an administrator keeps everybody off the GPU", nvml.ComputeProhibited)
	case now.compute != nil && *now.compute != want:
		steps = append(steps, ledger.Step{Kind: ledger.StepComputeMode, Before: string(*now.compute), Want: string(want)})
	}
	if settings.Strategy == config.TimeSlicing && settings.Interval != config.IntervalDefault {
		steps = append(steps, ledger.Step{Kind: ledger.StepTimeSlice, Want: string(settings.Interval)})
	}
	return append(steps, ledger.Step{Kind: ledger.StepProcesses, Before: strconv.FormatUint(now.usedBytes, 10)}), nil
}

// restorable refuses a compute mode that the agent does not know: it could not be put back, and the GPU would be in quarantine for ever.
func restorable(mode *nvml.ComputeMode) error {
	if mode == nil || mode.Known() {
		return nil
	}
	return fmt.Errorf("compute mode is %s, which this agent could not put back: use nvidia-smi -c DEFAULT on the node", *mode)
}

// switchedMIG tells whether the GPU's MIG mode was enabled for other claims that have partitions of it. The last
// of them to go takes it back.
func (m *Manager) switchedMIG(gpu, bootID string) (bool, error) {
	holders, err := m.ledger.Holders(gpu)
	if err != nil {
		return false, err
	}
	for _, holder := range holders {
		if holder.Entry == nil || holder.Entry.BootID != bootID {
			continue
		}
		for _, step := range holder.Entry.Undo {
			if step.Kind == ledger.StepMIGMode && step.GPU == gpu {
				return true, nil
			}
		}
	}
	return false, nil
}

// served is the MPS daemon that serves devices of a claim.
type served struct {
	sharing.Daemon
	// gpu is what its step is recorded for, of all that it serves.
	gpu string
	// shared: it serves all that have a share of that GPU.
	shared bool
}

// daemon is the MPS daemon for the claim's devices, nil if none wants one. There is one for all of them, because a
// container knows one daemon only; the claims that share a GPU have one together, which limits nobody: their containers
// bring their limits along. Before they are made, MIG devices have no UUIDs to look limits up for.
func (j *job) daemon(made bool) (*served, error) {
	var daemon *served
	var first *ledger.Device
	var limits *config.Limits
	partitions := 0
	for i, settings := range j.settings {
		device := &j.entry.Devices[i]
		if settings.Strategy != config.MPS || device.AdminAccess {
			continue
		}
		next := served{Daemon: sharing.Daemon{Name: string(j.entry.Claim.UID)}, gpu: j.entry.HeldGPUs()[0]}
		if device.Share != nil {
			// Who shares it does not know as which users the others run.
			next = served{Daemon: sharing.Daemon{Name: device.GPU, MultiUser: sharing.MultiUserIfPossible}, gpu: device.GPU, shared: true}
			if _, err := mpsLimit(settings.MPS, device, j.granted(device.Request, device.GPU)); err != nil {
				return nil, refuse(device, err)
			}
		}
		if daemon == nil {
			daemon, first, limits = &next, device, settings.MPS
		}
		if daemon.Name != next.Name {
			return nil, refuse(device, fmt.Errorf("sharing.strategy: %q: a container can only use one MPS daemon, and each GPU that is shared by several claims has its own: put the requests into claims of their own, or let all be for one GPU", config.MPS))
		}
		if daemon.shared {
			if len(daemon.GPUs) == 0 {
				daemon.GPUs = append(daemon.GPUs, device.UUID)
			}
			continue
		}
		if !reflect.DeepEqual(limits, settings.MPS) {
			return nil, refuse(device, errors.New("sharing.mpsConfig: it differs from that of another request, and a container can only use one MPS daemon: put the requests into claims of their own"))
		}
		if j.targets[i].Partition != nil {
			partitions++
		}
		daemon.GPUs = append(daemon.GPUs, j.entry.Devices[i].UUID)
	}
	if daemon == nil || daemon.shared {
		return daemon, nil
	}
	if partitions > 1 || partitions == 1 && len(daemon.GPUs) > 1 {
		return nil, refuse(first, fmt.Errorf("sharing.strategy: %q: an MPS daemon serves one MIG device alone, and the claim has %d devices for it", config.MPS, len(daemon.GPUs)))
	}
	daemon.ActiveThreadPercentage = limits.ActiveThreadPercentage
	if limits.MultiUser {
		daemon.MultiUser = sharing.MultiUserYes
	}
	var err error
	if daemon.MemoryMiB, err = limits.MemoryOf(daemon.GPUs); err != nil && (made || partitions == 0) {
		return nil, refuse(first, err)
	}
	return daemon, nil
}

// refuse says that the parameters for a device are refused, beside those of others or for the devices that the claim got.
func refuse(device *ledger.Device, err error) error {
	return &config.Error{Path: "request " + device.Request, Err: err}
}

// checkEnded refuses a daemon as long as one of that name is owed for other GPUs, which the claim had before: that one would be taken for it,
// and ended with what is owed.
func (m *Manager) checkEnded(claim ledger.Claim, daemon *served) error {
	list, err := m.quarantined("")
	if err != nil {
		return err
	}
	for _, q := range list {
		if q.Owed != nil && slices.ContainsFunc(q.Owed.Undo, func(s ledger.Step) bool { return s.Kind == ledger.StepMPSDaemon && s.Target == daemon.Name }) {
			return &QuarantinedError{GPU: q.GPU, Reason: q.Reason, Since: q.Since, Owed: q.Owed.Claim, Claim: claim, Err: errors.New("the MPS daemon that the claim had on it has not ended, and it can have one at a time")}
		}
	}
	return nil
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

// BusyError says that a process of another pod is on a GPU that nobody holds. The text does not say whose: it may be another namespace's.
type BusyError struct {
	Claim ledger.Claim
	GPU   string
	PID   uint32
	Pod   types.UID
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("claim %s: GPU %s is in use by a process of another pod, which has no claim for it on this node", e.Claim, e.GPU)
}

// checkProcesses refuses a device that a process of another pod is on. Processes of the host, such as monitoring, and
// of pods with admin access are no reason. On a GPU that others have shares of, any may be of theirs: it takes
// until the next reconcile to learn which pods have come to use a claim after it was prepared.
func (m *Manager) checkProcesses(j *job, gpu string, now *observed) error {
	entry := j.entry
	if hasShare(entry, gpu) {
		if others, err := m.sharers(gpu, entry.Claim.UID, entry.BootID); err != nil || len(others) > 0 {
			return err
		}
	}
	var admins map[types.UID]bool // looked up only if there is a process
	for _, process := range now.processes {
		if !concerns(entry, gpu, now.instances, process) {
			continue
		}
		pod, err := m.opts.Tools.Processes.PodOf(process.PID)
		if errors.Is(err, sharing.ErrNoProcess) || err == nil && (pod == "" || slices.Contains(entry.Pods, pod)) {
			continue
		}
		if err != nil {
			return fmt.Errorf("claim %s: who uses GPU %s: %w", entry.Claim, gpu, err)
		}
		if admins == nil {
			if admins, err = m.adminPods(gpu); err != nil {
				return err
			}
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
		if device.Partition == nil || isIn(process, instances, device.Partition) {
			return true
		}
	}
	return false
}

// isIn tells whether the process is in the place.
func isIn(process nvml.Process, instances []nvml.GPUInstance, at *ledger.Partition) bool {
	instance := inPlace(instances, at)
	if instance == nil || process.Instance == nil || process.Instance.GPU != instance.ID {
		return false
	}
	if at.ComputeSize == 0 {
		return true
	}
	device, err := migDeviceIn(instances, at)
	return err == nil && process.Instance.Compute == device.ComputeInstance
}

// adminPods are the pods that use the GPU without holding it.
func (m *Manager) adminPods(gpu string) (map[types.UID]bool, error) {
	records, err := m.ledger.Records()
	if err != nil {
		return nil, err
	}
	pods := map[types.UID]bool{}
	for _, record := range records {
		if record.Entry == nil {
			continue
		}
		for _, device := range record.Entry.Devices {
			if device.AdminAccess && device.GPU == gpu {
				for _, pod := range record.Entry.Pods {
					pods[pod] = true
				}
			}
		}
	}
	return pods, nil
}
