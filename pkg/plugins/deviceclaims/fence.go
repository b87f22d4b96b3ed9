package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/fence"
	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
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
func (pl *Plugin) passFence(ctx context.Context, state fwk.CycleState, pod *v1.Pod, nodeName string, c *cycle.State) error {
	if pl.fence == nil {
		return nil
	}
	err := pl.fence.Pass(ctx, c.BoundClaims(), func(claim *resourceapi.ResourceClaim) usage.View {
		if pl.isInUse(claim) {
			// It has passed a fence with the pod that uses it, so whatever was earlier has been taken into account, also what is not known here.
			return pl.shared.tracker.Snapshot().Usage
		}
		return c.Binding.DecidedOn(claim)
	})
	if err == nil {
		return pl.checkStillReserved(c)
	}
	yields := fence.Yields(err)
	if errors.Is(err, fence.ErrTimeout) {
		err = fmt.Errorf("not bound to node %s, because it cannot be told whether other schedulers use its devices: %w", nodeName, err)
	}
	c.Binding.Why = err.Error()
	pl.withdraw(ctx, pod, c, yields)
	pl.Unreserve(ctx, state, pod, nodeName)
	pl.fence.Pause(ctx)
	return tellYields(pl.rivals.NameAll, pod, yields, fmt.Errorf("devices taken back, the pod will be tried again: %w", err))
}

// isInUse tells whether a pod that has a node uses the claim.
func (pl *Plugin) isInUse(claim *resourceapi.ResourceClaim) bool {
	pods := pl.handle.SharedInformerFactory().Core().V1().Pods().Lister().Pods(claim.Namespace)
	return slices.ContainsFunc(claim.Status.ReservedFor, func(ref resourceapi.ResourceClaimConsumerReference) bool {
		if ref.Resource == "pods" {
			pod, err := pods.Get(ref.Name)
			return err == nil && pod.UID == ref.UID && pod.Spec.NodeName != ""
		}
		all, err := pods.List(labels.Everything())
		return err == nil && slices.ContainsFunc(all, func(pod *v1.Pod) bool {
			return pod.Spec.NodeName != "" && podclaims.GroupOf(pod) == ref.Name && podclaims.Uses(pod, usage.RefOf(claim))
		})
	})
}

// toldError is an error in words that the pod's user may read.
type toldError struct {
	text string
	err  error
}

func (e *toldError) Error() string { return e.text }
func (e *toldError) Unwrap() error { return e.err }

// tellYields takes the names of other namespaces' claims from the error.
func tellYields(nameAll bool, pod *v1.Pod, yields []*fence.YieldError, err error) error {
	if nameAll {
		return err
	}
	text := err.Error()
	for _, yield := range yields {
		text = withoutForeign(text, pod.Namespace, yield.Verdict.Other)
	}
	return &toldError{text, err}
}

// tellHeld takes the name of another namespace's claim from the error of a decision that gives away what that has. It is a mistake of ours, so the
// log has it.
func tellHeld(ctx context.Context, nameAll bool, pod *v1.Pod, err error) error {
	var held *tracker.HeldError
	if !errors.As(err, &held) {
		return err
	}
	klog.FromContext(ctx).Error(err, "A device that a claim holds was chosen for another one", "pod", klog.KObj(pod))
	if nameAll {
		return err
	}
	return &toldError{withoutForeign(err.Error(), pod.Namespace, held.Holder), err}
}

// withoutForeign takes the claim out of the text of an error if it is of another namespace.
func withoutForeign(text, namespace string, claim usage.ClaimRef) string {
	if claim.Namespace == namespace {
		return text
	}
	return strings.ReplaceAll(text, fmt.Sprintf("claim %s (UID %s)", claim, claim.UID), "a claim of another namespace")
}

