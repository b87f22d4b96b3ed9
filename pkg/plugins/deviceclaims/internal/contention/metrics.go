// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contention

import "stowage.dev/stowage/pkg/plugins/deviceclaims/internal/metric"

// NodesDecidedAgain counts what [Rivals.Judge] decides.
var NodesDecidedAgain = metric.Counter("nodes_decided_again_total",
	"Number of refused nodes that were decided once more, without what pods of lower priority hold or what is about to be "+
		"released, to know whether preemption can help.")
