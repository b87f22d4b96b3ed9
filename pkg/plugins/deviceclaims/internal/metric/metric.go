// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package metric makes the scheduler's metrics, which are alike but for their names, texts and labels.
package metric

import "k8s.io/component-base/metrics"

// Subsystem begins the names of all.
const Subsystem = "stowage_scheduler"

// Gauge returns a gauge without labels.
func Gauge(name, help string) *metrics.Gauge {
	return metrics.NewGauge(&metrics.GaugeOpts{Subsystem: Subsystem, Name: name, Help: help, StabilityLevel: metrics.ALPHA})
}

// GaugeVec returns a gauge for each combination of its labels' values.
func GaugeVec(name, help string, labels ...string) *metrics.GaugeVec {
	return metrics.NewGaugeVec(&metrics.GaugeOpts{Subsystem: Subsystem, Name: name, Help: help, StabilityLevel: metrics.ALPHA}, labels)
}

// Counter returns a counter without labels.
func Counter(name, help string) *metrics.Counter {
	return metrics.NewCounter(&metrics.CounterOpts{Subsystem: Subsystem, Name: name, Help: help, StabilityLevel: metrics.ALPHA})
}

// CounterVec returns a counter for each combination of its labels' values.
func CounterVec(name, help string, labels ...string) *metrics.CounterVec {
	return metrics.NewCounterVec(&metrics.CounterOpts{Subsystem: Subsystem, Name: name, Help: help, StabilityLevel: metrics.ALPHA}, labels)
}
