// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/stepaside"
	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/twopaths"
)

// HardwareOptions say where the GPUs are.
type HardwareOptions struct {
	// Open finds the NVML library. It may be another one each time: a driver may be installed later.
	Open  func() (*nvml.Handle, error)
	Clock clock.WithTicker
	// Keeper says whether the driver may be open; it always may if nil.
	Keeper *stepaside.Keeper
	// StateDir keeps what must be known of GPUs that are lost before the agent starts; nothing is kept if it is empty.
	StateDir string
	// Rules says how the rules of health are softened.
	Rules health.Policy
	// Held tells whether a prepared claim has the GPU: then it is published, as lost, although it is not found any more. None is if nil.
	Held func(gpu string) bool
	// Users tells who has GPUs open that are passed through to virtual machines.
	Users vfio.Users
	// Event is told each event of a GPU, if it is not nil; it must not block.
	Event func(gpu string, event nvml.Event)
}

// Hardware is the node's GPUs. It has the questions that others ask; what answers them stands in parts that do not know of
// it: the open session, what was found, who uses it and what keeps claims off, and what has to be remembered.
type Hardware struct {
	opts    HardwareOptions
	monitor *health.Monitor
	looker  discovery.Looker
	// again asks for a new look at the node.
	again chan struct{}
	// reached tells that GPUs can be asked that could not be before.
	reached chan struct{}

	sessions  *sessions
	acts      *acts
	inventory *inventory
	users     *usage
	withheld  *withheld
	memory    *memory
	changes   []func(ctx context.Context, gpu string, was, is health.Verdict)
}

// NewHardware returns the GPUs behind a library; none are known before the first Discover.
func NewHardware(opts HardwareOptions) *Hardware {
	if opts.Held == nil {
		opts.Held = func(string) bool { return false }
	}
	h := &Hardware{
		opts:      opts,
		again:     make(chan struct{}, 1),
		reached:   make(chan struct{}, 1),
		inventory: &inventory{},
		withheld:  &withheld{},
		memory:    &memory{dir: opts.StateDir, clock: opts.Clock},
	}
	h.monitor = health.NewMonitor(health.Options{
		Clock:        opts.Clock,
		Dir:          healthDir(opts.StateDir),
		Policy:       opts.Rules,
		Changed:      h.healthChanged,
		Event:        opts.Event,
		Reconfigured: func(string) { signal(h.again) },
	})
	h.sessions = &sessions{
		open: opts.Open, clock: opts.Clock, keeper: opts.Keeper, monitor: h.monitor, reached: h.reached,
		looking: make(chan struct{}, 1), reason: errors.New("GPUs have not been looked for yet"),
	}
	h.acts = &acts{sessions: h.sessions}
	h.users = &usage{inventory: h.inventory, sessions: h.sessions, monitor: h.monitor, on: h.acts.on, open: opts.Users}
	return h
}

// Offer sets what is offered of GPUs that are found from now on.
func (h *Hardware) Offer(policy discovery.Policy) { h.inventory.offer(policy) }

// OnChange registers who is told when the health of a GPU changes. It must not block. To be called before Discover.
func (h *Hardware) OnChange(f func(ctx context.Context, gpu string, was, is health.Verdict)) {
	h.changes = append(h.changes, f)
}

func (h *Hardware) healthChanged(ctx context.Context, gpu string, was, is health.Verdict) {
	for _, f := range h.changes {
		f(ctx, gpu, was, is)
	}
}

// Discover looks at the node: for GPUs if none are known, and for what has changed since. The library is opened anew if the driver has
// gone or GPUs have been plugged in, which an open session does not see. What hangs is given up when ctx ends, and comes to its end by
// itself: a look that is cut would leave it open what there is.
func (h *Hardware) Discover(ctx context.Context) (*discovery.Node, error) {
	if err := h.sessions.alone(ctx, "wait for NVML", func() error {
		ctx := context.WithoutCancel(ctx)
		err := h.look(ctx)
		if letGo(err) && h.inventory.found() == nil {
			h.remember(ctx)
		}
		h.sessions.ended(ctx, err)
		return err
	}); err != nil {
		return nil, err
	}
	return h.inventory.found(), nil
}

