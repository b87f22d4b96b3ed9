package steps

import (
	"context"
	"errors"
	"fmt"
	"time"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// A GPU that is passed through to a virtual machine leaves the NVIDIA driver: every function of its IOMMU group goes to vfio-pci, and
// NVML does not see the GPU until they are given back. What NVML keeps of it by then (persistence, compute mode) is put back
// afterwards, which is why those steps come before StepHidden, and are undone after it.

// nvidiaDriver is the kernel's name of it.
const nvidiaDriver = "nvidia"

// PCI is the bus, and who uses what is on it. Both fields are nil for an agent without access to it.
type PCI struct {
	Binder *vfio.Binder
	Users  vfio.Users
	// Timeout is for one act.
	Timeout time.Duration
}

// Kernel is what functions are seen through; the error says that there is none.
func (p PCI) Kernel() (vfio.Sysfs, error) {
	if p.Binder == nil {
		return nil, errors.New("this agent has no access to the PCI bus")
	}
	return p.Binder.Sysfs(), nil
}

// act does something that the kernel may not return from.
func (p PCI) act(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	return f(ctx)
}

// OnNVIDIA tells whether the GPU of the group is to be taken from the NVIDIA driver. An administrator may have given it
// to vfio-pci.
func OnNVIDIA(group *vfio.Group, gpu *cdi.GPU) (bool, error) {
	on := false
	for _, f := range group.Functions {
		if f.Address != gpu.PCIBusID || f.Driver == vfio.Driver {
			continue
		}
		if f.Driver != nvidiaDriver {
			return false, fmt.Errorf("GPU %s has the driver %q: it is taken from the driver %s only", gpu.Name, f.Driver, nvidiaDriver)
		}
		on = true
	}
	return on, nil
}

// InUseError says that a process has a GPU open that is to leave its driver, or an IOMMU group that is to go back.
type InUseError struct {
	GPU string
	PID uint32
}

func (e *InUseError) Error() string {
	return fmt.Sprintf("GPU %s is open in process %d, so its driver would not let go of it", e.GPU, e.PID)
}

// CheckUnused refuses a GPU that a process has open, other than the one excepted.
func (p PCI) CheckUnused(ctx context.Context, gpu *cdi.GPU, except int) error {
	pids, err := p.Users.Of(ctx, fmt.Sprintf("/dev/nvidia%d", gpu.Minor))
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if int(pid) != except {
			return &InUseError{GPU: gpu.Name, PID: pid}
		}
	}
	return nil
}
