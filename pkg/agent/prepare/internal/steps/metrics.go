// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"time"

	"k8s.io/component-base/metrics"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// Seconds is the metric of how long steps take. Who uses the package registers it.
var Seconds = metrics.NewHistogramVec(&metrics.HistogramOpts{
	Namespace: "stowage",
	Subsystem: "agent",
	Name:      "step_duration_seconds",
	Help: "How long the steps of preparing and unpreparing claims took, by operation (prepare, or unprepare: also of what is " +
		"undone after a failure), step (a kind of side effect as in the ledger, or Find, Decide, Record, Verify) and outcome (ok, error).",
	Buckets:        []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 25},
	StabilityLevel: metrics.ALPHA,
}, []string{"operation", "step", "outcome"})

// The operations of Seconds.
const (
	Preparing   = "prepare"
	Unpreparing = "unprepare"
)

// The steps that are no side effects of their own; the others have the words of the ledger.
const (
	Find   ledger.StepKind = "Find"   // NVML answers for the claim's GPUs
	Decide ledger.StepKind = "Decide" // they are looked at, and what to do is listed
	Record ledger.StepKind = "Record" // the ledger is written
	Verify ledger.StepKind = "Verify" // the result is read as the container runtime will
)

// measure enters how long a step took that began at start and ends now, with *err. To be deferred.
func measure(operation string, step ledger.StepKind, start time.Time, err *error) {
	outcome := "ok"
	if *err != nil {
		outcome = "error"
	}
	Seconds.WithLabelValues(operation, string(step), outcome).Observe(time.Since(start).Seconds())
}

// Measured enters how long f takes.
func Measured(operation string, step ledger.StepKind, f func() error) (err error) {
	defer measure(operation, step, time.Now(), &err)
	return f()
}
