package deviceclaims

import (
	"context"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/usage"
)

// obstacle is a claim whose allocation is in the way of its own pod.
type obstacle struct {
	claim  *resourceapi.ResourceClaim
	reason string
}

// obstacle chooses the claim whose allocation is to be given up, nil if none may be. If several may be, it is one whose
// devices could not be made ready; or else one without whose allocation some node would do; or else, because each
// of them takes nodes away, the first one.
func (pl *Plugin) obstacle(ctx context.Context, c *cycle, pod *v1.Pod) *obstacle {
	var candidates []int
	for i, pc := range c.claims {
		if !pl.mayDeallocate(c, i, pod) {
			continue
		}
		if pl.bindingBroken(pc.claim) {
			return &obstacle{pc.claim, "whose devices could not be made ready"}
		}
		candidates = append(candidates, i)
	}
	if len(candidates) > 1 {
		ctx, cancel := context.WithTimeout(ctx, pl.shared.limits.Obstacle)
		defer cancel()
		for _, i := range candidates {
			if node := pl.nodeWithout(ctx, c, i); node != "" {
				return &obstacle{c.claims[i].claim, fmt.Sprintf("which kept the pod off other nodes, such as %s", node)}
			}
		}
	}
	if len(candidates) == 0 {
		return nil
	}
	return &obstacle{c.claims[candidates[0]].claim, "which kept the pod off other nodes"}
}

// nodeWithout returns a node that has devices for the pod's claims if claim i is allocated anew, where all other claims
// can be used and claim i, as it is, cannot. It is empty if there is none or ctx has ended.
func (pl *Plugin) nodeWithout(ctx context.Context, c *cycle, i int) string {
	moved := c.claims[i]
	anew := moved.claim.DeepCopy()
	anew.Status = resourceapi.ResourceClaimStatus{}
	claims := []*resourceapi.ResourceClaim{anew}
	if c.base.requests != nil {
		claims = append(claims, c.base.requests.Claims()...)
	}
	requests, err := allocator.Compile(claims, c.inventory, pl.features)
	if err != nil {
		return ""
	}
	holding := &stake{claim: usage.RefOf(moved.claim)}
	holding.addPools(moved.claim.Status.Allocation)
	input := allocator.Input{Requests: requests, Inventory: c.inventory, Usage: without(c.usage, []*stake{holding}), Policy: c.policy, Scoring: c.scoring}

	nodes, err := pl.handle.SnapshotSharedLister().NodeInfos().List()
	if err != nil {
		return ""
	}
	for _, info := range nodes {
		input.Node = info.Node()
		if ctx.Err() != nil {
			return ""
		}
		if moved.nodes == nil || moved.nodes.Match(input.Node) || !othersUsable(c.claims, i, input.Node) {
			continue
		}
		if allocator.Check(ctx, input).Fits() {
			return input.Node.Name
		}
	}
	return ""
}

// othersUsable tells whether all claims but one can be used on the node as they are allocated.
func othersUsable(claims []podClaim, but int, node *v1.Node) bool {
	others := slices.Concat(claims[:but], claims[but+1:])
	return !slices.ContainsFunc(others, func(pc podClaim) bool { return pc.nodes != nil && !pc.nodes.Match(node) })
}
