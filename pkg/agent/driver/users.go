// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// users are the processes on a GPU, and the GPU's instances, among which each of them is on a partitioned one.
type users struct {
	processes []nvml.Process
	instances []nvml.GPUInstance
}

// usage tells who uses GPUs.
type usage struct {
	inventory *inventory
	sessions  *sessions
	monitor   *health.Monitor
	on        func(ctx context.Context, gpu, uuid string, f func(nvml.Device) error) error
	// open tells who has GPUs open; it may be nil.
	open vfio.Users
}

// Processes counts those that use a GPU, or places on it.
func (h *Hardware) Processes(ctx context.Context, gpu string, at ...*ledger.Partition) (n int, err error) {
	processes, err := h.users.in(ctx, gpu, at...)
	return len(processes), err
}

// in returns the processes that use a GPU. If places on it are named, a process counts unless it is certain that it is in none of
// them; the place nil is all of the GPU. Of a GPU that is lost they are not known: a process keeps
// it open for as long as it lives.
func (g *usage) in(ctx context.Context, gpu string, at ...*ledger.Partition) (in []nvml.Process, err error) {
	users, err := g.of(ctx, gpu)
	if err != nil {
		return nil, err
	}
	for _, process := range users.processes {
		place := users.placeOf(&process)
		if len(at) == 0 || slices.ContainsFunc(at, func(p *ledger.Partition) bool { return p.Overlaps(place) }) {
			in = append(in, process)
		}
	}
	return in, nil
}

// processes counts those of usage.in without the servers of our MPS daemons: such a one is there as long as its daemon, whether or not it
// has clients, and these are processes of their own.
func (a *Agent) processes(ctx context.Context, gpu string, at ...*ledger.Partition) (n int, err error) {
	processes, err := a.opts.Hardware.users.in(ctx, gpu, at...)
	if err != nil {
		return 0, err
	}
	for _, process := range processes {
		daemon, err := a.opts.Tools.Processes.DaemonOf(process.PID)
		if err != nil && !errors.Is(err, sharing.ErrNoProcess) {
			return 0, fmt.Errorf("GPU %s: %w", gpu, err)
		}
		if daemon == "" { // also if it cannot be seen whose it is
			n++
		}
	}
	return n, nil
}

// placeOf is where on the GPU the process is: nil, which is anywhere, for one in no instance or in one that is not known.
func (u *users) placeOf(process *nvml.Process) *ledger.Partition {
	if process.Instance == nil {
		return nil
	}
	i := slices.IndexFunc(u.instances, func(i nvml.GPUInstance) bool { return i.ID == process.Instance.GPU })
	if i < 0 {
		return nil
	}
	in := &ledger.Partition{Start: u.instances[i].Placement.Start, Size: u.instances[i].Placement.Size}
	for _, device := range u.instances[i].Devices {
		if device.ComputeInstance == process.Instance.Compute {
			in.ComputeStart, in.ComputeSize = device.Compute.Start, device.Compute.Size
		}
	}
	return in
}

// of returns all that use the GPU.
func (g *usage) of(ctx context.Context, gpu string) (*users, error) {
	if g.inventory.found() == nil {
		return nil, errors.New("the node's GPUs are not known")
	}
	found := g.inventory.gpu(gpu)
	if found == nil {
		return nil, fmt.Errorf("this node has no GPU %s", gpu)
	}
	if found.Bound() {
		processes, err := g.ofBound(ctx, found)
		return &users{processes: processes}, err
	}
	verdict := g.monitor.Of(gpu, nil)
	if slices.ContainsFunc(verdict.Faults, func(f health.Fault) bool { return f.Reason == health.Hung }) {
		// Another call would hang as well, and hold another thread.
		return nil, fmt.Errorf("GPU %s: %s", gpu, verdict.Message())
	}
	ctx, cancel := context.WithTimeout(ctx, health.Deadline)
	defer cancel()
	// Written by what may still run when On has given up; read only if it has not. A call that hangs by itself holds one thread, too.
	answer := &users{}
	err := g.on(ctx, gpu, found.UUID, func(d nvml.Device) (err error) {
		*answer, err = askUsers(d, *found)
		return err
	})
	if errors.Is(err, nvml.ErrGPULost) || errors.Is(err, nvml.ErrNotFound) {
		return g.ofLost(ctx, found, err)
	}
	if err != nil {
		return nil, fmt.Errorf("GPU %s: %w", gpu, err)
	}
	return answer, nil
}

