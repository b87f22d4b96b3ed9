// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"errors"
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

const metricsSubsystem = "stowage_tracker"

// The process has one tracker, so its metrics are the process's.
var (
	inFlightAllocations = metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem:      metricsSubsystem,
		Name:           "in_flight_allocations",
		Help:           "Number of claims with an allocation that has been decided and not been written yet.",
		StabilityLevel: metrics.ALPHA,
	})
	heldDevices = metrics.NewGauge(&metrics.GaugeOpts{
		Subsystem:      metricsSubsystem,
		Name:           "held_devices",
		Help:           "Number of devices that at least one claim holds, allocated or in flight.",
		StabilityLevel: metrics.ALPHA,
	})
	staleObjects = metrics.NewCounter(&metrics.CounterOpts{
		Subsystem:      metricsSubsystem,
		Name:           "stale_objects_total",
		Help:           "Number of claim objects ignored because something newer was known.",
		StabilityLevel: metrics.ALPHA,
	})
	reserveConflicts = metrics.NewCounterVec(&metrics.CounterOpts{
		Subsystem:      metricsSubsystem,
		Name:           "reserve_conflicts_total",
		Help:           "Number of reservations refused, by reason.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"reason"})
)

var registerMetrics = sync.OnceFunc(func() {
	legacyregistry.MustRegister(inFlightAllocations, heldDevices, staleObjects, reserveConflicts)
})

// conflictReasons are the values of the label "reason".
var conflictReasons = []struct {
	err    error
	reason string
}{
	{ErrStale, "stale"},
	{ErrClaimGone, "claim_gone"},
	{ErrClaimRecreated, "claim_recreated"},
	{ErrClaimDeleting, "claim_deleting"},
	{ErrClaimAllocated, "claim_allocated"},
	{ErrClaimInFlight, "claim_in_flight"},
}

// countConflict counts a refused reservation.
func countConflict(err error) {
	for _, c := range conflictReasons {
		if errors.Is(err, c.err) {
			reserveConflicts.WithLabelValues(c.reason).Inc()
			return
		}
	}
	reserveConflicts.WithLabelValues("device_held").Inc()
}