func (h *Hardware) look(ctx context.Context) error {
	// 1. A session that can be used.
	lib, renewed, err := h.sessions.renew(ctx)
	if err != nil {
		return err
	}
	// 2. What is there now, with what has to be remembered.
	h.looker.Using = func() (done func()) {
		done, _ = lib.use("a look for GPUs") // only a look ends a session, and this is the one
		return done
	}
	began := h.opts.Clock.Now()
	policy := h.inventory.offered().Since()
	node, err := h.looker.Discover(ctx, lib, lib.Sysfs)
	if err != nil {
		h.sessions.noSession(err)
		return fmt.Errorf("discover GPUs: %w", err)
	}
	if err := seesSome(node, lib.Sysfs); err != nil {
		// A session that was opened before the driver had its GPUs never sees them.
		h.sessions.close(ctx, lib, false)
		return err
	}
	// Another process may have seen the driver that was there before: this one would not be able to load the library of both.
	before := h.memory.before(ctx).DriverVersion
	renewed = renewed || before != "" && before != node.DriverVersion
	answered := slices.Clone(node.GPUs) // others are put between these
	h.memory.add(ctx, node, h.opts.Held)
	node.AskPassthrough(lib.Sysfs)
	node.Offer(policy)
	h.inventory.tellPassthrough(ctx, node)
	h.inventory.set(node)
	h.memory.keep(ctx, node)
	// 3. Watch over it.
	bootID, err := lib.BootID()
	if err != nil {
		return err
	}
	var targets []health.Target
	for _, gpu := range node.GPUs {
		if gpu.Bound() {
			targets = append(targets, boundTarget(lib, gpu))
		} else {
			targets = append(targets, target(lib, gpu))
		}
	}
	if err := h.monitor.Watch(bootID, targets, renewed); err != nil {
		klog.FromContext(ctx).Error(err, "Faults found by an earlier agent are not known")
	}
	for _, gpu := range answered {
		if gpu.MIG != nil { // otherwise its instances are not known, or it cannot have any
			h.monitor.Partitioned(ctx, gpu.Name, began, gpu.MIGInstances)
		}
	}
	return nil
}

// remember takes the GPUs that were known before for those that are there: while the driver must not be open nobody can be
// asked. The faults of an earlier agent are known, too.
func (h *Hardware) remember(ctx context.Context) {
	node := *h.memory.before(ctx)
	if len(node.GPUs) == 0 {
		return
	}
	handle, err := h.sessions.open()
	if err != nil {
		klog.FromContext(ctx).Error(err, "What the kernel says of the GPUs is not known")
		return
	}
	node.GPUs = slices.Clone(node.GPUs)
	node.AskPassthrough(handle.Sysfs)
	node.Offer(h.inventory.offered().Since())
	h.inventory.set(&node)
	closed := newLibrary(handle, func() {})
	closed.ended = true
	var targets []health.Target
	for _, gpu := range node.GPUs {
		targets = append(targets, target(closed, gpu))
	}
	bootID, err := handle.BootID()
	if err == nil {
		err = h.monitor.Watch(bootID, targets, false)
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Faults found by an earlier agent are not known")
	}
	h.monitor.Pause(ctx)
}

// seesSome returns an error if the driver has GPUs that answer on the bus, and NVML says that there is none at all.
func seesSome(node *discovery.Node, sysfs fs.ReadLinkFS) error {
	if len(node.Failures) > 0 || slices.ContainsFunc(node.GPUs, func(g discovery.GPU) bool { return !g.Bound() }) {
		return nil
	}
	gpus, err := vfio.GPUs(sysfs)
	if err != nil {
		return nil // there is no PCI bus, or none that can be read
	}
	gpus = slices.DeleteFunc(gpus, func(f vfio.Function) bool { return f.Driver != "nvidia" || vfio.Gone(sysfs, f.Address) })
	if len(gpus) > 0 {
		return fmt.Errorf("NVML finds no GPU, and the driver has %d, the first at %s: it is opened anew", len(gpus), gpus[0].Address)
	}
	return nil
}

// sessionOf names a GPU in an open session.
type sessionOf struct {
	library *library
	uuid    string
}

// target is the GPU as the monitor asks about it.
func target(lib *library, gpu discovery.GPU) health.Target {
	return health.Target{
		Name:    gpu.Name,
		UUID:    gpu.UUID,
		Model:   gpu.ProductName,
		Session: sessionOf{lib, gpu.UUID},
		Ask: func() (nvml.Readings, error) {
			done, ok := lib.use("a question about the health of " + gpu.Name)
			if !ok {
				return nvml.Readings{}, health.ErrPaused
			}
			defer done()
			device, err := locate(lib, gpu)
			if err != nil {
				return nvml.Readings{}, proveLoss(lib.Sysfs, gpu.PCIBusID, err)
			}
			readings, err := device.Readings()
			if err != nil {
				return readings, proveLoss(lib.Sysfs, gpu.PCIBusID, fmt.Errorf("NVML does not answer for %s: %w", gpu.UUID, err))
			}
			if readings.PCIe != nil {
				readings.PCIe.PortWidth = gpu.PortLanes
			}
			return readings, nil
		},
		Listen: func() (nvml.Watch, error) {
			done, ok := lib.use("events of " + gpu.Name)
			if !ok {
				return nil, health.ErrPaused
			}
			device, err := locate(lib, gpu)
			if err != nil {
				done()
				return nil, err
			}
			watch, err := device.Watch()
			if err != nil {
				done()
				return nil, err
			}
			return usingWatch{watch, done}, nil
		},
	}
}

