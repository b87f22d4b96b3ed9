// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package auditing

import "stowage.dev/stowage/pkg/plugins/deviceclaims/internal/metric"

// What the auditor finds.
var (
	DoubleHeldDevices = metric.Gauge("audit_double_held_devices",
		"Number of devices that several claims hold, at least one of them for itself alone, or of which, or of a counter that "+
			"they take, more is held than there is.")
	DoubleHoldsTotal = metric.Counter("audit_double_holds_total",
		"Number of times that a device was found to be held by several claims, at least one of them for itself alone, or that "+
			"more was held of it, or of a counter that it takes, than there is.")
	Differences = metric.GaugeVec("audit_differences",
		"Number of differences between the claims that are known and the API at the last comparison, by kind: missing, gone, "+
			"outdated, or usage.", "kind")
	ComparisonsTotal = metric.CounterVec("audit_comparisons_total",
		"Number of comparisons of the claims that are known with the API, by result: done, or error (it could not be made).",
		"result")
	LastComparison = metric.Gauge("audit_last_comparison_timestamp_seconds",
		"Unix time of the last comparison with the API that could be made; before the first one, of the auditor's start. 0 if "+
			"auditPeriod is 0.")
	ComparisonPeriod = metric.Gauge("audit_period_seconds",
		"Time between two comparisons with the API, 0 if there are none.")
	StaleInFlight = metric.Gauge("audit_stale_in_flight_allocations",
		"Number of allocations that have been in flight for longer than the binding timeout while no pod is being "+
			"bound with them.")
)
