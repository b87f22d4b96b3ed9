package prepare

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// do makes one side effect, or finds that it is there already. The CDI file comes last and is the caller's. fresh tells that nothing has been done
// for the claim since the last boot.
func (m *Manager) do(ctx context.Context, j *job, step ledger.Step, fresh bool) (err error) {
	switch {
	case !step.Kind.Known():
		return errUnknownStep
	case step.Kind == ledger.StepProcesses, step.Kind == ledger.StepIOMMUGroup, step.Kind == ledger.StepCDIFile:
		return nil // the pods do the first ones, and the other one comes last
	case step.Kind == ledger.StepHidden:
		return nil // the steps after it do that
	case step.Kind == ledger.StepComputeMode, step.Kind == ledger.StepNoPersistence:
		if hidden, err := m.isHidden(j, step.GPU); hidden || err != nil {
			return err
		}
	}
	defer measure(preparing, step.Kind, time.Now(), &err)
	switch step.Kind {
	case ledger.StepMIGMode:
		return m.act(ctx, step.GPU, step.Target, enableMIG)
	case ledger.StepPartition:
		return m.act(ctx, step.GPU, step.Target, func(d nvml.Device) error { return makePartition(d, step.Partition, fresh) })
	case ledger.StepPersistence:
		err := m.act(ctx, step.GPU, step.Target, setPersistence(true))
		if refused(err) && !j.sets(step.GPU) {
			klog.FromContext(ctx).Info("Persistence mode cannot be switched on, and the claim has no settings that the driver could forget", "device", step.GPU, "reason", err.Error())
			return nil
		}
		return err
	case ledger.StepComputeMode:
		return m.act(ctx, step.GPU, step.Target, setComputeMode(step.Want))
	case ledger.StepNoPersistence:
		return m.act(ctx, step.GPU, step.Target, setPersistence(false))
	case ledger.StepPCIDriver:
		return m.take(ctx, j, step)
	case ledger.StepTimeSlice:
		return m.setTimeSlice(ctx, step, config.Interval(step.Want))
	case ledger.StepMPSDaemon:
		return m.startDaemon(ctx, step)
	default:
		return errUnknownStep
	}
}

// startDaemon starts an MPS daemon that does not run, as the step says.
func (m *Manager) startDaemon(ctx context.Context, step ledger.Step) error {
	ctx, cancel := context.WithTimeout(ctx, m.opts.GPUTimeout)
	defer cancel()
	return m.opts.Tools.Daemons.Start(ctx, daemonOf(step))
}

// daemonOf is the daemon that a step has, or will have, started.
func daemonOf(step ledger.Step) sharing.Daemon {
	return sharing.Daemon{
		Name: step.Target, GPUs: step.Daemon.GPUs, ActiveThreadPercentage: step.Daemon.ActiveThreadPercentage, MemoryMiB: step.Daemon.MemoryMiB,
		MultiUser: sharing.MultiUser(step.Daemon.MultiUser),
	}
}

var errUnknownStep = errors.New("this agent does not know this kind of step")

// setTimeSlice is an act on the GPU like those through NVML: the program that does it cannot be ended, either, while the driver hangs, and
// no second one is started meanwhile.
func (m *Manager) setTimeSlice(ctx context.Context, step ledger.Step, interval config.Interval) error {
	ctx, cancel := context.WithTimeout(ctx, m.opts.GPUTimeout)
	defer cancel()
	return m.act(ctx, step.GPU, step.Target, func(d nvml.Device) error {
		address, err := d.PCIBusID()
		if err != nil {
			return err
		}
		return m.opts.Tools.TimeSlicer.SetTimeSlice(ctx, address, interval)
	})
}

// setPersistence and setComputeMode change what is not so already: a GPU that refuses a change is no worse for being left as it is.
func setPersistence(on bool) func(nvml.Device) error {
	return func(d nvml.Device) error {
		if now, err := d.Persistence(); err != nil || now == on {
			return err
		}
		return d.SetPersistence(on)
	}
}

func setComputeMode(mode string) func(nvml.Device) error {
	return func(d nvml.Device) error {
		if now, err := d.ComputeMode(); err != nil || string(now) == mode {
			return err
		}
		return d.SetComputeMode(nvml.ComputeMode(mode))
	}
}

