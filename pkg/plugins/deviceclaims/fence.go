package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/fence"
	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/tracker"
)

// newFence returns the fence of a profile, nil if it is not wanted.
func newFence(t *tracker.Tracker, args *config.FenceArgs) *fence.Fence {
	if !*args.Enabled {
		return nil
	}
	return fence.New(t, fence.Options{Timeout: args.Timeout.Duration, Jitter: args.Jitter.Duration})
}

// passFence lets the pod go on if no other scheduler has allocated the pod's devices before. Every claim passes, also
// those that somebody else allocated, or this scheduler before it was started again.
//
// A pod that may not go on gives back what it has, and makes a pause of its own: both schedulers may have given way.
// That happens in the goroutine that binds the pod, and after the devices are free, so that it holds up nobody.
func (pl *Plugin) passFence(ctx context.Context, state fwk.CycleState, pod *v1.Pod, nodeName string, c *cycle) error {
	if pl.fence == nil {
		return nil
	}
	err := pl.fence.Pass(ctx, c.boundClaims(), c.binding.decidedOn)
	if err == nil {
		return pl.checkStillReserved(c)
	}
	if errors.Is(err, fence.ErrTimeout) {
		pl.handle.EventRecorder().WithLogger(klog.FromContext(ctx)).Eventf(pod, nil, v1.EventTypeWarning, "FenceTimeout", "Scheduling",
			"not bound to node %s, because it cannot be told whether other schedulers use its devices: %v", nodeName, err)
	}
	pl.withdraw(ctx, pod, c, fence.Yields(err))
	pl.Unreserve(ctx, state, pod, nodeName)
	pl.fence.Pause(ctx)
	return fmt.Errorf("devices taken back, the pod will be tried again: %w", err)
}

// boundClaims are the pod's claims as they were written last or, if there was nothing to write, as they were found.
func (c *cycle) boundClaims() []*resourceapi.ResourceClaim {
	bound := c.bindingClaims()
	claims := make([]*resourceapi.ResourceClaim, len(bound))
	for i, pc := range bound {
		claims[i] = pc.claim
		for _, w := range c.binding.writes {
			if w.planned.UID == pc.claim.UID {
				claims[i] = w.written
			}
		}
	}
	return claims
}

// userOf returns whom a claim of the pod is reserved for.
func (c *cycle) userOf(claim types.UID) types.UID {
	for _, pc := range c.bindingClaims() {
		if pc.claim.UID == claim {
			return pc.user.UID
		}
	}
	return ""
}

// checkStillReserved fails if a claim has changed while the pod waited at the fence.
func (pl *Plugin) checkStillReserved(c *cycle) error {
	for _, bound := range c.boundClaims() {
		claim, err := pl.shared.tracker.Get(bound.Namespace, bound.Name)
		if err != nil {
			return err
		}
		if claim.UID != bound.UID || claim.Status.Allocation == nil || !sameAllocation(claim.Status.Allocation, bound.Status.Allocation) || !isReservedFor(claim, c.userOf(claim.UID)) {
			return fmt.Errorf("claim %s: the reservation was lost while the pod was bound", klog.KObj(bound))
		}
	}
	return nil
}

// withdraw takes the pod's reservation from claims that must give way, and also their allocation where nobody else has
// reserved them, whoever wrote it: as long as it stands it keeps others from the devices.
//
// The pod is looked up first. Somebody may have bound it, such as a leader before us that is about to end; then its
// claims are in use.
//
// What is reserved for the pod's group is taken from it when no pod of the group is left that may use it.
func (pl *Plugin) withdraw(ctx context.Context, pod *v1.Pod, c *cycle, yields []*fence.YieldError) {
	if len(yields) == 0 {
		return
	}
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(pl.shared.ctx, cancel)()
	if state, err := pl.readPod(ctx, pod); err != nil || state == podGone || state == podBound {
		logger.Info("Keeping claims that must give way, because the pod is bound or not to be found", "pod", klog.KObj(pod), "err", err)
		return
	}
	groupLeaves := sync.OnceValue(func() bool { return pl.groupLeaves(pod) })
	for _, yield := range yields {
		user := c.userOf(yield.Claim.UID)
		if user != pod.UID && !groupLeaves() {
			continue
		}
		never := func() bool { return false }
		err := pl.persist(ctx, never, func(ctx context.Context) error { return pl.writeWithdrawal(ctx, user, yield) })
		if err != nil {
			logger.Error(err, "Cannot give up the allocation of a claim that must give way", "pod", klog.KObj(pod), "claim", klog.KRef(yield.Claim.Namespace, yield.Claim.Name))
		}
	}
}

func (pl *Plugin) writeWithdrawal(ctx context.Context, user types.UID, yield *fence.YieldError) error {
	client := pl.client.ResourceV1().ResourceClaims(yield.Claim.Namespace)
	claim, err := client.Get(ctx, yield.Claim.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	pl.assume(ctx, claim) // it may have been written with the answer lost
	if claim.UID != yield.Claim.UID || claim.Status.Allocation == nil || !sameAllocation(claim.Status.Allocation, yield.Allocation) || !isReservedFor(claim, user) ||
		isAdopted(claim, user, pl.shared.fieldManager) { // whoever uses it has a fence of its own
		return nil
	}
	claim = claim.DeepCopy()
	claim.Status.ReservedFor = slices.DeleteFunc(claim.Status.ReservedFor, func(ref resourceapi.ResourceClaimConsumerReference) bool {
		return ref.UID == user
	})
	if len(claim.Status.ReservedFor) == 0 {
		claim.Status.Allocation = nil
		claim.Status.Devices = nil
	}
	written, err := client.UpdateStatus(ctx, claim, metav1.UpdateOptions{})
	countWrite(writeWithdrawal, err)
	if err != nil {
		return err
	}
	klog.FromContext(ctx).V(2).Info("Claim gives way", "user", user, "claim", klog.KObj(claim), "deallocated", written.Status.Allocation == nil, "reason", yield.Verdict.String())
	pl.assume(ctx, written)
	return nil
}

// groupLeaves tells whether the pod is the last one of its group to give way: all others that have a node, or are being bound to
// one, have given way before and not tried again since.
func (pl *Plugin) groupLeaves(pod *v1.Pod) bool {
	left := pl.shared.attempts.giveWay(pod)
	state, err := pl.handle.PodGroupManager().PodGroupStates().Get(pod.Namespace, groupOf(pod))
	if err != nil {
		return false
	}
	return !slices.ContainsFunc(state.ScheduledPods(), func(member *v1.Pod) bool { return !left.Has(member.UID) })
}
