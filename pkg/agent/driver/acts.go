// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
)

var _ prepare.Hardware = (*Hardware)(nil)

// Find implements prepare.Hardware: the device is published, and NVML answers for its GPU's UUID at its PCI address. A GPU
// with a fault that leaves it answering is handed out: the claim may tolerate the taint.
func (h *Hardware) Find(ctx context.Context, device string) (prepare.Target, error) {
	for {
		node, gpu, offer, err := h.find(device)
		if errors.Is(err, discovery.ErrBound) {
			return prepare.Target{GPU: cdi.GPU{Name: gpu.Name}}, err
		}
		if err != nil {
			return prepare.Target{}, err
		}
		if offer.Passthrough {
			// An attempt that failed may have left it with no driver: it is looked at when that is undone.
			return targetOf(node, gpu, offer), nil
		}
		looked, _ := h.sessions.underWay()
		err = h.monitor.Check(ctx, gpu.Name)
		if looked == nil {
			looked, _ = h.sessions.underWay() // it may have begun since
		}
		switch {
		case err == nil:
			return targetOf(node, gpu, offer), nil
		case !errors.Is(err, health.ErrPaused) || looked == nil:
			return prepare.Target{}, err
		}
		// The driver is being looked for anew, which passes.
		select {
		case <-looked:
		case <-ctx.Done():
			return prepare.Target{}, fmt.Errorf("wait for NVML: %w", ctx.Err())
		}
	}
}

// targetOf is what prepare needs to know of an offer.
func targetOf(node *discovery.Node, gpu *discovery.GPU, offer *discovery.Offer) prepare.Target {
	return prepare.Target{
		GPU:         cdi.GPU{Name: gpu.Name, UUID: gpu.UUID, PCIBusID: gpu.PCIBusID, Minor: gpu.Minor},
		Attributes:  node.Device(gpu, offer).Attributes,
		MemoryBytes: gpu.MemoryBytes,
		Passthrough: offer.Passthrough,
		SwitchesMIG: gpu.MIG != nil && gpu.MIG.Switches,
		Partition:   placeOf(offer),
	}
}

// find does not ask NVML.
func (h *Hardware) find(device string) (*discovery.Node, *discovery.GPU, *discovery.Offer, error) {
	// In this order: once GPUs can be asked it is known which there are.
	looked, reason := h.sessions.underWay()
	node := h.inventory.found()
	if node == nil {
		return nil, nil, nil, fmt.Errorf("the node's GPUs are not known: %w", reason)
	}
	if reason != nil && looked == nil {
		return nil, nil, nil, fmt.Errorf("the node's GPUs cannot be reached: %w", reason)
	}
	gpu, offer, err := node.Find(device)
	if err == nil && gpu.Bound() && !offer.Passthrough {
		err = discovery.ErrBound
	}
	return node, gpu, offer, err
}

// acts does one thing to a GPU at a time.
type acts struct {
	sessions *sessions
	// places has one for each GPU, taken while something is done to it.
	places sync.Map
}

// On implements prepare.Hardware.
func (h *Hardware) On(ctx context.Context, gpu, uuid string, f func(nvml.Device) error) error {
	return h.acts.on(ctx, gpu, uuid, func(d nvml.Device) error {
		ended := func(gone nvml.Instance) { h.monitor.Ended(context.WithoutCancel(ctx), gpu, gone) }
		return f(endingDevice{d, ended, h.ignoresRecovery(gpu)})
	})
}

// on does f to the GPU. Who comes later waits, so that what is undone is never overtaken by what was being done when
// NVML hung.
func (a *acts) on(ctx context.Context, gpu, uuid string, f func(nvml.Device) error) error {
	taken := a.place(gpu)
	select {
	case taken <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("NVML has not finished an earlier call for %s: %w", uuid, ctx.Err())
	}
	done := make(chan error, 1)
	go func() {
		err := a.with(ctx, gpu, uuid, f)
		<-taken
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("NVML does not answer for %s: %w", uuid, ctx.Err())
	}
}

func (a *acts) place(gpu string) chan struct{} {
	place, _ := a.places.LoadOrStore(gpu, make(chan struct{}, 1))
	return place.(chan struct{})
}

func (a *acts) with(ctx context.Context, gpu, uuid string, f func(nvml.Device) error) error {
	lib, done, err := a.sessions.using(ctx, "an act on "+gpu)
	if err != nil {
		return err
	}
	defer done()
	device, err := lib.DeviceAt(discovery.BusID(gpu))
	if err != nil {
		return fmt.Errorf("NVML does not know %s: %w", gpu, err)
	}
	switch is, err := device.UUID(); {
	case err != nil:
		return fmt.Errorf("NVML does not answer for %s: %w", gpu, err)
	case is != uuid:
		return fmt.Errorf("%s is %s now, and no longer %s: %w", gpu, is, uuid, nvml.ErrNotFound)
	}
	return f(device)
}