// checkStillReserved fails if a claim has changed while the pod waited at the fence.
func (pl *Plugin) checkStillReserved(c *cycle.State) error {
	for _, bound := range c.BoundClaims() {
		claim, err := pl.shared.tracker.Get(bound.Namespace, bound.Name)
		if apierrors.IsNotFound(err) {
			return podevents.Postpone(podevents.ReasonClaimChanged, bound, fmt.Errorf("claim %s: was deleted while the pod was bound", klog.KObj(bound)))
		}
		if err != nil {
			return err
		}
		if claim.UID != bound.UID || claim.Status.Allocation == nil || !podclaims.SameAllocation(claim.Status.Allocation, bound.Status.Allocation) || !podclaims.IsReservedFor(claim, c.UserOf(claim.UID)) {
			return podevents.Postpone(podevents.ReasonClaimChanged, bound, fmt.Errorf("claim %s: the reservation was lost while the pod was bound", klog.KObj(bound)))
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
// What is reserved for the pod's group is taken from it when no pod of the group is left that may use it. That is asked before each
// attempt to write, after the claim has been read: a pod that comes to use it meanwhile moves its version.
func (pl *Plugin) withdraw(ctx context.Context, pod *v1.Pod, c *cycle.State, yields []*fence.YieldError) {
	if len(yields) == 0 {
		return
	}
	logger := klog.FromContext(ctx)
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(pl.shared.ctx, cancel)()
	if state, err := pl.binder.ReadPod(ctx, pod); err != nil || state == binding.PodGone || state == binding.PodBound {
		logger.V(2).Info("Keeping claims that must give way, because the pod is bound or not to be found", "pod", klog.KObj(pod), "err", err)
		return
	}
	pl.shared.memory.Attempts.GiveWay(pod)
	for _, yield := range yields {
		never := func() bool { return false }
		err := pl.binder.Persist(ctx, never, func(ctx context.Context) error { return pl.writeWithdrawal(ctx, pod, yield, c) })
		if err != nil {
			logger.Error(err, "Cannot give up the allocation of a claim that must give way", "pod", klog.KObj(pod), "claim", klog.KRef(yield.Claim.Namespace, yield.Claim.Name))
		}
	}
}

func (pl *Plugin) writeWithdrawal(ctx context.Context, pod *v1.Pod, yield *fence.YieldError, c *cycle.State) error {
	user := c.UserOf(yield.Claim.UID)
	client := pl.binder.Client.ResourceV1().ResourceClaims(yield.Claim.Namespace)
	claim, err := client.Get(ctx, yield.Claim.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	pl.binder.Assume(ctx, claim) // it may have been written with the answer lost
	if claim.UID != yield.Claim.UID || claim.Status.Allocation == nil || !podclaims.SameAllocation(claim.Status.Allocation, yield.Allocation) || !podclaims.IsReservedFor(claim, user) ||
		!binding.IsUsedLastBy(claim, user, pl.shared.books.FieldManager) { // whoever uses it has a fence of its own
		return nil
	}
	if user != pod.UID {
		if leaves, err := pl.groupLeaves(ctx, pod, claim); err != nil || !leaves {
			return err
		}
	}
	claim = claim.DeepCopy()
	podclaims.RemoveUser(claim, user)
	if len(claim.Status.ReservedFor) == 0 {
		claim.Status.Allocation = nil
		claim.Status.Devices = nil
	}
	written, err := client.UpdateStatus(ctx, claim, metav1.UpdateOptions{})
	binding.CountWrite(binding.WriteWithdrawal, err)
	if err != nil {
		pl.shared.books.Doubts.Note(claim, err)
		return err
	}
	for _, w := range c.Binding.Writes {
		w.Withdrawn = w.Withdrawn || w.Planned.UID == claim.UID
	}
	pl.binder.Assume(ctx, written)
	return nil
}

// groupLeaves tells whether no pod of the pod's group is left that may use a claim of the group: those that have a node use none, and those
// that are being bound to one have given way and not tried again since. The API is asked, too: another scheduler may have bound one.
func (pl *Plugin) groupLeaves(ctx context.Context, pod *v1.Pod, claim *resourceapi.ResourceClaim) (bool, error) {
	left := pl.shared.memory.Attempts.HaveGivenWay(pod)
	users, err := pl.groups.ScheduledUsers(pod, claim)
	if err != nil || slices.ContainsFunc(users, func(member *v1.Pod) bool { return !left.Has(member.UID) }) {
		return false, nil //nolint:nilerr // a group that is not known may have any pods
	}
	err = pl.binder.CheckGroupUnbound(ctx, pod, claim)
	if _, bound := errors.AsType[*binding.BoundError](err); bound {
		return false, nil
	}
	return err == nil, err
}
