// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/decisions"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
	"stowage.dev/stowage/pkg/tracker"
)

// maxReserveAttempts bounds how often an allocation is decided again because usage changed meanwhile. Only writes of
// other schedulers and releases come in between, so more than two are rare.
const maxReserveAttempts = 8

// Reserve decides which devices the pod's claims get on the chosen node, and puts these allocations in flight:
// from then on nobody else gets the devices. The usage may have changed since PreFilter, so it is decided on
// the present one. Devices that nominated pods are going to get are left to them, as they are in Filter.
//
// In a cycle of the pod's group all that is only on trial, see [contention.Trial].
func (pl *Plugin) Reserve(ctx context.Context, state fwk.CycleState, pod *v1.Pod, nodeName string) *fwk.Status {
	c, err := cycle.Read(state)
	if err != nil {
		return fwk.AsStatus(err)
	}
	if c == nil {
		return nil
	}
	*c.Binding = cycle.Progress{}
	inGroup := state.IsPodGroupSchedulingCycle()
	if !inGroup {
		pl.shared.memory.Attempts.Begin(pl.handle, pod)
	}
	node, err := pl.handle.SnapshotSharedLister().NodeInfos().Get(nodeName)
	if err != nil {
		return fwk.AsStatus(fmt.Errorf("look up node %s: %w", nodeName, err))
	}
	wanted, status := c.DecidedFor(pl.extended, node)
	if !status.IsSuccess() {
		return status
	}
	if inGroup {
		return pl.allocateOnTrial(ctx, c, pod, node.Node(), wanted.Requests)
	}
	if status := pl.takePlaces(c, pod); !status.IsSuccess() {
		return status
	}
	if status := pl.join(c, pod, node.Node()); !status.IsSuccess() {
		return status
	}
	if wanted.Requests != nil {
		if status := pl.allocate(ctx, c, pod, node.Node(), wanted.Requests); !status.IsSuccess() {
			return status
		}
	}
	c.Binding.Extended.Variant = wanted
	pl.shared.waiting.Placed(pod.UID)
	// The framework has dropped the nomination already, and what the pod got need not be what was kept for it.
	pl.shared.common.Nominations.End(pod.UID, func(string) bool { return true })
	return nil
}

// takePlaces gives the pod a place among the users of each of its claims. Its group has one for all its pods.
func (pl *Plugin) takePlaces(c *cycle.State, pod *v1.Pod) *fwk.Status {
	for _, pc := range c.Claims {
		if pc.User.UID != pod.UID {
			continue
		}
		if err := pl.shared.books.Places.Take(pc.Claim, pod.UID); err != nil {
			pl.shared.waiting.Failed(pod.UID, pl.binder.Clock.Now())
			return fwk.NewStatus(fwk.Unschedulable).WithError(err)
		}
	}
	return nil
}

// leavePlaces gives them back. Whoever was refused for want of a place may have one now.
func (pl *Plugin) leavePlaces(c *cycle.State, pod *v1.Pod) {
	for _, pc := range c.Claims {
		if pl.shared.books.Places.Leave(pc.Claim.UID, pod.UID) {
			pl.shared.waiting.ClaimChanged(types.NamespacedName{Namespace: pc.Claim.Namespace, Name: pc.Claim.Name})
		}
	}
}

func (pl *Plugin) allocate(ctx context.Context, c *cycle.State, pod *v1.Pod, node *v1.Node, requests *allocator.Requests) *fwk.Status {
	start := pl.binder.Clock.Now()
	reserved, err := pl.tryAllocate(ctx, c, pod, c.Input(ctx, requests, node))
	allocationDuration.Observe(pl.binder.Clock.Since(start).Seconds())

	var refusal *refusedError
	var claimErr *tracker.ClaimError
	switch {
	case err == nil:
		allocationsTotal.WithLabelValues("chosen").Inc()
		c.Binding.Reserved = append(c.Binding.Reserved, reserved...)
		for _, r := range reserved {
			decisions.Log(ctx, decisions.Allocated, pod, node.Name, r.Claim, r.Allocation, c.WhyChosen(pod, node.Name))
		}
		return nil
	case errors.As(err, &refusal), errors.As(err, &claimErr):
		allocationsTotal.WithLabelValues("refused").Inc()
		pl.shared.memory.Attempts.Refuse(pod, pl.binder.Clock.Now())
		// Another node may do, and the change that took this one away need not free anything.
		pl.shared.waiting.Failed(pod.UID, pl.binder.Clock.Now())
		return fwk.NewStatus(fwk.Unschedulable).
			WithError(&podevents.Postponed{EventType: v1.EventTypeNormal, Reason: podevents.ReasonLostRace, Err: err})
	default:
		allocationsTotal.WithLabelValues("error").Inc()
		return fwk.AsStatus(tellHeld(ctx, pl.rivals.NameAll, pod, err))
	}
}

