// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package refusals

import "stowage.dev/stowage/pkg/plugins/deviceclaims/internal/metric"

// RefusedNodes counts what [Finder.Missing] finds.
var RefusedNodes = metric.CounterVec("refused_nodes_total",
	"Number of nodes refused in attempts that found no node for a pod's claims, by the reason that the pod's event gives.",
	"reason")
