// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package refusals

import (
	"k8s.io/component-base/metrics"
)

// RefusedNodes counts what [Finder.Missing] finds.
var RefusedNodes = metrics.NewCounterVec(&metrics.CounterOpts{
	Subsystem:      "stowage_scheduler",
	Name:           "refused_nodes_total",
	Help:           "Number of nodes refused in attempts that found no node for a pod's claims, by the reason that the pod's event gives.",
	StabilityLevel: metrics.ALPHA,
}, []string{"reason"})