func enableMIG(d nvml.Device) error {
	mode, err := d.MIGMode()
	if err != nil || mode.Enabled {
		return err
	}
	return d.SetMIGMode(true)
}

// errPlaceTaken: somebody else has made an instance in the place, or where it would overlap, since the agent looked.
var errPlaceTaken = errors.New("somebody else has made a MIG instance there")

// makePartition makes what is missing of a GPU instance and its compute instance. If nothing has been done for the claim what is there is not
// the agent's.
func makePartition(d nvml.Device, at *ledger.Partition, fresh bool) error {
	instances, err := d.GPUInstances()
	if err != nil {
		return err
	}
	found := inPlace(instances, at)
	if found != nil && fresh {
		return errPlaceTaken
	}
	if found == nil {
		profile := nvml.MIGProfile{Name: at.Profile, ID: at.ProfileID}
		id, err := d.CreateGPUInstance(profile, nvml.Placement{Start: at.Start, Size: at.Size})
		if errors.Is(err, nvml.ErrNoResources) {
			return fmt.Errorf("%w: %w", errPlaceTaken, err)
		}
		if err != nil {
			return err
		}
		found = &nvml.GPUInstance{ID: id}
	}
	if len(found.Devices) == 0 {
		_, err = d.CreateComputeInstance(found.ID)
	}
	return err
}

// identify finds the UUIDs of the claim's MIG devices.
func (m *Manager) identify(ctx context.Context, j *job) error {
	for i := range j.entry.Devices {
		device := &j.entry.Devices[i]
		if device.Partition == nil {
			continue
		}
		uuid, err := ask(ctx, m, device.GPU, device.PhysicalUUID(), func(d nvml.Device) (string, error) {
			instances, err := d.GPUInstances()
			if err != nil {
				return "", err
			}
			found, err := migDeviceIn(instances, device.Partition)
			if err != nil {
				return "", err
			}
			return found.UUID, nil
		})
		if err != nil {
			return fmt.Errorf("claim %s, request %s, device %s: %w", j.entry.Claim, device.Request, device.Device, err)
		}
		device.UUID = uuid
	}
	return nil
}

// describeDevices returns the CDI specification for the claim's devices, which are made.
func (m *Manager) describeDevices(ctx context.Context, j *job) ([]byte, error) {
	devices := make([]cdi.Device, 0, len(j.entry.Devices))
	for i, device := range j.entry.Devices {
		gpu := j.targets[i].GPU
		gpu.UUID = device.UUID
		described := cdi.Device{Request: device.Request, Name: device.Device, GPU: gpu}
		switch {
		case device.Passthrough:
			var err error
			if described.Nodes, err = m.nodes(&j.targets[i], j.settings[i].VFIO); err != nil {
				return nil, fmt.Errorf("claim %s, request %s, device %s: %w", j.entry.Claim, device.Request, device.Device, err)
			}
		case device.Share != nil:
			var err error
			if described.Extra, err = m.shareEdits(j, i); err != nil {
				return nil, err
			}
			described.Share = *device.ShareID
		case j.settings[i].Strategy == config.MPS && !device.AdminAccess:
			described.Extra = m.opts.Tools.Daemons.Edits(string(j.entry.Claim.UID))
		}
		if mount := m.metadataMount(j, i); mount != nil {
			described.Mounts = append(described.Mounts, mount)
		}
		devices = append(devices, described)
	}
	spec, err := cdi.BuildSpec(ctx, patient{m.opts.Backend, m.opts.GPUTimeout}, j.entry.Claim.UID, devices)
	if err != nil {
		return nil, fmt.Errorf("claim %s: %w", j.entry.Claim, err)
	}
	data, err := cdi.Encode(spec)
	if err != nil {
		return nil, fmt.Errorf("claim %s: %w", j.entry.Claim, err)
	}
	return data, nil
}

// patient waits no longer than that for what a backend finds out by asking NVML, which cannot be cancelled.
type patient struct {
	cdi.Backend
	timeout time.Duration
}

// CommonEdits implements cdi.Backend.
func (p patient) CommonEdits(ctx context.Context) (*specs.ContainerEdits, error) {
	return p.wait(ctx, p.Backend.CommonEdits)
}

