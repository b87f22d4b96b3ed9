// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"sync"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare/internal/locks"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
)

var deviceUseSeconds = metrics.NewCounterVec(&metrics.CounterOpts{
	Namespace:      "stowage",
	Subsystem:      "agent",
	Name:           "device_use_seconds_total",
	Help:           "How long claims had a device, counted when it is released.",
	StabilityLevel: metrics.ALPHA,
}, []string{"device"})

// RegisterMetrics registers the package's metrics in the process's registry, once.
var RegisterMetrics = sync.OnceFunc(func() { legacyregistry.MustRegister(locks.WaitSeconds, steps.Seconds, deviceUseSeconds) })

// countUse enters how long the claim had its devices.
func countUse(entry *ledger.Entry, now time.Time) (used time.Duration) {
	if entry.Completed.IsZero() {
		return 0
	}
	used = max(0, now.Sub(entry.Completed))
	for _, device := range entry.Devices {
		if !device.AdminAccess {
			deviceUseSeconds.WithLabelValues(device.Device).Add(used.Seconds())
		}
	}
	return used
}