// tellHeld takes the name of another namespace's claim from the error of a decision that gives away what that has. It
// is a mistake of ours, so the log has it.
func tellHeld(ctx context.Context, nameAll bool, pod *v1.Pod, err error) error {
	var held *tracker.HeldError
	if !errors.As(err, &held) {
		return err
	}
	klog.FromContext(ctx).Error(err, "A device that a claim holds was chosen for another one", "pod", klog.KObj(pod))
	if nameAll {
		return err
	}
	return &podevents.ToldError{Text: podevents.WithoutForeign(err.Error(), pod.Namespace, held.Holder), Err: err}
}

// refusedError says that the node does not satisfy the claims any more.
type refusedError struct{ reason explain.Reason }

func (e *refusedError) Error() string { return string(e.reason) }

func (pl *Plugin) tryAllocate(ctx context.Context, c *cycle.State, pod *v1.Pod, input allocator.Input) ([]tracker.Reservation, error) {
	node := input.Node
	nominees := c.Nominees
	if c.Trial == nil {
		nominees = pl.rivals.NominatedBefore(pod, node.Name)
	}
	input.Attempt = c.Budget.Again() // of its own: what Filter found in time takes no longer here, unless things have changed
	var stale error
	for range maxReserveAttempts {
		view := pl.shared.account.Tracker.Snapshot().Usage
		input.Usage = c.WithoutUnseen(node, c.Holders.WithNominees(ctx, nominees, node, c.Inventory, view))
		reserved, err := decideFor(ctx, c, input)
		if err != nil {
			return nil, err
		}
		for i := range reserved {
			if user := c.UserOf(reserved[i].Claim.UID); user != pod.UID {
				reserved[i].Group = user
			}
		}
		err = pl.shared.account.Tracker.Reserve(view, pod.UID, reserved)
		if !errors.Is(err, tracker.ErrStale) {
			if err != nil {
				return nil, fmt.Errorf("node %s: %w", node.Name, err)
			}
			c.Binding.Usage = view
			return reserved, nil
		}
		stale = err
	}
	return nil, fmt.Errorf("node %s: gave up after %d attempts: %w", node.Name, maxReserveAttempts, stale)
}

// decideFor returns what the claims that need an allocation get: without devices that failed for the pod, if possible.
func decideFor(ctx context.Context, c *cycle.State, input allocator.Input) ([]tracker.Reservation, error) {
	if c.Failed != nil {
		others := input
		others.Usage = c.Failed.Without(input.Usage)
		if reserved, err := decide(ctx, others); err == nil {
			return reserved, nil
		}
	}
	return decide(ctx, input)
}

// decide returns what the claims that need an allocation get.
func decide(ctx context.Context, input allocator.Input) ([]tracker.Reservation, error) {
	result := allocator.Allocate(ctx, input)
	if !result.Fits() {
		return nil, &refusedError{result.Failure.Reason}
	}
	claims := input.Requests.Claims()
	if len(result.Allocations) != len(claims) {
		return nil, fmt.Errorf("node %s: %d allocations for %d claims", input.Node.Name, len(result.Allocations), len(claims))
	}
	reserved := make([]tracker.Reservation, len(claims))
	for i, claim := range claims {
		reserved[i] = tracker.Reservation{Claim: claim, Allocation: &result.Allocations[i]}
	}
	return reserved, nil
}