// GPUEdits implements cdi.Backend.
func (p patient) GPUEdits(ctx context.Context, gpu cdi.GPU) (*specs.ContainerEdits, error) {
	return p.wait(ctx, func(ctx context.Context) (*specs.ContainerEdits, error) { return p.Backend.GPUEdits(ctx, gpu) })
}

func (p patient) wait(ctx context.Context, f func(context.Context) (*specs.ContainerEdits, error)) (*specs.ContainerEdits, error) {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	type answer struct {
		edits *specs.ContainerEdits
		err   error
	}
	answers := make(chan answer, 1)
	go func() {
		edits, err := f(ctx)
		answers <- answer{edits, err}
	}()
	select {
	case a := <-answers:
		return a.edits, a.err
	case <-ctx.Done():
		return nil, fmt.Errorf("the driver does not answer: %w", ctx.Err())
	}
}

// undo takes one side effect back; one that never happened is taken back with success.
func (m *Manager) undo(ctx context.Context, entry *ledger.Entry, step ledger.Step) (err error) {
	if !step.Kind.Known() {
		return errUnknownStep
	}
	defer measure(unpreparing, step.Kind, time.Now(), &err)
	if step.Kind == ledger.StepCDIFile {
		if err := m.store.Remove(entry.Claim.UID, step.Target); err != nil {
			return err
		}
		return m.removeMetadata(entry.Claim.UID)
	}
	if step.Shared {
		if kept, err := m.keptByOthers(entry, step.GPU); kept || err != nil {
			return err
		}
	}
	if step.Kind == ledger.StepMPSDaemon {
		ctx, cancel := context.WithTimeout(ctx, m.opts.GPUTimeout)
		defer cancel()
		return m.opts.Tools.Daemons.Stop(ctx, step.Target)
	}
	if ended, err := m.endedByReboot(entry); ended || err != nil {
		return err
	}
	switch step.Kind {
	case ledger.StepMIGMode:
		return m.act(ctx, step.GPU, step.Target, disableMIG)
	case ledger.StepPartition:
		return m.act(ctx, step.GPU, step.Target, func(d nvml.Device) error { return destroyPartition(d, step.Partition) })
	case ledger.StepPersistence:
		return m.act(ctx, step.GPU, step.Target, setPersistence(false))
	case ledger.StepComputeMode:
		return m.act(ctx, step.GPU, step.Target, setComputeMode(step.Before))
	case ledger.StepTimeSlice:
		return m.setTimeSlice(ctx, step, config.IntervalDefault)
	case ledger.StepProcesses:
		return m.clear(ctx, entry, step)
	case ledger.StepNoPersistence:
		return m.act(ctx, step.GPU, step.Target, setPersistence(true))
	case ledger.StepHidden:
		return m.awaitNVML(ctx, step)
	case ledger.StepPCIDriver:
		return m.giveBack(ctx, step)
	case ledger.StepIOMMUGroup:
		return m.clearGroup(ctx, entry, step)
	default:
		return errUnknownStep
	}
}

// endedByReboot tells that nothing on a GPU can be left of the claim.
func (m *Manager) endedByReboot(entry *ledger.Entry) (bool, error) {
	if entry.BootID == "" {
		return false, nil
	}
	now, err := m.opts.Hardware.BootID()
	return err == nil && now != entry.BootID, err
}

// destroyPartition ends the instances in the place, which the ledger says were made by the agent.
func destroyPartition(d nvml.Device, at *ledger.Partition) error {
	instances, err := d.GPUInstances()
	if err != nil {
		return err
	}
	found := inPlace(instances, at)
	if found == nil {
		return nil
	}
	for _, device := range found.Devices {
		if err := d.DestroyComputeInstance(device.GPUInstance, device.ComputeInstance); err != nil && !errors.Is(err, nvml.ErrNotFound) {
			return err
		}
	}
	if err := d.DestroyGPUInstance(found.ID); err != nil && !errors.Is(err, nvml.ErrNotFound) {
		return err
	}
	return nil
}

// disableMIG leaves MIG on as long as there are instances, of other claims or of an administrator.
func disableMIG(d nvml.Device) error {
	mode, err := d.MIGMode()
	if err != nil || !mode.Enabled {
		return err
	}
	instances, err := d.GPUInstances()
	if err != nil || len(instances) > 0 {
		return err
	}
	return d.SetMIGMode(false)
}