// boundTarget is a GPU that vfio-pci has, as the monitor asks about it. NVML knows nothing of it: what can be known is that it is there.
func boundTarget(lib *library, gpu discovery.GPU) health.Target {
	return health.Target{
		Name:    gpu.Name,
		UUID:    gpu.UUID,
		Model:   gpu.ProductName,
		Session: sessionOf{lib, gpu.Name},
		Ask: func() (nvml.Readings, error) {
			f, err := vfio.ReadFunction(lib.Sysfs, gpu.PCIBusID)
			switch {
			case errors.Is(err, fs.ErrNotExist), err == nil && f.Driver == vfio.Driver && vfio.Gone(lib.Sysfs, gpu.PCIBusID):
				err = fmt.Errorf("%s is not on the bus any more: %w", gpu.PCIBusID, nvml.ErrGPULost)
			case err == nil && f.Driver != vfio.Driver:
				// It has just been given back; the next look will find it.
				err = fmt.Errorf("%s does not have the driver %s any more: %w", gpu.PCIBusID, vfio.Driver, health.ErrPaused)
			}
			return nvml.Readings{}, err
		},
		Listen: func() (nvml.Watch, error) {
			return nil, fmt.Errorf("GPU %s is with a virtual machine: %w", gpu.Name, nvml.ErrNotSupported)
		},
	}
}

// proveLoss lets the error say that the GPU is lost only if the bus says so, too: for a GPU that is lost pods are moved.
func proveLoss(sysfs fs.ReadLinkFS, busID string, err error) error {
	if (errors.Is(err, nvml.ErrGPULost) || errors.Is(err, nvml.ErrNotFound)) && !vfio.Gone(sysfs, busID) {
		return fmt.Errorf("%s answers on the PCI bus, and not to NVML: %v", busID, err) //nolint:errorlint // it is not that error
	}
	return err
}

// usingWatch keeps its session open until it is closed.
type usingWatch struct {
	nvml.Watch
	done func()
}

func (w usingWatch) Close() error {
	defer w.done()
	return w.Watch.Close()
}

// locate checks that the GPU at the PCI address still is the one with the UUID.
func locate(lib nvml.Library, gpu discovery.GPU) (nvml.Device, error) {
	device, err := lib.DeviceAt(gpu.PCIBusID)
	if err != nil {
		return nil, fmt.Errorf("NVML does not know %s at %s: %w", gpu.UUID, gpu.PCIBusID, err)
	}
	return device, checkIdentity(device, gpu)
}

// checkIdentity asks the device who it is.
func checkIdentity(device nvml.Device, gpu discovery.GPU) error {
	uuid, err := device.UUID()
	if err != nil {
		return fmt.Errorf("NVML does not answer for %s: %w", gpu.UUID, err)
	}
	address, err := device.PCIBusID()
	if err != nil {
		return fmt.Errorf("NVML does not answer for %s: %w", gpu.UUID, err)
	}
	if uuid != gpu.UUID || address != gpu.PCIBusID {
		return fmt.Errorf("NVML answers with %s at %s, published are %s at %s", uuid, address, gpu.UUID, gpu.PCIBusID)
	}
	return nil
}

// Node is what the last look has found, nil before the first. Nobody changes it.
func (h *Hardware) Node() *discovery.Node { return h.inventory.found() }

// Resources are the node's GPUs as they are published, with the taints that their faults ask for; ok is false while nothing is known.
func (h *Hardware) Resources(pool string) (resources resourceslice.DriverResources, ok bool) {
	node := h.inventory.found()
	if node == nil {
		return resourceslice.DriverResources{}, false
	}
	resources = node.DriverResources(pool)
	listed := h.withheld.listedByPlugins() // before the taints: those of a later look would do, too
	for _, p := range resources.Pools {
		for s := range p.Slices {
			devices := p.Slices[s].Devices
			twopaths.Mark(devices, listed)
			for d := range devices {
				devices[d].Taints = append(devices[d].Taints, taints(h.Health(devices[d].Name))...)
				if gpu, offer, err := node.Find(devices[d].Name); err == nil {
					devices[d].Taints = append(devices[d].Taints, h.withheld.taints(gpu, offer)...)
				}
			}
		}
	}
	return resources, true
}

// Health is the verdict on a published device. A partition that is not made has what the whole GPU has.
func (h *Hardware) Health(device string) health.Verdict {
	if gpu, instance := h.inventory.instanceOf(device); instance != nil {
		return h.monitor.Of(gpu, instance)
	}
	return h.monitor.Whole(h.inventory.gpuOf(device))
}

// Watch keeps an eye on all GPUs until ctx ends.
func (h *Hardware) Watch(ctx context.Context) { h.monitor.Run(ctx) }

// Lead makes this agent the one that keeps the state of GPUs in StateDir.
func (h *Hardware) Lead(ctx context.Context) {
	h.memory.begin(ctx)
	h.monitor.Lead(ctx)
}

// Follow is Lead's reverse. When it returns this agent writes nothing there, and will not: another one may.
func (h *Hardware) Follow() { h.memory.end(h.monitor.Follow) }

// lookInterval is how often the node is looked at for GPUs that have come, or come back, without an event.
const lookInterval = time.Minute
