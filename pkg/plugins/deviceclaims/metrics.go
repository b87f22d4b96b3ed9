// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/account"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/auditing"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/metric"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/refusals"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/waiting"
)

var (
	allocationsTotal = metric.CounterVec("allocations_total",
		"Number of times that devices were to be chosen on a node picked for a pod, by result: chosen, refused (the node no "+
			"longer fits, or a claim changed), or error.", "result")
	allocationDuration = metrics.NewHistogram(&metrics.HistogramOpts{
		Subsystem:      metric.Subsystem,
		Name:           "allocation_duration_seconds",
		Help:           "Time taken to choose devices on a node picked for a pod and to reserve them.",
		Buckets:        metrics.ExponentialBuckets(0.00001, 4, 10),
		StabilityLevel: metrics.ALPHA,
	})
)

var registerMetrics = sync.OnceFunc(func() {
	legacyregistry.MustRegister(allocationsTotal, allocationDuration, binding.WritesTotal, binding.UndosTotal, refusals.RefusedNodes,
		contention.NodesDecidedAgain, waiting.WaitingPods, waiting.WakeUpsTotal)
	legacyregistry.MustRegister(auditing.DoubleHeldDevices, auditing.DoubleHoldsTotal, auditing.Differences,
		auditing.ComparisonsTotal, auditing.LastComparison,
		auditing.ComparisonPeriod, auditing.StaleInFlight)
	legacyregistry.CustomMustRegister(account.Caches)
})
