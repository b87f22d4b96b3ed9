// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/testutil"
)

// A process may make several trackers, one after the other in tests: their
// metrics are registered once. legacyregistry panics at a second registration.
func TestMetricsAreRegisteredOncePerProcess(t *testing.T) {
	newTracker(t)
	newTracker(t)
	reserveConflicts.WithLabelValues("stale") // a vector shows with its first value
	families, err := legacyregistry.DefaultGatherer.Gather()
	must(t, err)
	found := map[string]int{}
	for _, f := range families {
		found[f.GetName()]++
	}
	for _, name := range []string{"in_flight_allocations", "held_devices", "stale_objects_total", "reserve_conflicts_total"} {
		if n := found[metricsSubsystem+"_"+name]; n != 1 {
			t.Errorf("metric %s is registered %d times", name, n)
		}
	}
}

func TestMetricsSayWhatIsHeldAndInFlight(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5, gpu0, gpu1), claim("b", "ub", 6))
	reserve(t, tr, podA, claim("b", "ub", 6), gpu2)
	tr.Release("ub", podA) // before, the gauge is another tracker's
	for _, step := range []struct {
		name           string
		do             func()
		held, inFlight float64
	}{
		{"listed", func() {}, 2, 0},
		{"reserved", func() { reserve(t, tr, podA, claim("b", "ub", 6), gpu2) }, 3, 1},
		{"shared", func() { tr.Share("ub", podB) }, 3, 1},
		{"released by one", func() { tr.Release("ub", podA) }, 3, 1},
		{"released by both", func() { tr.Release("ub", podB) }, 2, 0},
		{"deleted", func() { must(t, tr.Store().Delete(claim("a", "ua", 11))) }, 0, 0},
	} {
		step.do()
		for _, gauge := range []struct {
			name  string
			value metrics.GaugeMetric
			want  float64
		}{{"held_devices", heldDevices, step.held}, {"in_flight_allocations", inFlightAllocations, step.inFlight}} {
			got, err := testutil.GetGaugeMetricValue(gauge.value)
			must(t, err)
			if got != gauge.want {
				t.Errorf("%s: %s = %v, want %v", step.name, gauge.name, got, gauge.want)
			}
		}
	}
}

func TestMetricsCountWhatIsIgnoredAsStale(t *testing.T) {
	for name, tc := range map[string]struct {
		do   func(*Tracker) error
		want float64
	}{
		"an older event":                     {func(tr *Tracker) error { return tr.Store().Update(claim("a", "ua", 9)) }, 1},
		"an event of a claim that is gone":   {func(tr *Tracker) error { return tr.Store().Update(claim("x", "ux", 9)) }, 1},
		"an older answer":                    {func(tr *Tracker) error { return tr.Assume(claim("a", "ua", 9)) }, 1},
		"the echo of an answer is not stale": {func(tr *Tracker) error { return tr.Store().Update(claim("a", "ua", 10)) }, 0},
		"nor is what is newer":               {func(tr *Tracker) error { return tr.Store().Update(claim("a", "ua", 11)) }, 0},
		"the deletion of an earlier claim":   {func(tr *Tracker) error { return tr.Store().Delete(claim("a", "u0", 9)) }, 1},
		"the deletion of the claim":          {func(tr *Tracker) error { return tr.Store().Delete(claim("a", "ua", 11)) }, 0},
		"the deletion of an unknown claim":   {func(tr *Tracker) error { return tr.Store().Delete(claim("x", "ux", 9)) }, 0},
		"an answer for a claim that is gone": {func(tr *Tracker) error { _ = tr.Assume(claim("x", "ux", 9)); return nil }, 1},
		"an answer for a claim made again":   {func(tr *Tracker) error { _ = tr.Assume(claim("a", "u0", 9)); return nil }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			tr := listed(t, 10, claim("a", "ua", 10))
			before, err := testutil.GetCounterMetricValue(staleObjects)
			must(t, err)
			must(t, tc.do(tr))
			after, err := testutil.GetCounterMetricValue(staleObjects)
			must(t, err)
			if got := after - before; got != tc.want {
				t.Errorf("counted %v, want %v", got, tc.want)
			}
		})
	}
}

func TestMetricsCountRefusedReservationsByReason(t *testing.T) {
	conflicts := func(reason string) float64 {
		value, err := testutil.GetCounterMetricValue(reserveConflicts.WithLabelValues(reason))
		must(t, err)
		return value
	}
	reasons := []string{"stale", "claim_gone", "claim_recreated", "claim_deleting", "claim_allocated", "claim_in_flight", "device_held"}
	for name, tc := range map[string]struct {
		uid    types.UID
		reason string
	}{
		"x": {"ux", "claim_gone"},
		"a": {"ua", "claim_allocated"},
		"b": {"u0", "claim_recreated"},
		"c": {"uc", "device_held"},
		"d": {"ud", ""},
	} {
		t.Run(name, func(t *testing.T) {
			tr := listed(t, 10, claim("a", "ua", 5, gpu0), claim("b", "ub", 6), claim("c", "uc", 7), claim("d", "ud", 8))
			before := map[string]float64{}
			for _, reason := range reasons {
				before[reason] = conflicts(reason)
			}
			wanted := gpu0
			if name == "d" {
				wanted = gpu1
			}
			err := tr.Reserve(tr.Snapshot().Usage, podA, []Reservation{{Claim: claim(name, tc.uid, 5), Allocation: allocation(wanted)}})
			if (err != nil) != (tc.reason != "") {
				t.Fatalf("Reserve() = %v", err)
			}
			for _, reason := range reasons {
				want := 0.0
				if reason == tc.reason {
					want = 1
				}
				if got := conflicts(reason) - before[reason]; got != want {
					t.Errorf("%v refused as %s, want %v", got, reason, want)
				}
			}
		})
	}
}
