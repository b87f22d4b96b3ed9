// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package auditing

import (
	"k8s.io/component-base/metrics"
)

// What the auditor finds.
var (
	DoubleHeldDevices = metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem: "stowage_scheduler",
		Name:      "audit_double_held_devices",
		Help: "Number of devices that several claims hold, at least one of them for itself alone, or of which, or of a counter that " +
			"they take, more is held than there is.",
		StabilityLevel: metrics.ALPHA,
	})
	DoubleHoldsTotal = metrics.NewCounter(&metrics.CounterOpts{
		Subsystem: "stowage_scheduler",
		Name:      "audit_double_holds_total",
		Help: "Number of times that a device was found to be held by several claims, at least one of them for itself alone, or that " +
			"more was held of it, or of a counter that it takes, than there is.",
		StabilityLevel: metrics.ALPHA,
	})
	Differences = metrics.NewGaugeVec(&metrics.GaugeOpts{
		Subsystem: "stowage_scheduler",
		Name:      "audit_differences",
		Help: "Number of differences between the claims that are known and the API at the last comparison, by kind: missing, gone, " +
			"outdated, or usage.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"kind"})
	ComparisonsTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Subsystem:      "stowage_scheduler",
		Name:           "audit_comparisons_total",
		Help:           "Number of comparisons of the claims that are known with the API, by result: done, or error (it could not be made).",
		StabilityLevel: metrics.ALPHA,
	}, []string{"result"})
	LastComparison = metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem: "stowage_scheduler",
		Name:      "audit_last_comparison_timestamp_seconds",
		Help: "Unix time of the last comparison with the API that could be made; before the first one, of the auditor's start. 0 if " +
			"auditPeriod is 0.",
		StabilityLevel: metrics.ALPHA,
	})
	ComparisonPeriod = metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem:      "stowage_scheduler",
		Name:           "audit_period_seconds",
		Help:           "Time between two comparisons with the API, 0 if there are none.",
		StabilityLevel: metrics.ALPHA,
	})
	StaleInFlight = metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem: "stowage_scheduler",
		Name:      "audit_stale_in_flight_allocations",
		Help: "Number of allocations that have been in flight for longer than the binding timeout while no pod is being " +
			"bound with them.",
		StabilityLevel: metrics.ALPHA,
	})
)