// ofLost returns the processes that have the device of a GPU open of which NVML tells nothing, as lost says. A process
// keeps it open for as long as it uses the GPU.
func (g *usage) ofLost(ctx context.Context, gpu *discovery.GPU, lost error) (*users, error) {
	if g.open == nil {
		return nil, fmt.Errorf("GPU %s: %w", gpu.Name, lost)
	}
	pids, err := g.open.OfGPU(ctx, gpu.Minor)
	if err != nil {
		return nil, fmt.Errorf("GPU %s: %w", gpu.Name, errors.Join(lost, err))
	}
	found := &users{}
	for _, pid := range pids {
		if int(pid) != os.Getpid() { // NVML has every GPU open
			found.processes = append(found.processes, nvml.Process{PID: pid})
		}
	}
	return found, nil
}

// ofBound returns those that have a GPU's IOMMU group open.
func (g *usage) ofBound(ctx context.Context, gpu *discovery.GPU) ([]nvml.Process, error) {
	lib, done, err := g.sessions.using(ctx, "a look at who uses "+gpu.Name)
	if err != nil {
		return nil, fmt.Errorf("GPU %s: %w", gpu.Name, err)
	}
	defer done()
	if g.open == nil {
		return nil, errors.New("who uses IOMMU groups is not known")
	}
	pids, err := g.open.Of(ctx, vfio.NodesOf(lib.Sysfs, gpu.Passthrough.Group)...)
	if err != nil {
		return nil, fmt.Errorf("GPU %s: %w", gpu.Name, err)
	}
	processes := make([]nvml.Process, 0, len(pids))
	for _, pid := range pids {
		processes = append(processes, nvml.Process{PID: pid})
	}
	return processes, nil
}

// askUsers asks for the processes first: an instance that one of them was in does not go before it, so what is there afterwards under
// the instance's ID is where the process was, or the process has ended.
func askUsers(device nvml.Device, gpu discovery.GPU) (u users, err error) {
	if err := checkIdentity(device, gpu); err != nil {
		return u, err
	}
	if u.processes, err = device.Processes(); err != nil {
		return u, err
	}
	if slices.ContainsFunc(u.processes, func(p nvml.Process) bool { return p.Instance != nil }) {
		u.instances, err = device.GPUInstances()
	}
	return u, err
}

// coherent is the addressing mode of GPUs whose memory is memory of the machine, too: the system may use it, and it is not given back
// when a process ends.
const coherent = "ATS"

// memoryLeft is how much memory of the GPU is in use although no process, claim or container of a device plugin uses it, in bytes;
// nil if one does, or if that is not known. use and err are what was found out about who uses it without a claim. None is left where it is
// not judged: the memory of a partitioned GPU, for one, is that of its instances, and goes with them.
func memoryLeft(ctx context.Context, a *Agent, gpu string, use *foreignUse, err error) *uint64 {
	found := a.opts.Hardware.inventory.gpu(gpu)
	switch {
	case found == nil || found.Unseen():
		return nil
	case !memoryIsItsOwn(found):
		return new(uint64(0))
	case err != nil || use.plugin != "":
		return nil
	}
	// First the memory, then whose it may be: who comes meanwhile is taken for its user.
	bytes, users, err := a.opts.Hardware.users.memory(ctx, found)
	if err != nil {
		klog.FromContext(ctx).V(4).Info("It is not known whether memory is left on the GPU", "device", gpu, "reason", err.Error())
		return nil
	}
	if len(users.processes) > 0 {
		return nil
	}
	records, err := a.reporter.ledger.Records()
	if err != nil || slices.ContainsFunc(records, func(r *ledger.Record) bool { return r.Holds(gpu) }) {
		return nil
	}
	quarantined, err := a.claims.Quarantined() // which says so itself
	if err != nil || slices.ContainsFunc(quarantined, func(q prepare.Quarantine) bool { return q.GPU == gpu }) {
		return nil
	}
	return &bytes
}

func memoryIsItsOwn(gpu *discovery.GPU) bool {
	return !gpu.Bound() && !gpu.MIGEnabled && gpu.AddressingMode != coherent
}

// memory returns what is in use beyond the driver's own, and then who uses the GPU.
func (g *usage) memory(ctx context.Context, gpu *discovery.GPU) (bytes uint64, who *users, err error) {
	ctx, cancel := context.WithTimeout(ctx, health.Deadline)
	defer cancel()
	type answer struct {
		bytes uint64
		users users
	}
	// Written by what may still run when On has given up; read only if it has not.
	found := &answer{}
	err = g.on(ctx, gpu.Name, gpu.UUID, func(d nvml.Device) (err error) {
		if found.bytes, err = d.MemoryBeyondReserveBytes(); err != nil {
			return err
		}
		found.users, err = askUsers(d, *gpu)
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	return found.bytes, &found.users, nil
}
