package driver

import (
	"context"
	"sync"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"stowage.dev/stowage/pkg/agent/discovery"
)

// WatchHealthStatus implements kubeletplugin.DRAPlugin: each offered GPU, whether NVML answers for it. Reports
// are sent at every change and, because the kubelet forgets them after 30 s, every probeInterval.
func (p *plugin) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	ticker := p.hardware.clock.NewTicker(probeInterval)
	defer ticker.Stop()
	for {
		devices, changed := p.hardware.health(p.pool)
		select {
		case <-ctx.Done():
			return nil
		case reports <- kubeletplugin.DeviceHealthReport{Devices: devices}:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-ticker.C():
		}
	}
}

// health returns what is known of every offered GPU, and a channel that is closed at the next change.
func (h *Hardware) health(pool string) ([]kubeletplugin.DeviceHealth, <-chan struct{}) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.node == nil {
		return nil, h.changed
	}
	var devices []kubeletplugin.DeviceHealth
	for _, gpu := range h.node.GPUs {
		if gpu.NotOffered != "" {
			continue
		}
		health := kubeletplugin.DeviceHealth{PoolName: pool, DeviceName: gpu.Name, Health: kubeletplugin.HealthStatusUnknown}
		if p := h.probes[gpu.Name]; p != nil && !p.checked.IsZero() {
			health.LastUpdated = p.checked
			health.Health = kubeletplugin.HealthStatusHealthy
			if p.err != nil {
				health.Health = kubeletplugin.HealthStatusUnhealthy
				health.Message = p.err.Error()
			}
		}
		devices = append(devices, health)
	}
	return devices, h.changed
}

// watch probes every offered GPU, once they are found, until ctx ends. A GPU that hangs delays no other.
func (h *Hardware) watch(ctx context.Context) {
	select {
	case <-ctx.Done():
		return
	case <-h.found:
	}
	var group sync.WaitGroup
	defer group.Wait()
	ticker := h.clock.NewTicker(probeInterval)
	defer ticker.Stop()
	for {
		for _, gpu := range h.offered() {
			// The answer is kept as the GPU's health.
			group.Go(func() { _ = h.probe(ctx, gpu) })
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C():
		}
	}
}

func (h *Hardware) offered() []discovery.GPU {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.node == nil {
		return nil
	}
	var gpus []discovery.GPU
	for _, gpu := range h.node.GPUs {
		if gpu.NotOffered == "" {
			gpus = append(gpus, gpu)
		}
	}
	return gpus
}
