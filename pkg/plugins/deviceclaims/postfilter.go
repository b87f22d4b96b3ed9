package deviceclaims

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
)

// deallocateTimeout bounds the write of PostFilter, which holds up scheduling.
const deallocateTimeout = 10 * time.Second

// PostFilter helps a pod for which no node was found. It waits for devices that others were evicted for, see
// awaitLeaving. What is refused because it failed for the pod is let go of, see tryAgain. If a claim's own allocation keeps the pod away from nodes, and nobody else uses the claim, it gives up
// that allocation, and preemption is not tried: the pod may fit now. Otherwise it explains what devices were missing and
// whose release would help, and leaves the pod to the plugins after it.
func (pl *Plugin) PostFilter(ctx context.Context, state fwk.CycleState, pod *v1.Pod, _ fwk.NodeToStatusReader) (*fwk.PostFilterResult, *fwk.Status) {
	c, err := readCycle(state)
	if err != nil {
		return nil, fwk.AsStatus(err)
	}
	if c == nil {
		pl.shared.waiting.NotRefused(pod.UID, pl.clock.Now())
		return nil, fwk.NewStatus(fwk.Unschedulable)
	}
	pl.waitFor(pod, c)
	if result, status := pl.awaitLeaving(ctx, c, pod); status != nil {
		return result, status
	}
	if status := pl.tryAgain(ctx, c, pod); status != nil {
		return nil, status
	}
	switch removed, err := pl.giveUpExtendedClaims(ctx, pod, c.extended); {
	case err != nil:
		return nil, statusOfGivingUp(fmt.Errorf("remove what an earlier attempt made for the pod's extended resources: %w", err))
	case len(removed) > 0:
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
			fmt.Sprintf("removed claim %s, which an earlier attempt made for the pod's extended resources", strings.Join(removed, ", ")))
	}
	var explanation []string
	if found := pl.explain(ctx, c); found != nil {
		explanation = append(explanation, found.String())
	}
	if obstacle := pl.obstacle(ctx, c, pod); obstacle != nil {
		switch err := pl.deallocate(ctx, pod, obstacle.claim); {
		case err == nil:
			return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
				append([]string{fmt.Sprintf("gave up the allocation of claim %s, %s", klog.KObj(obstacle.claim), obstacle.reason)}, explanation...)...)
		case apierrors.IsConflict(err), apierrors.IsNotFound(err):
			// The claim has changed. That is an event for the pod.
			return nil, fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf("claim %s has changed", klog.KObj(obstacle.claim)))
		default:
			return nil, statusOfGivingUp(fmt.Errorf("give up the allocation of claim %s: %w", klog.KObj(obstacle.claim), err))
		}
	}
	return nil, fwk.NewStatus(fwk.Unschedulable, explanation...)
}

// waitFor tells the waiting room on which nodes devices were missing. If an allocation of the pod's own may be given up, these are all.
func (pl *Plugin) waitFor(pod *v1.Pod, c *cycle) {
	var nodes []string
	undecided := pl.evictsWhoIsGone(c, pod)
	for node, failure := range c.results.failures() {
		nodes = append(nodes, node)
		undecided = undecided || failure.Reason == allocator.ReasonUndecided
	}
	missing := slices.Values(nodes)
	for i := range c.claims {
		if pl.mayDeallocate(c, i, pod) {
			missing = pl.allNodes()
			break
		}
	}
	pl.shared.waiting.Refused(pod.UID, missing, undecided, pl.clock.Now())
}

// mayDeallocate tells whether claim i is allocated in a way that rules out nodes, and is used by nobody but
// the pod, or its group of which no other pod has a node.
func (pl *Plugin) mayDeallocate(c *cycle, i int, pod *v1.Pod) bool {
	pc := c.claims[i]
	if pc.claim.Status.Allocation == nil {
		return false
	}
	// PreFilter has left out nodes that the allocation does not name, so Filter did not see them.
	pinned := pc.nodes != nil && nodesByName(pc.claim.Status.Allocation.NodeSelector) != nil
	if !pinned && !c.results.isUnusable(i) {
		return false
	}
	return usedOnlyBy(pc.claim, pod.UID) || usedOnlyBy(pc.claim, pod.UID, pc.user.UID) && !pl.hasScheduledMembers(pod)
}

// usedOnlyBy tells whether the claim is reserved for nobody else.
func usedOnlyBy(claim *resourceapi.ResourceClaim, users ...types.UID) bool {
	return !slices.ContainsFunc(claim.Status.ReservedFor, func(ref resourceapi.ResourceClaimConsumerReference) bool {
		return !slices.Contains(users, ref.UID)
	})
}

// deallocate clears the claim's allocation, unless the pod turns out to be bound. The claim's resource version makes sure
// that it is still the claim that was looked at.
func (pl *Plugin) deallocate(ctx context.Context, pod *v1.Pod, claim *resourceapi.ResourceClaim) error {
	ctx, cancel := context.WithTimeout(ctx, deallocateTimeout)
	defer cancel()
	if err := pl.checkUnused(ctx, pod, claim); err != nil {
		return err
	}
	updated := claim.DeepCopy()
	updated.Status.Allocation = nil
	updated.Status.ReservedFor = nil
	updated.Status.Devices = nil
	written, err := pl.client.ResourceV1().ResourceClaims(claim.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{FieldManager: pl.shared.fieldManager})
	countWrite(writeDeallocation, err)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Allocation given up", "pod", klog.KObj(pod), "claim", klog.KObj(claim), "devices", deviceNames(claim.Status.Allocation))
	pl.assume(ctx, written)
	return nil
}
