// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package refusals

import (
	"context"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// Idle is what is reserved for a pod that waits, if it is in nobody's way.
func Idle(claim *resourceapi.ResourceClaim, pod *v1.Pod) *binding.GivenUp {
	return &binding.GivenUp{
		Claim: claim, User: pod.UID, Shared: !podclaims.UsedOnlyBy(claim, pod.UID), Reason: "which others may use while the pod waits",
	}
}

// Obstacle chooses the claim whose allocation is to be given up, nil if there is none. It is one whose
// devices could not be made ready; or else one without whose allocation some node would do; or else one of several without which some
// node would do, of which the others follow when the pod is tried again. If there is no time to find out, it is the first one: each of them
// takes nodes away.
//
// If that would help nothing, it is still one that is reserved for the pod or its group, also if it rules out no node, see Kept. A
// pod that waits holds nothing: two of them could wait for each other's devices for ever.
func (f *Finder) Obstacle(ctx context.Context, c *cycle.State, pod *v1.Pod) *binding.GivenUp {
	found := func(i int, reason string) *binding.GivenUp {
		return f.givenUp(c.Claims[i], pod, c.Claims[i].User.UID, reason)
	}
	var candidates []int
	for i, pc := range c.Claims {
		if !f.MayGiveUp(c, i, pod) {
			continue
		}
		if why := f.Binder.WhyBroken(pc.Claim); why != "" {
			return found(i, "which could not be made ready: "+why)
		}
		candidates = append(candidates, i)
	}
	if i, why := f.inTheWayOf(ctx, c, pod, candidates); why != "" {
		return found(i, why)
	}
	return f.Kept(c.Claims, pod)
}

// Kept returns a reservation that is kept for a pod that waits, as by a scheduler that has ended: its own, also where its
// group has one, too, or else its group's, of which no pod runs with the claim. It returns nil if there is none, or it may
// be another scheduler's that binds the pod.
func (f *Finder) Kept(claims []podclaims.Claim, pod *v1.Pod) *binding.GivenUp {
	kept := func(pc podclaims.Claim, user types.UID) bool {
		return pc.Claim.Status.Allocation != nil && podclaims.IsReservedFor(pc.Claim, user) && f.Binder.CheckNotAdopted(pc.Claim, user) == nil
	}
	for _, pc := range claims {
		if kept(pc, pod.UID) {
			return f.givenUp(pc, pod, pod.UID, "which others may use while the pod waits")
		}
	}
	for _, pc := range claims {
		if pc.User.UID != pod.UID && kept(pc, pc.User.UID) && !f.Groups.UsedByGroup(pc, pod) {
			return f.givenUp(pc, pod, pc.User.UID, "which others may use while the pod's group waits")
		}
	}
	return nil
}

// givenUp is what the user, who is the pod or its group, gives up of the claim.
func (f *Finder) givenUp(pc podclaims.Claim, pod *v1.Pod, user types.UID, reason string) *binding.GivenUp {
	return &binding.GivenUp{Claim: pc.Claim, User: user, Shared: f.Groups.UsedByOthers(pc, pod), Reason: reason}
}

// inTheWayOf returns the one of the candidates that keeps the pod off nodes, and says so. It says nothing if there is none.
func (f *Finder) inTheWayOf(ctx context.Context, c *cycle.State, pod *v1.Pod, candidates []int) (i int, why string) {
	if len(candidates) == 0 {
		return 0, ""
	}
	ctx, cancel := context.WithTimeout(ctx, f.ObstacleLimit)
	defer cancel()
	for _, i := range candidates {
		if node := f.nodeWithout(ctx, c, pod, []int{i}); node != "" {
			return i, fmt.Sprintf("which kept the pod off other nodes, such as %s", node)
		}
	}
	if node := f.nodeWithout(ctx, c, pod, candidates); node != "" {
		for needed := candidates; ; {
			fewer := needed[1:]
			if f.nodeWithout(ctx, c, pod, fewer) == "" {
				return needed[0], fmt.Sprintf("which with others kept the pod off other nodes, such as %s", node)
			}
			needed = fewer
		}
	}
	if ctx.Err() != nil {
		return candidates[0], "which kept the pod off other nodes"
	}
	return 0, ""
}

// nodeWithout returns a node that has devices for the pod's claims if some of them, by their indexes, are allocated anew, where all others
// can be used and these, as they are, cannot. What rules a node out for certain besides devices is looked at, too, and what pods that are
// nominated to it are going to get is left to them. It is empty if there is none or ctx has ended.
func (f *Finder) nodeWithout(ctx context.Context, c *cycle.State, pod *v1.Pod, moved []int) string {
	var anew []*resourceapi.ResourceClaim
	var holding []*resourceapi.ResourceClaim
	for _, i := range moved {
		claim := c.Claims[i].Claim
		holding = append(holding, claim)
		claim = claim.DeepCopy()
		claim.Status = resourceapi.ResourceClaimStatus{}
		anew = append(anew, claim)
	}
	free := contention.WithoutClaims(c.Usage, holding)
	input := allocator.Input{Inventory: c.Inventory, Policy: c.Policy, Scoring: c.Scoring}
	nodes, err := f.Nodes.SnapshotSharedLister().NodeInfos().List()
	if err != nil {
		return ""
	}
	suitable := f.Setup.Suitable(klog.FromContext(ctx), pod)
	compiled := map[*allocator.Requests]*allocator.Requests{} // by what the node has to satisfy without the moved claims
	for _, info := range nodes {
		if ctx.Err() != nil {
			return ""
		}
		if !f.inTheWay(c, moved, info.Node()) || !suitable(info.Node()) {
			continue
		}
		wanted, status := c.WantedOn(f.Extended, info)
		if !status.IsSuccess() {
			continue
		}
		requests, known := compiled[wanted.Requests]
		if !known {
			claims := anew
			if wanted.Requests != nil {
				claims = append(slices.Clip(anew), wanted.Requests.Claims()...)
			}
			requests, _ = allocator.CompileWithin(ctx, claims, c.Inventory, f.Rivals.Features) // nil with an error
			compiled[wanted.Requests] = requests
		}
		if requests == nil {
			continue
		}
		input.Node, input.Requests = info.Node(), requests
		input.Usage = c.Holders.WithNominees(ctx, f.Rivals.NominatedBefore(pod, info.Node().Name), info.Node(), c.Inventory, free)
		if allocator.Check(ctx, input).Fits() {
			return input.Node.Name
		}
	}
	return ""
}

// inTheWay tells whether some of the given claims rule the node out as they are allocated, and no others do.
func (f *Finder) inTheWay(c *cycle.State, claims []int, node *v1.Node) bool {
	found := false
	for i := range c.Claims {
		if f.WhyUnusable(&c.Claims[i], node) == "" {
			continue
		}
		if !slices.Contains(claims, i) {
			return false
		}
		found = true
	}
	return found
}

// MayGiveUp tells whether claim i is allocated in a way that rules out nodes, and the pod may give up the allocation, or
// its own reservation if others use the claim, too.
func (f *Finder) MayGiveUp(c *cycle.State, i int, pod *v1.Pod) bool {
	pc := c.Claims[i]
	if pc.Claim.Status.Allocation == nil {
		return false
	}
	// PreFilter has left out nodes that the allocation does not name, so Filter did not see them.
	pinned := pc.Nodes != nil && podclaims.NodesByName(pc.Claim.Status.Allocation.NodeSelector) != nil
	if !pinned && !c.Results.IsUnusable(i) {
		return false
	}
	return !f.Groups.UsedByGroup(pc, pod) && (podclaims.IsReservedFor(pc.Claim, pc.User.UID) || !f.Groups.UsedByOthers(pc, pod))
}
