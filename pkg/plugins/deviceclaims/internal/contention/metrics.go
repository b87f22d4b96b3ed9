// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contention

import "k8s.io/component-base/metrics"

// NodesDecidedAgain counts what [Rivals.Judge] decides.
var NodesDecidedAgain = metrics.NewCounter(&metrics.CounterOpts{
	Subsystem: "stowage_scheduler",
	Name:      "nodes_decided_again_total",
	Help: "Number of refused nodes that were decided once more, without what pods of lower priority hold or what is about to be " +
		"released, to know whether preemption can help.",
	StabilityLevel: metrics.ALPHA,
})