// ignoresRecovery tells whether the node's rules have it that nothing follows from the recovery action of that GPU.
func (h *Hardware) ignoresRecovery(gpu string) bool {
	model := ""
	if found := h.inventory.gpu(gpu); found != nil {
		model = found.ProductName
	}
	return h.opts.Rules.Ignores(model, health.Recovery)
}

// endingDevice tells of MIG devices that are destroyed, so that nothing of them is taken for a fault of the next ones with their IDs.
type endingDevice struct {
	nvml.Device
	ended func(nvml.Instance)
	// ignoresRecovery: its readings have no recovery action.
	ignoresRecovery bool
}

func (d endingDevice) Readings() (nvml.Readings, error) {
	r, err := d.Device.Readings()
	if d.ignoresRecovery {
		r.RecoveryAction = nil
	}
	return r, err
}

func (d endingDevice) DestroyComputeInstance(instance, compute uint32) error {
	err := d.Device.DestroyComputeInstance(instance, compute)
	if err == nil {
		d.ended(nvml.Instance{GPU: instance, Compute: compute})
	}
	return err
}

func (d endingDevice) DestroyGPUInstance(instance uint32) error {
	err := d.Device.DestroyGPUInstance(instance)
	if err == nil {
		d.ended(nvml.Instance{GPU: instance, Compute: nvml.AllCompute})
	}
	return err
}

// Begin implements prepare.Hardware.
func (h *Hardware) Begin(what string) (done func(), err error) { return h.opts.Keeper.Begin(what) }

// NVML returns the library that GPUs were found with, in go-nvml's terms; nil while none is open. Who uses it opens a
// session of its own, within the one that is open. It is the same as long as that is open.
func (h *Hardware) NVML() gonvml.Interface {
	if lib := h.sessions.current(); lib != nil {
		return lib.within
	}
	return nil
}

// within is a library whose sessions keep the open one open.
type within struct {
	gonvml.Interface
	library *library

	mu   sync.Mutex
	done []func()
}

func (w *within) Init() gonvml.Return { return w.enter(w.Interface.Init) }

func (w *within) InitWithFlags(flags uint32) gonvml.Return {
	return w.enter(func() gonvml.Return { return w.Interface.InitWithFlags(flags) })
}

func (w *within) enter(open func() gonvml.Return) gonvml.Return {
	done, ok := w.library.use("the CDI specification of a claim")
	if !ok {
		return gonvml.ERROR_UNINITIALIZED
	}
	if ret := open(); ret != gonvml.SUCCESS {
		done()
		return ret
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.done = append(w.done, done)
	return gonvml.SUCCESS
}

func (w *within) Shutdown() gonvml.Return {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.done) == 0 {
		return gonvml.ERROR_UNINITIALIZED
	}
	last := len(w.done) - 1
	defer w.done[last]()
	w.done = w.done[:last]
	return w.Interface.Shutdown()
}

// BootID implements prepare.Hardware.
func (h *Hardware) BootID() (string, error) {
	// Opening a library does not load it.
	handle, err := h.sessions.handle()
	if err != nil {
		return "", err
	}
	return handle.BootID()
}

// Look implements prepare.Hardware.
func (h *Hardware) Look(ctx context.Context) error {
	_, err := h.Discover(ctx)
	return err
}

// Apart implements prepare.Hardware.
func (h *Hardware) Apart(ctx context.Context, f func(context.Context) error) error {
	return h.sessions.alone(ctx, "NVML does not answer", func() error {
		h.sessions.suspend(ctx)
		err := f(ctx)
		// Whatever became of f, the other GPUs are wanted again.
		ctx := context.WithoutCancel(ctx)
		looked := h.look(ctx)
		h.sessions.ended(ctx, looked)
		if looked != nil {
			err = errors.Join(err, fmt.Errorf("look for the other GPUs again: %w", looked))
		}
		return err
	})
}

// Reader asks GPUs beside all else that is done to them. It takes no GPU's place, so that a question that hangs is in
// nobody's way.
type Reader struct{ hardware *Hardware }

// NewReader reads from these GPUs.
func NewReader(h *Hardware) *Reader { return &Reader{h} }

// Node is what the last look has found; nil before. Nobody may change it.
func (r *Reader) Node() *discovery.Node { return r.hardware.Node() }

// Read runs f for a GPU in the session that is open, and returns when f does: a call into NVML may hang. f changes nothing of
// the GPU. ctx is for a session that is being opened.
func (r *Reader) Read(ctx context.Context, gpu *discovery.GPU, f func(nvml.Device) error) error {
	lib, done, err := r.hardware.sessions.using(ctx, "a reading of the load of "+gpu.Name)
	if err != nil {
		return err
	}
	defer done()
	device, err := locate(lib, *gpu)
	if err != nil {
		return err
	}
	return f(device)
}
