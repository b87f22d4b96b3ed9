package prepare

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// A GPU that is passed through to a virtual machine leaves the NVIDIA driver: every function of its IOMMU group goes to vfio-pci, and
// NVML does not see the GPU until they are given back. What NVML keeps of it by then (persistence, compute mode) is put back
// afterwards, which is why those steps come before StepHidden, and are undone after it.

const (
	nvidiaDriver = "nvidia"
	// returnPoll is the pause after the first look for a GPU that was given back. Each look is one at the whole node, so the pauses grow.
	returnPoll = 200 * time.Millisecond
)

// kernel is what functions are seen through; the error says that there is none.
func (m *Manager) kernel() (vfio.Sysfs, error) {
	if m.opts.PCI == nil || m.opts.Users == nil {
		return nil, errors.New("this agent has no access to the PCI bus")
	}
	return m.opts.PCI.Sysfs(), nil
}

// passthroughSteps lists what has to be done to give device i of the claim, a whole GPU, to a virtual machine.
func (m *Manager) passthroughSteps(ctx context.Context, j *job, i int) ([]ledger.Step, error) {
	target := &j.targets[i]
	sysfs, err := m.kernel()
	if err != nil {
		return nil, err
	}
	group, err := vfio.GroupOf(sysfs, target.PCIBusID)
	if err != nil {
		return nil, err
	}
	var steps []ledger.Step
	for _, f := range group.Functions {
		if f.Address != target.PCIBusID || f.Driver == vfio.Driver {
			continue
		}
		if f.Driver != nvidiaDriver {
			return nil, fmt.Errorf("GPU %s has the driver %q: it is taken from the driver %s only", target.GPU.Name, f.Driver, nvidiaDriver)
		}
		if steps, err = m.leaveNVML(ctx, target); err != nil {
			return nil, err
		}
	}
	for _, f := range group.Functions {
		if f.Driver == vfio.Driver {
			continue // an administrator wants it so
		}
		step := ledger.Step{Kind: ledger.StepPCIDriver, Target: f.Address, Before: f.Driver, Want: vfio.Driver}
		override, err := m.override(ctx, f.Address)
		if err != nil {
			return nil, err
		}
		if override != vfio.Driver {
			step.Override = override
		}
		steps = append(steps, step)
	}
	return append(steps, ledger.Step{Kind: ledger.StepIOMMUGroup, Target: group.ID}), nil
}

// override is the only driver that may have the function.
func (m *Manager) override(ctx context.Context, address string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, m.opts.GPUTimeout)
	defer cancel()
	return m.opts.PCI.Override(ctx, address)
}

// leaveNVML lists what has to be done to a GPU while NVML sees it, and refuses one that is not idle.
func (m *Manager) leaveNVML(ctx context.Context, target *Target) ([]ledger.Step, error) {
	gpu, uuid := target.GPU.Name, target.GPU.UUID
	now, err := ask(ctx, m, gpu, uuid, observe)
	if err != nil {
		return nil, err
	}
	if err := checkCondition(ctx, gpu, &now.readings); err != nil {
		return nil, err
	}
	switch {
	case now.mig.Enabled:
		return nil, errors.New("MIG mode is enabled, so the GPU can only be used in partitions")
	case len(now.processes) > 0:
		// Whosever it is: the driver does not let go of a GPU that is in use.
		return nil, &InUseError{GPU: gpu, PID: now.processes[0].PID}
	}
	if err := m.checkUnused(ctx, target, os.Getpid()); err != nil {
		return nil, err
	}
	if err := restorable(now.compute); err != nil {
		return nil, err
	}
	var steps []ledger.Step
	if now.compute != nil && *now.compute != nvml.ComputeDefault {
		steps = append(steps, ledger.Step{Kind: ledger.StepComputeMode, Target: uuid, Before: string(*now.compute), Want: string(nvml.ComputeDefault)})
	}
	if now.persistence != nil && *now.persistence {
		// NVIDIA's daemon has the GPU open as long as it is on.
		steps = append(steps, ledger.Step{Kind: ledger.StepNoPersistence, Target: uuid})
	}
	return append(steps, ledger.Step{Kind: ledger.StepHidden, Target: uuid}), nil
}

// InUseError says that a process has a GPU open that is to leave its driver, or an IOMMU group that is to go back.
type InUseError struct {
	GPU string
	PID uint32
}

func (e *InUseError) Error() string {
	return fmt.Sprintf("GPU %s is open in process %d, so its driver would not let go of it", e.GPU, e.PID)
}

// checkUnused refuses a GPU that a process has open, other than the one excepted.
func (m *Manager) checkUnused(ctx context.Context, target *Target, except int) error {
	pids, err := m.opts.Users.Of(ctx, fmt.Sprintf("/dev/nvidia%d", target.GPU.Minor))
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if int(pid) != except {
			return &InUseError{GPU: target.GPU.Name, PID: pid}
		}
	}
	return nil
}

