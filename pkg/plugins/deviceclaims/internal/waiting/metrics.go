// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package waiting

import (
	"time"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/metric"
	"stowage.dev/stowage/pkg/wakeup"
)

var (
	// WaitingPods is how many pods wait, as [Options] has it counted.
	WaitingPods = metric.Gauge("waiting_pods",
		"Number of pods with claims that have been tried and not been scheduled yet.")
	// WakeUpsTotal are the wake-ups and what came of them, as [Options] has them counted.
	WakeUpsTotal = metric.CounterVec("wakeups_total",
		"Number of times that a pod waiting for devices or claims was woken, by cause (device: freed; slice: new, gone or changed, also "+
			"by taints; class; claim: the pod's own; node; pod; "+
			"next: a pod woken earlier did not take the devices; retry: the last attempt had no answer) and by result: placed (the pod was "+
			"bound), or not_placed.", "result", "cause")
)

// Options are those of a room whose pods and wake-ups are counted. budget is the time to find out whether a pod fits.
func Options(budget time.Duration) wakeup.Options {
	return wakeup.Options{
		Budget:    budget,
		OnOutcome: countWakeUp,
		OnSize:    func(waiting int) { WaitingPods.Set(float64(waiting)) },
	}
}

// countWakeUp counts the outcome of a wake-up.
func countWakeUp(cause wakeup.Cause, placed bool) {
	result := "not_placed"
	if placed {
		result = "placed"
	}
	WakeUpsTotal.WithLabelValues(result, string(cause)).Inc()
}