// allocateOnTrial gives the pod devices on trial. What preemption has taken away to see whether the group fits is free for it.
func (pl *Plugin) allocateOnTrial(ctx context.Context, c *cycle.State, pod *v1.Pod, node *v1.Node,
	requests *allocator.Requests,
) *fwk.Status {
	for _, pc := range c.Claims {
		if pc.Shared != nil {
			c.Trial.Join(pod.UID, pc.Claim.UID)
		}
	}
	if requests != nil {
		input := c.Input(ctx, requests, node)
		input.Attempt = c.Budget.Again()
		c.Nominees = pl.rivals.NominatedBefore(pod, node.Name)
		input.Usage = c.WithoutUnseen(node, c.Holders.WithNominees(ctx, c.Nominees, node, c.Inventory, input.Usage))
		reserved, err := decideFor(ctx, c, input)
		var refusal *refusedError
		switch {
		case errors.As(err, &refusal):
			return fwk.NewStatus(fwk.Unschedulable, err.Error())
		case err != nil:
			return fwk.AsStatus(err)
		}
		c.Trial.Give(pod.UID, reserved)
	}
	c.Placed = true
	return nil
}

// join makes the pod one of those that get what has been decided for the claims that they share: another pod of the group has it in
// flight, or has written it already.
func (pl *Plugin) join(c *cycle.State, pod *v1.Pod, node *v1.Node) *fwk.Status {
	for _, pc := range c.Claims {
		if pc.Shared == nil {
			continue
		}
		allocation, flying := pl.shared.account.Tracker.Share(pc.Claim.UID, pod.UID)
		if flying {
			c.Binding.Reserved = append(c.Binding.Reserved, tracker.Reservation{Claim: pc.Claim, Allocation: allocation})
			c.Binding.DecidedByOthers++
		} else if claim, err := pl.shared.account.Tracker.Get(pc.Claim.Namespace, pc.Claim.Name); err == nil && claim.UID == pc.Claim.UID {
			allocation = claim.Status.Allocation
			c.Binding.Joined = append(c.Binding.Joined, claim)
		}
		usable := false
		if allocation != nil {
			nodes, err := podclaims.NodesOf(pc.Claim, allocation)
			usable = err == nil && (nodes == nil || nodes.Match(node))
		}
		if !usable {
			pl.shared.waiting.Failed(pod.UID, pl.binder.Clock.Now())
			return fwk.NewStatus(fwk.Unschedulable).WithError(podevents.Postpone(podevents.ReasonClaimChanged, pc.Claim,
				fmt.Errorf("claim %s has not got for another pod of the group what was planned", klog.KObj(pc.Claim))))
		}
	}
	return nil
}

// Unreserve undoes what Reserve and PreBind did for the pod, the last step first, and then pauses if the pod was refused at
// the fence. The framework calls it, once, whatever has failed. It reads and writes the API only
// where PreBind may have written. A claim that cannot be restored keeps its allocation and its reservation for the
// pod, which uses both when it is tried again; when the pod is deleted, kube-controller-manager releases them.
func (pl *Plugin) Unreserve(ctx context.Context, state fwk.CycleState, pod *v1.Pod, nodeName string) {
	c, err := cycle.Read(state)
	if err != nil || c == nil {
		return
	}
	if state.IsPodGroupSchedulingCycle() {
		c.Trial.TakeBack(pod.UID)
		return
	}
	b := *c.Binding
	*c.Binding = cycle.Progress{}
	taken := b.Taken()
	kept := pl.binder.Undo(ctx, pod, nodeName, b.Writes, b.Sent)
	pl.extended.Undo(ctx, pod, &b.Extended, kept)
	// Only now: what the writes did is known to the tracker, so that no device is free that is not.
	for _, r := range b.Reserved {
		pl.shared.account.Tracker.Release(r.Claim.UID, pod.UID)
	}
	for _, t := range taken {
		if !kept.Has(t.Claim.UID) {
			pl.binder.LogGivenBack(ctx, pod, nodeName, t.Claim, t.Allocation, b.WhyGivenBack())
		}
	}
	pl.leavePlaces(c, pod)
	pause := pl.shared.memory.Attempts.Fail(pod)
	pl.shared.waiting.Unplaced(pod.UID)
	pl.pauseMember(ctx, pod, pause)
	if b.GaveWay {
		pl.passage.Pause(ctx)
	}
}

// pauseMember holds up the goroutine that binds a pod of a group, which has nothing any more that
// others could use but its place on the node.
func (pl *Plugin) pauseMember(ctx context.Context, pod *v1.Pod, pause time.Duration) {
	if pl.rivals.PodOf(podclaims.PodName(pod), pod.UID) == nil {
		pl.shared.memory.Attempts.Forget(pod) // its end may have been told before
		return
	}
	if pause == 0 {
		return
	}
	select {
	case <-pl.binder.Clock.After(pause):
	case <-ctx.Done():
	case <-pl.shared.ctx.Done():
	}
}
