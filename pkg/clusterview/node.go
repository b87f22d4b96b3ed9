// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterview

import (
	"slices"

	v1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/snapshot"
)

// closedTaints are those of nodes that take no pods, whatever the hardware: cordoned, not ready, or out of reach.
var closedTaints = []string{v1.TaintNodeUnschedulable, v1.TaintNodeNotReady, v1.TaintNodeUnreachable}

// closedTo returns what tells whether a node takes no pods: it is closed, or its slices are left and it is gone. A snapshot without nodes
// does not tell.
func closedTo(s *snapshot.Snapshot) func(node string) bool {
	open := map[string]bool{}
	for _, node := range s.Nodes {
		open[node.Name] = !node.Spec.Unschedulable && !slices.ContainsFunc(node.Spec.Taints, func(t v1.Taint) bool {
			return slices.Contains(closedTaints, t.Key) && t.Effect != v1.TaintEffectPreferNoSchedule
		})
	}
	return func(node string) bool { return len(open) > 0 && node != Network && !open[node] }
}

// Closed are the nodes that have GPUs and take no pods. [Sizes], [FreeGroups] and [Total] count no GPU of them as one that can be had.
func Closed(gpus []*GPU) (nodes []string) {
	for _, g := range gpus {
		if g.closed {
			nodes = append(nodes, g.Node)
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}
