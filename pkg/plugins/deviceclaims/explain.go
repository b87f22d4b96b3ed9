package deviceclaims

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/pkg/allocator"
)

// explain says why no node satisfies the pod's claims. It is nil if that was not the reason.
func (pl *Plugin) explain(ctx context.Context, c *cycle) *allocator.Explanation {
	requests := c.results.mostRefused()
	if requests == nil {
		return nil
	}
	failures := c.results.failuresFor(requests)
	explanation := allocator.Explain(requests, failures)
	if explanation.Nodes == 0 {
		return nil
	}
	for reason, n := range explanation.Reasons {
		refusedNodesTotal.WithLabelValues(string(reason)).Add(float64(n))
	}
	keep := sets.New[types.UID]()
	for _, pc := range c.claims {
		keep.Insert(pc.claim.UID)
	}
	ctx, cancel := context.WithTimeout(ctx, pl.shared.limits.Holders)
	defer cancel()
	explanation.Holders = allocator.FindHolders(ctx, c.input(ctx, requests, nil), failures, pl.nodeOf, allocator.HolderOptions{Keep: keep})
	return explanation
}

// nodeOf returns the node with the name as it is in this cycle, nil if there is none.
func (pl *Plugin) nodeOf(name string) *v1.Node {
	info, err := pl.handle.SnapshotSharedLister().NodeInfos().Get(name)
	if err != nil {
		return nil
	}
	return info.Node()
}
