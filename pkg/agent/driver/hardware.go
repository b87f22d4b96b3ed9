package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
)

const (
	// probeTimeout is how long one NVML answer may take. Calls into the library cannot be cancelled.
	probeTimeout = 10 * time.Second
	// probeInterval is well below the 30 s after which the kubelet forgets a device's health.
	probeInterval = 10 * time.Second
)

// Hardware is the node's GPUs: what discovery found, and whether NVML answers for each of them now.
type Hardware struct {
	open  func() (*nvml.Handle, error)
	clock clock.WithTicker

	mu      sync.Mutex
	handle  *nvml.Handle // that node was found with
	node    *discovery.Node
	reason  error // why node is nil
	probes  map[string]*probe
	changed chan struct{} // closed and replaced when a health changes
	found   chan struct{} // closed when GPUs are found for the first time
}

var _ prepare.Hardware = (*Hardware)(nil)

// probe is what is known of one GPU's health.
type probe struct {
	// call is under way, nil if none is.
	call *call
	// err is the last answer, at the time checked.
	err     error
	checked time.Time
}

// call is one question to NVML about one GPU.
type call struct {
	since time.Time
	// err may be read once done is closed.
	err  error
	done chan struct{}
}

// NewHardware returns the GPUs behind the library that open finds; none are known before the first Discover.
func NewHardware(open func() (*nvml.Handle, error), c clock.WithTicker) *Hardware {
	return &Hardware{
		open:    open,
		clock:   c,
		reason:  errors.New("GPUs have not been looked for yet"),
		probes:  map[string]*probe{},
		changed: make(chan struct{}),
		found:   make(chan struct{}),
	}
}

// Discover looks for GPUs, with a library opened anew: it may have been installed meanwhile. The NVML session
// stays open after a success. A library that hangs is given up when ctx ends.
func (h *Hardware) Discover(ctx context.Context) (*discovery.Node, error) {
	done := make(chan error, 1)
	go func() { done <- h.discover(ctx) }()
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

func (h *Hardware) discover(ctx context.Context) error {
	handle, node, err := openAndDiscover(ctx, h.open)
	h.mu.Lock()
	defer h.mu.Unlock()
	if err != nil {
		if h.node == nil {
			h.reason = err
		}
		return err
	}
	if h.node == nil {
		close(h.found)
	}
	h.handle, h.node, h.reason = handle, node, nil
	return nil
}

func openAndDiscover(ctx context.Context, open func() (*nvml.Handle, error)) (*nvml.Handle, *discovery.Node, error) {
	handle, err := open()
	if err != nil {
		return nil, nil, err
	}
	if err := handle.Init(); err != nil {
		return nil, nil, fmt.Errorf("initialize NVML (%s): %w", handle.Source, err)
	}
	node, err := discovery.Discover(ctx, handle, handle.Sysfs)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("discover GPUs: %w", err), handle.Shutdown())
	}
	return handle, node, nil
}

// NVML returns the library that GPUs were found with, in go-nvml's terms; nil before that.
func (h *Hardware) NVML() gonvml.Interface {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.handle == nil {
		return nil
	}
	return h.handle.Raw
}

// GPU implements prepare.Hardware: the device is published, and NVML answers for its UUID at its PCI address.
func (h *Hardware) GPU(ctx context.Context, device string) (cdi.GPU, error) {
	gpu, err := h.find(device)
	if err != nil {
		return cdi.GPU{}, err
	}
	if err := h.probe(ctx, gpu); err != nil {
		return cdi.GPU{}, err
	}
	return cdi.GPU{Name: gpu.Name, UUID: gpu.UUID, Minor: gpu.Minor}, nil
}

func (h *Hardware) find(device string) (discovery.GPU, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.node == nil {
		return discovery.GPU{}, fmt.Errorf("the node's GPUs are not known: %w", h.reason)
	}
	for _, gpu := range h.node.GPUs {
		if gpu.Name != device {
			continue
		}
		if gpu.NotOffered != "" {
			return discovery.GPU{}, fmt.Errorf("the GPU is not offered: %s", gpu.NotOffered)
		}
		return gpu, nil
	}
	return discovery.GPU{}, fmt.Errorf("this node has no GPU of that name")
}

// probe asks NVML about one GPU and remembers the answer as its health. There is one call at a time for a GPU, which
// whoever asks meanwhile joins: a call that hangs costs one thread, and blocks nothing but its GPU.
func (h *Hardware) probe(ctx context.Context, gpu discovery.GPU) error {
	call := h.join(ctx, gpu)
	hung := h.clock.NewTimer(probeTimeout - h.clock.Since(call.since))
	defer hung.Stop()
	select {
	case <-call.done:
		return call.err
	case <-hung.C():
		err := fmt.Errorf("NVML has not answered for %s since %s", gpu.UUID, call.since.Format(time.RFC3339))
		h.record(ctx, gpu.Name, err)
		return err
	case <-ctx.Done():
		return fmt.Errorf("wait for NVML to answer for %s: %w", gpu.UUID, ctx.Err())
	}
}

// join returns the call that is under way for the GPU, or starts one.
func (h *Hardware) join(ctx context.Context, gpu discovery.GPU) *call {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.probes[gpu.Name]
	if p == nil {
		p = &probe{}
		h.probes[gpu.Name] = p
	}
	if p.call != nil {
		return p.call
	}
	c := &call{since: h.clock.Now(), done: make(chan struct{})}
	p.call = c
	handle := h.handle
	go func() {
		c.err = ask(handle, gpu)
		h.mu.Lock()
		p.call = nil
		h.mu.Unlock()
		h.record(ctx, gpu.Name, c.err)
		close(c.done)
	}()
	return c
}

// ask checks that the GPU at the PCI address still is the one with the UUID.
func ask(lib nvml.Library, gpu discovery.GPU) error {
	device, err := lib.DeviceByUUID(gpu.UUID)
	if err != nil {
		return fmt.Errorf("NVML does not know %s: %w", gpu.UUID, err)
	}
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

// record keeps the answer and wakes who waits for a change.
func (h *Hardware) record(ctx context.Context, name string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	p := h.probes[name]
	first := p.checked.IsZero()
	was := p.err
	p.err, p.checked = err, h.clock.Now()
	if (was == nil) == (err == nil) && !first {
		return
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "GPU is not healthy", "device", name)
	} else if !first {
		klog.FromContext(ctx).Info("GPU is healthy again", "device", name)
	}
	close(h.changed)
	h.changed = make(chan struct{})
}
