// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// A GPU that is passed through to a virtual machine leaves the NVIDIA driver: every function of its IOMMU group goes to vfio-pci, and
// NVML does not see the GPU until they are given back. What NVML keeps of it by then (persistence, compute mode) is put back
// afterwards, which is why those steps come before StepHidden, and are undone after it.

// nvidiaDriver is the kernel's name of it.
const nvidiaDriver = "nvidia"

// PCI is the bus, and who uses what is on it. Binder and Users are nil for an agent without access to it.
type PCI struct {
	Binder *vfio.Binder
	Users  vfio.Users
	// Name is that of a process's program; nil if nobody knows it.
	Name func(pid uint32) (string, error)
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
	// Program of the process; empty if it is not known.
	Program string
}

func (e *InUseError) Error() string {
	return fmt.Sprintf("GPU %s is open in %s, so its driver would not let go of it", e.GPU, processName(e.PID, e.Program))
}

func processName(pid uint32, program string) string {
	if program == "" {
		return fmt.Sprintf("process %d", pid)
	}
	return fmt.Sprintf("process %d (%s)", pid, program)
}

// InUse is the error for a process that has the GPU open.
func (p PCI) InUse(gpu string, pid uint32) *InUseError {
	return &InUseError{GPU: gpu, PID: pid, Program: p.program(pid)}
}

// program is empty for a process that has just ended, too.
func (p PCI) program(pid uint32) string {
	if p.Name == nil {
		return ""
	}
	name, err := p.Name(pid)
	if err != nil {
		return ""
	}
	return name
}

// held says of an error that NVML gives because a GPU is in use who has it open: not all of them are in NVML's lists.
func (p PCI) held(ctx context.Context, d nvml.Device, err error) error {
	if !errors.Is(err, nvml.ErrInUse) || p.Users == nil {
		return err
	}
	minor, unknown := d.MinorNumber()
	if unknown != nil {
		return err
	}
	pids, unknown := p.Users.OfGPU(ctx, minor)
	if unknown != nil {
		return err
	}
	var holders []string
	for _, pid := range pids {
		if int(pid) != os.Getpid() && len(holders) < maxHolders {
			holders = append(holders, processName(pid, p.program(pid)))
		}
	}
	if len(holders) == 0 {
		return err
	}
	return fmt.Errorf("%w: it is open in %s", err, strings.Join(holders, ", "))
}

// maxHolders are named of who has a GPU open: containers may have thousands of processes that do.
const maxHolders = 5

// CheckUnused refuses a GPU that a process has open, other than those excepted.
func (p PCI) CheckUnused(ctx context.Context, gpu *cdi.GPU, except ...uint32) error {
	pids, err := p.Users.Of(ctx, fmt.Sprintf("/dev/nvidia%d", gpu.Minor))
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if !slices.Contains(except, pid) {
			return p.InUse(gpu.Name, pid)
		}
	}
	return nil
}
