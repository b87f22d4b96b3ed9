// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"sync"

	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

var writesTotal = metrics.NewCounterVec(&metrics.CounterOpts{
	Subsystem: "stowage_ownership",
	Name:      "rule_writes_total",
	Help: "Number of writes to the DeviceTaintRule that keeps other schedulers off our devices, by what was done (create, update " +
		"or delete) and result (success or error). More than one create means that somebody deletes the rule.",
	StabilityLevel: metrics.ALPHA,
}, []string{"write", "result"})

var registerMetrics = sync.OnceFunc(func() { legacyregistry.MustRegister(writesTotal) })

func countWrite(write string, err error) {
	result := "success"
	if err != nil {
		result = "error"
	}
	writesTotal.WithLabelValues(write, result).Inc()
}