// take gives a function to vfio-pci. The NVIDIA driver lets go of a GPU only while nobody, this agent included, has it open.
func (m *Manager) take(ctx context.Context, j *job, step ledger.Step) error {
	sysfs, err := m.kernel()
	if err != nil {
		return err
	}
	f, err := vfio.ReadFunction(sysfs, step.Target)
	if err != nil {
		return err
	}
	bind := func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, m.opts.GPUTimeout)
		defer cancel()
		return m.opts.PCI.Take(ctx, step.Target)
	}
	if f.Driver != nvidiaDriver {
		return bind(ctx)
	}
	target := j.passedThrough(step.GPU)
	if target == nil {
		return fmt.Errorf("the claim has no GPU %s for a virtual machine", step.GPU)
	}
	return m.opts.Hardware.Apart(ctx, func(ctx context.Context) error {
		if err := m.checkUnused(ctx, target, 0); err != nil {
			return err
		}
		return bind(ctx)
	})
}

// passedThrough is the claim's target that is that GPU for a virtual machine, nil if there is none.
func (j *job) passedThrough(gpu string) *Target {
	for i := range j.targets {
		if target := &j.targets[i]; target.Passthrough && target.GPU.Name == gpu {
			return target
		}
	}
	return nil
}

// isHidden tells whether the GPU has left NVML for the claim, so that what was to be done to it before that is done.
func (m *Manager) isHidden(j *job, gpu string) (bool, error) {
	target := j.passedThrough(gpu)
	if target == nil {
		return false, nil
	}
	sysfs, err := m.kernel()
	if err != nil {
		return false, err
	}
	f, err := vfio.ReadFunction(sysfs, target.PCIBusID)
	return f.Driver != nvidiaDriver, err // also where it was left between the two drivers
}

// giveBack is take's reverse. A function that has been unplugged needs none.
func (m *Manager) giveBack(ctx context.Context, step ledger.Step) error {
	if _, err := m.kernel(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, m.opts.GPUTimeout)
	defer cancel()
	err := m.opts.PCI.GiveBack(ctx, step.Target, step.Before, step.Override)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// awaitNVML returns when NVML sees the GPU again.
func (m *Manager) awaitNVML(ctx context.Context, step ledger.Step) error {
	seen := func(ctx context.Context) error {
		_, err := ask(ctx, m, step.GPU, step.Target, nvml.Device.UUID)
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, m.opts.GPUTimeout)
	defer cancel()
	for pause := returnPoll; ; pause *= 2 {
		err := m.opts.Hardware.Look(ctx)
		if err == nil {
			err = seen(ctx)
		}
		if err == nil {
			return nil
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return fmt.Errorf("the GPU was given back to its driver, and NVML does not see it: %w", errors.Join(ctx.Err(), err))
		}
	}
}

// clearGroup returns when nobody has the IOMMU group open: vfio-pci would not let go of its functions.
func (m *Manager) clearGroup(ctx context.Context, entry *ledger.Entry, step ledger.Step) error {
	sysfs, err := m.kernel()
	if err != nil {
		return err
	}
	var last error
	err = wait.PollUntilContextTimeout(ctx, endPoll, m.opts.EndTimeout, true, func(ctx context.Context) (bool, error) {
		pids, err := m.opts.Users.Of(ctx, vfio.NodesOf(sysfs, step.Target)...)
		if err != nil || len(pids) == 0 {
			return err == nil, err
		}
		last = &InUseError{GPU: step.GPU, PID: pids[0]}
		for _, pid := range pids {
			pod, err := m.opts.Tools.Processes.PodOf(pid)
			switch {
			case errors.Is(err, sharing.ErrNoProcess):
				continue
			case err != nil:
				return false, err
			case pod == "" || !slices.Contains(entry.Pods, pod):
				continue
			case m.opts.Leftovers == QuarantineLeftovers:
				return false, last
			}
			klog.FromContext(ctx).Info("Process of a claim's pod still has its GPU open and is ended", "device", step.GPU, "pid", pid, "podUID", pod, "claim", klog.KRef(entry.Claim.Namespace, entry.Claim.Name))
			if err := m.opts.Tools.Processes.End(pid, pod); err != nil {
				return false, err
			}
		}
		return false, nil
	})
	if err != nil && last != nil {
		return last
	}
	return err
}

// nodes are those that a virtual machine's container gets for the GPU, by their names below /dev. All functions of the group must be
// with vfio-pci: otherwise the virtual machine could not open it.
func (m *Manager) nodes(target *Target, settings config.VFIO) ([]string, error) {
	sysfs, err := m.kernel()
	if err != nil {
		return nil, err
	}
	group, err := vfio.GroupOf(sysfs, target.PCIBusID)
	if err != nil {
		return nil, err
	}
	byFunction := settings.PreferIOMMUFD && vfio.HasIOMMUFD(sysfs)
	paths := []string{group.Node()}
	api := vfio.ContainerNode
	if byFunction {
		paths, api = nil, vfio.IOMMUFDNode
	}
	for _, f := range group.Functions {
		if f.Driver != vfio.Driver {
			return nil, fmt.Errorf("PCI function %s of IOMMU group %s has the driver %q, not %s", f.Address, group.ID, f.Driver, vfio.Driver)
		}
		if !byFunction {
			continue
		}
		node, err := vfio.FunctionNode(sysfs, f.Address)
		if err != nil {
			return nil, err
		}
		paths = append(paths, node)
	}
	if !settings.NoAPIDevice {
		paths = append(paths, api)
	}
	for i := range paths {
		paths[i] = strings.TrimPrefix(paths[i], "/dev/")
	}
	return paths, nil
}
