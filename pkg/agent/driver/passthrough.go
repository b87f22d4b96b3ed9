package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/vfio"
)

// Look implements prepare.Hardware.
func (h *Hardware) Look(ctx context.Context) error {
	_, err := h.Discover(ctx)
	return err
}

// Apart implements prepare.Hardware.
func (h *Hardware) Apart(ctx context.Context, f func(context.Context) error) error {
	select {
	case h.looking <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("wait for NVML: %w", ctx.Err())
	}
	h.mu.Lock()
	h.looked = make(chan struct{})
	h.mu.Unlock()
	done := make(chan error, 1)
	go func() {
		err := h.apart(ctx, f)
		<-h.looking
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return fmt.Errorf("NVML does not answer: %w", ctx.Err())
	}
}

// apart has the place of who looks.
func (h *Hardware) apart(ctx context.Context, f func(context.Context) error) error {
	h.mu.Lock()
	lib, stale := h.library, h.stale
	h.mu.Unlock()
	if lib != nil {
		h.close(ctx, lib, stale)
	}
	err := f(ctx)
	// Whatever became of f, the other GPUs are wanted again.
	ctx = context.WithoutCancel(ctx)
	looked := h.look(ctx)
	h.ended(ctx, looked)
	if looked != nil {
		err = errors.Join(err, fmt.Errorf("look for the other GPUs again: %w", looked))
	}
	return err
}

// keepBound puts what was known of a GPU that a claim has passed through in the place of the little that is known of it now. What it is
// offered as stays the same that way. One that vfio-pci got without us is no more than that.
func keepBound(found *discovery.Node, known []discovery.GPU, held func(gpu string) bool) {
	for i := range found.GPUs {
		now := &found.GPUs[i]
		before := slices.IndexFunc(known, func(g discovery.GPU) bool { return g.Name == now.Name })
		if !now.Unseen() || before < 0 || known[before].Unseen() || !held(now.Name) {
			continue
		}
		passthrough := now.Passthrough
		*now = known[before]
		now.Passthrough = passthrough
		keepDomain(found, known, now)
	}
}

// keepDomain lets the NVLink domain of a GPU that was passed through keep its name, which may come from that very GPU, as long as the others
// in it still are in one.
func keepDomain(found *discovery.Node, known []discovery.GPU, bound *discovery.GPU) {
	if bound.NVLink == nil || bound.NVLink.Domain == "" {
		return
	}
	domain := bound.NVLink.Domain
	var others []*discovery.GPU
	for i := range found.GPUs {
		gpu := &found.GPUs[i]
		if gpu.NVLink != nil && !gpu.Bound() && slices.ContainsFunc(known, func(g discovery.GPU) bool {
			return g.Name == gpu.Name && g.NVLink != nil && g.NVLink.Domain == domain
		}) {
			others = append(others, gpu)
		}
	}
	for _, gpu := range others {
		if gpu.NVLink.Domain != others[0].NVLink.Domain {
			return
		}
	}
	for _, gpu := range others {
		link := *gpu.NVLink
		link.Domain = domain
		gpu.NVLink = &link
	}
}

// tellPassthrough says why GPUs are not offered to virtual machines, when that has changed.
func (h *Hardware) tellPassthrough(ctx context.Context, node *discovery.Node) {
	now := map[string]string{}
	for _, gpu := range node.GPUs {
		now[gpu.Name] = gpu.NoPassthrough
	}
	h.mu.Lock()
	before := h.noPassthrough
	h.noPassthrough = now
	h.mu.Unlock()
	for _, gpu := range node.GPUs {
		if reason := gpu.NoPassthrough; reason != "" && reason != before[gpu.Name] {
			klog.FromContext(ctx).Info("GPU is not offered to virtual machines", "device", gpu.Name, "reason", reason)
		}
	}
}

// boundTarget is a GPU that vfio-pci has, as the monitor asks about it. NVML knows nothing of it: what can be known is that it is there.
func boundTarget(lib *library, gpu discovery.GPU) health.Target {
	return health.Target{
		Name:    gpu.Name,
		UUID:    gpu.UUID,
		Model:   gpu.ProductName,
		Session: session{lib, gpu.Name},
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

// boundProcesses are those that have a GPU's IOMMU group open.
func (h *Hardware) boundProcesses(ctx context.Context, gpu *discovery.GPU) ([]nvml.Process, error) {
	lib, done, err := h.using(ctx)
	if err != nil {
		return nil, fmt.Errorf("GPU %s: %w", gpu.Name, err)
	}
	defer done()
	if h.opts.Users == nil {
		return nil, errors.New("who uses IOMMU groups is not known")
	}
	pids, err := h.opts.Users.Of(ctx, vfio.NodesOf(lib.Sysfs, gpu.Passthrough.Group)...)
	if err != nil {
		return nil, fmt.Errorf("GPU %s: %w", gpu.Name, err)
	}
	processes := make([]nvml.Process, 0, len(pids))
	for _, pid := range pids {
		processes = append(processes, nvml.Process{PID: pid})
	}
	return processes, nil
}
