package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// HardwareOptions say where the GPUs are.
type HardwareOptions struct {
	// Open finds the NVML library. It may be another one each time: a driver may be installed later.
	Open  func() (*nvml.Handle, error)
	Clock clock.WithTicker
	// StateDir keeps what must be known of GPUs that are lost before the agent starts; nothing is kept if it is empty.
	StateDir string
	// Rules says how the rules of health are softened.
	Rules health.Policy
	// Held tells whether a prepared claim has the GPU: then it is published, as lost, although it is not found any more. None is if nil.
	Held func(gpu string) bool
	// Users tells who has GPUs open that are passed through to virtual machines.
	Users vfio.Users
}

// Hardware is the node's GPUs: what discovery found, and their health.
type Hardware struct {
	opts    HardwareOptions
	monitor *health.Monitor
	looker  discovery.Looker
	// again asks for a new look at the node.
	again chan struct{}
	// reached tells that GPUs can be asked that could not be before.
	reached chan struct{}
	// looking is held during a look.
	looking chan struct{}

	// acts has a place for each GPU, taken while something is done to it; see On.
	acts sync.Map

	// saving is held while what is known is written.
	saving sync.Mutex

	mu      sync.Mutex
	policy  discovery.Policy
	library *library // the open session, nil if none is
	// stale tells that the session cannot be used any more: the driver has gone.
	stale bool
	bus   []string // the GPUs on the bus when the session was opened
	node  *discovery.Node
	// known are the GPUs of an earlier look, or of an earlier agent.
	known    []discovery.GPU
	reason   error         // why no GPU can be asked; nil if they can
	looked   chan struct{} // closed at the end of the look that is under way; nil if none is
	changes  []func(ctx context.Context, gpu string, was, is health.Verdict)
	occupied []occupiedPlace
	// notReady is why claims cannot be prepared on the node, in a word; empty if they can.
	notReady string
	// foreign is who uses GPUs that no claim has, by GPU.
	foreign map[string]foreignUse
	// noPassthrough is why GPUs are not offered to virtual machines, as it was last said.
	noPassthrough map[string]string
	// lead: this agent keeps the state in StateDir, since leadSince.
	lead      bool
	leadSince time.Time
}

