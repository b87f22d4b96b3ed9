// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"sync"
	"time"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"stowage.dev/stowage/pkg/tracker"
)

const metricsSubsystem = "stowage_fence"

// Values of the label "result".
const (
	resultPassed    = "passed"
	resultLost      = "lost"
	resultUndecided = "undecided"
	resultTimeout   = "timeout"
	resultChanged   = "changed"
	resultCanceled  = "canceled"
	resultError     = "error"
)

var (
	passagesTotal = metrics.NewCounterVec(&metrics.CounterOpts{
		Subsystem: metricsSubsystem,
		Name:      "passages_total",
		Help: "Number of times that a pod's claims came to the fence, by result: passed; lost, to claims that were allocated " +
			"earlier; undecided, because it is not known who came first or what the devices have to give; timeout, because the watch was silent; " +
			"changed, because a claim is gone or has another allocation; canceled, because the scheduler ends; or error.",
		StabilityLevel: metrics.ALPHA,
	}, []string{"result"})
	waitDuration = metrics.NewHistogram(&metrics.HistogramOpts{
		Subsystem:      metricsSubsystem,
		Name:           "wait_duration_seconds",
		Help:           "Time that a pod's claims spent at the fence, whatever the result: what the fence adds to the time to bind a pod.",
		Buckets:        metrics.ExponentialBuckets(0.0001, 2, 20),
		StabilityLevel: metrics.ALPHA,
	})
)

var registerMetrics = sync.OnceFunc(func() {
	legacyregistry.MustRegister(passagesTotal, waitDuration)
})

func count(err error, took time.Duration) {
	waitDuration.Observe(took.Seconds())
	passagesTotal.WithLabelValues(resultOf(err)).Inc()
}

func resultOf(err error) string {
	var yield *YieldError
	var claimErr *tracker.ClaimError
	switch {
	case err == nil:
		return resultPassed
	case errors.Is(err, ErrTimeout):
		return resultTimeout
	case errors.As(err, &yield) && yield.Verdict.Outcome == tracker.Lost:
		return resultLost
	case yield != nil:
		return resultUndecided
	case errors.As(err, &claimErr):
		return resultChanged
	case errors.Is(err, context.Canceled):
		return resultCanceled
	default:
		return resultError
	}
}
