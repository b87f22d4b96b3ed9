// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"stowage.dev/stowage/pkg/agent/health"
)

// reportInterval is how often the kubelet is told, although nothing has changed: it forgets a device's health after 30 s, and everything
// when any stream of the driver ends, as in an update of the agent. Until the next report its pods' devices would be Unknown.
const reportInterval = 2 * time.Second

// For takeOverTime after this agent has become the leading one the kubelet is told every takeOverInterval: the other agent, whose stream is
// about to end, has just stopped.
const (
	takeOverTime     = 10 * time.Second
	takeOverInterval = 200 * time.Millisecond
)

// WatchHealthStatus implements kubeletplugin.DRAPlugin: the health of each published device, at every change and every reportInterval. The
// first report waits until each GPU has been asked, with an answer or without one: a device does not become Unknown because the agent
// was updated.
func (p *plugin) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	monitor, clock := p.hardware.monitor, p.hardware.opts.Clock
	for {
		known, changed := monitor.Known()
		if known || p.hardware.opts.Keeper.Why() != nil {
			select {
			case <-ctx.Done():
				return nil
			case reports <- kubeletplugin.DeviceHealthReport{Devices: p.health()}:
			}
		}
		next := clock.NewTimer(p.hardware.reportInterval())
		select {
		case <-ctx.Done():
			next.Stop()
			return nil
		case <-changed:
			next.Stop()
		case <-next.C():
		}
	}
}

// reportInterval is how long from now the kubelet is told again.
func (h *Hardware) reportInterval() time.Duration {
	if h.memory.justLeads(takeOverTime) {
		return takeOverInterval
	}
	return reportInterval
}

var healthStatuses = map[health.Status]kubeletplugin.HealthStatus{
	health.Unknown:   kubeletplugin.HealthStatusUnknown,
	health.Healthy:   kubeletplugin.HealthStatusHealthy,
	health.Unhealthy: kubeletplugin.HealthStatusUnhealthy,
}

// health is what is known of every published device.
func (p *plugin) health() []kubeletplugin.DeviceHealth {
	resources, _ := p.hardware.Resources(p.pool)
	why := p.hardware.opts.Keeper.Why()
	var list []kubeletplugin.DeviceHealth
	for name, pool := range resources.Pools {
		for _, slice := range pool.Slices {
			for _, device := range slice.Devices {
				verdict := p.hardware.Health(device.Name)
				message := verdict.Message()
				if why != nil { // nobody asks the GPU, which may be reset meanwhile
					verdict, message = health.Verdict{Status: health.Unknown, Asked: p.hardware.opts.Clock.Now()}, why.Message
				}
				list = append(list, kubeletplugin.DeviceHealth{
					PoolName:    name,
					DeviceName:  device.Name,
					Health:      healthStatuses[verdict.Status],
					LastUpdated: verdict.Asked,
					Message:     message,
				})
			}
		}
	}
	return list
}