// NewHardware returns the GPUs behind a library; none are known before the first Discover.
func NewHardware(opts HardwareOptions) *Hardware {
	if opts.Held == nil {
		opts.Held = func(string) bool { return false }
	}
	h := &Hardware{
		opts:    opts,
		again:   make(chan struct{}, 1),
		reached: make(chan struct{}, 1),
		looking: make(chan struct{}, 1),
		reason:  errors.New("GPUs have not been looked for yet"),
	}
	h.monitor = health.NewMonitor(health.Options{
		Clock:   opts.Clock,
		Dir:     h.healthDir(),
		Policy:  opts.Rules,
		Changed: h.healthChanged,
		Reconfigured: func(string) {
			select {
			case h.again <- struct{}{}:
			default:
			}
		},
	})
	return h
}

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
// gone or GPUs have been plugged in, which an open session does not see. What hangs is given up when ctx ends, and comes to its end by itself: a look
// that is cut would leave it open what there is.
func (h *Hardware) Discover(ctx context.Context) (*discovery.Node, error) {
	select {
	case h.looking <- struct{}{}:
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for NVML: %w", ctx.Err())
	}
	h.mu.Lock()
	h.looked = make(chan struct{})
	h.mu.Unlock()
	done := make(chan error, 1)
	go func() {
		ctx := context.WithoutCancel(ctx)
		err := h.look(ctx)
		h.ended(ctx, err)
		<-h.looking
		done <- err
	}()
	select {
	case err := <-done:
		if err != nil {
			return nil, err
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		return h.node, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for NVML: %w", ctx.Err())
	}
}

func (h *Hardware) look(ctx context.Context) error {
	// 1. A session that can be used.
	lib, renewed, err := h.session(ctx)
	if err != nil {
		return err
	}
	// 2. What is there now, with what has to be remembered.
	h.looker.Using = func() (done func()) {
		done, _ = lib.use() // only a look ends a session, and this is the one
		return done
	}
	began := h.opts.Clock.Now()
	h.mu.Lock()
	policy := h.policy
	h.mu.Unlock()
	policy = policy.Since()
	node, err := h.looker.Discover(ctx, lib, lib.Sysfs)
	if err != nil {
		h.noSession(err)
		return fmt.Errorf("discover GPUs: %w", err)
	}
	if err := seesSome(node, lib.Sysfs); err != nil {
		// A session that was opened before the driver had its GPUs never sees them.
		h.close(ctx, lib, false)
		return err
	}
	answered := node.GPUs
	h.mu.Lock()
	if h.known == nil {
		h.known = h.loadKnown(ctx)
	}
	keepBound(node, h.known, h.opts.Held)
	keepMissing(node, h.known, h.opts.Held)
	h.mu.Unlock()
	node.AskPassthrough(lib.Sysfs)
	node.Offer(policy)
	h.tellPassthrough(ctx, node)
	h.mu.Lock()
	h.node, h.known = node, node.GPUs
	h.mu.Unlock()
	h.saveKnown(ctx)
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

// ended keeps the outcome of a look and lets go who waits for it.
func (h *Hardware) ended(ctx context.Context, err error) {
	if err != nil {
		h.monitor.Fail(ctx, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil && h.reason != nil {
		select {
		case h.reached <- struct{}{}:
		default:
		}
	}
	h.reason = err
	close(h.looked)
	h.looked = nil
}

// session names a GPU in an open session.
type session struct {
	library *library
	uuid    string
}

// target is the GPU as the monitor asks about it.
func target(lib *library, gpu discovery.GPU) health.Target {
	return health.Target{
		Name:    gpu.Name,
		UUID:    gpu.UUID,
		Model:   gpu.ProductName,
		Session: session{lib, gpu.UUID},
		Ask: func() (nvml.Readings, error) {
			done, ok := lib.use()
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
			done, ok := lib.use()
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

// NVML returns the library that GPUs were found with, in go-nvml's terms; nil while none is open. Who uses it opens a session of its own.
func (h *Hardware) NVML() gonvml.Interface {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.library == nil {
		return nil
	}
	return h.library.Raw
}

// underWay returns a channel that is closed at the end of the look that is under way, nil if none is.
func (h *Hardware) underWay() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.looked
}

// Resources are the node's GPUs as they are published, with the taints that their faults ask for; ok is false while nothing is known.
func (h *Hardware) Resources(pool string) (resources resourceslice.DriverResources, ok bool) {
	h.mu.Lock()
	node, occupied, notReady, foreign := h.node, h.occupied, h.notReady, h.foreign
	h.mu.Unlock()
	if node == nil {
		return resourceslice.DriverResources{}, false
	}
	resources = node.DriverResources(pool)
	for _, p := range resources.Pools {
		for s := range p.Slices {
			devices := p.Slices[s].Devices
			for d := range devices {
				devices[d].Taints = append(devices[d].Taints, taints(h.Health(devices[d].Name))...)
				if notReady != "" {
					devices[d].Taints = append(devices[d].Taints, notReadyTaint(notReady))
				}
				// One is enough: of a key and an effect there can be one only.
				if gpu, offer, err := node.Find(devices[d].Name); err == nil {
					at := placeOf(offer)
					if i := slices.IndexFunc(occupied, func(o occupiedPlace) bool { return o.overlaps(gpu.Name, at) }); i >= 0 {
						devices[d].Taints = append(devices[d].Taints, occupied[i].taint())
					}
					if use, ok := foreign[gpu.Name]; ok && use.taints {
						devices[d].Taints = append(devices[d].Taints, use.taint())
					}
				}
			}
		}
	}
	return resources, true
}

// Health is the verdict on a published device. A partition that is not made has what the whole GPU has.
func (h *Hardware) Health(device string) health.Verdict {
	if gpu, instance := h.instanceOf(device); instance != nil {
		return h.monitor.Of(gpu, instance)
	}
	return h.monitor.Whole(h.gpuOf(device))
}

// instanceOf returns the MIG device, and its GPU, that a published device was at the last look; nil if it is none.
func (h *Hardware) instanceOf(device string) (gpu string, instance *nvml.Instance) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.node == nil {
		return "", nil
	}
	found, offer, err := h.node.Find(device)
	if err != nil {
		return "", nil
	}
	return found.Name, found.InstanceOf(offer)
}

func (h *Hardware) gpuOf(device string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.node != nil {
		for _, gpu := range h.node.GPUs {
			if strings.HasPrefix(device, gpu.Name+"-") {
				return gpu.Name
			}
		}
	}
	return device
}

// devices are the GPUs by name, each with its MIG devices that there are, by the name that they are published with.
func (h *Hardware) devices() map[string]map[string]*nvml.Instance {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.node == nil {
		return nil
	}
	devices := map[string]map[string]*nvml.Instance{}
	for i := range h.node.GPUs {
		gpu := &h.node.GPUs[i]
		partitions := map[string]*nvml.Instance{}
		for o := range gpu.Offers {
			if instance := gpu.InstanceOf(&gpu.Offers[o]); instance != nil {
				partitions[gpu.Offers[o].Name] = instance
			}
		}
		devices[gpu.Name] = partitions
	}
	return devices
}

// Watch keeps an eye on all GPUs until ctx ends.
func (h *Hardware) Watch(ctx context.Context) { h.monitor.Run(ctx) }

// lookInterval is how often the node is looked at for GPUs that have come, or come back, without an event.
const lookInterval = time.Minute
