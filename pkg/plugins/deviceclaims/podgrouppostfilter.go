package deviceclaims

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/refusals"
	"stowage.dev/stowage/pkg/wakeup"
)

// PodGroupPostFilter helps a group of pods for which no placement was found, as PostFilter helps a single pod. It waits for devices
// that others were evicted for; or gives up an allocation that keeps its own pod off nodes; or lets pods have what failed for them;
// or explains what the first pod that found no devices lacks, and leaves the group to the plugins after it. Should these try what
// would be without some pods, it is prepared for that.
func (pl *Plugin) PodGroupPostFilter(ctx context.Context, state fwk.PodGroupCycleState, group fwk.PodGroupInfo, schedule fwk.PodGroupSchedulingFunc) (*fwk.PodGroupPostFilterResult, *fwk.Status) {
	pl.shared.common.Trial.ForbidPreemption()
	found, err := cycle.ReadGroup(state)
	if err != nil {
		return nil, fwk.AsStatus(err)
	}
	pods := group.GetUnscheduledPods()
	pl.groupWaitsFor(pods, found)
	if result, status := pl.rivals.AwaitForGroup(ctx, pods, found.Claims(), schedule); status != nil {
		return result, status
	}
	var explanation []string
	for _, pod := range pods {
		c := found.Pods[pod.UID]
		if c == nil || c.Placed {
			continue
		}
		if status := pl.giveUpFor(ctx, c, pod); status != nil {
			return nil, status
		}
		if len(explanation) == 0 {
			if why := podevents.Join(pl.refusals.Explain(ctx, c, pod)); why != "" {
				explanation = append(explanation, fmt.Sprintf("pod %s: %s", klog.KObj(pod), why))
				pl.tell(ctx, pod, why)
			}
		}
	}
	if status := pl.giveUpKept(ctx, pods); status != nil {
		return nil, status
	}
	if status := pl.shared.tryGroupAgain(ctx, pods, found, schedule); status != nil {
		return nil, status
	}
	if err := pl.shared.common.Trial.AllowPreemption(pl.handle); err != nil {
		return nil, fwk.AsStatus(err)
	}
	return nil, fwk.NewStatus(fwk.Unschedulable, explanation...)
}

// tell tells the pod's user what its group waits for, once for each reason. What the status says does not come through if a plugin
// after this one has the last word, and the pod's own condition has only the reasons of its nodes.
func (pl *Plugin) tell(ctx context.Context, pod *v1.Pod, why string) {
	if pl.shared.waiting.IsNews(pod.UID, why) {
		pl.handle.EventRecorder().WithLogger(klog.FromContext(ctx)).Eventf(pod, nil, v1.EventTypeWarning, "FailedScheduling", "Scheduling",
			"the pod's group is waiting: %s", why)
	}
}

// groupWaitsFor tells the waiting room on which nodes devices were missing, pod by pod. Each is tried again by and by. The queue tries a group
// again and again, too, but not one that has others evicted: while DefaultPreemption does that, the queue puts it aside, and then lets it sleep
// until a victim is gone, whatever else makes room for it.
//
// The framework stops at the first pod without which the group cannot be: those after it have no cycle. If one of them was woken, nothing has
// come of it, as the group waits for the first one.
func (pl *Plugin) groupWaitsFor(pods []*v1.Pod, found *cycle.Group) {
	for _, pod := range pods {
		switch c := found.Pods[pod.UID]; {
		case c == nil, c.Placed:
			pl.shared.waiting.NotRefused(pod.UID, pl.binder.Clock.Now())
		case slices.ContainsFunc(c.Claims, func(pc podclaims.Claim) bool { return pc.Shared != nil }):
			// What it shares with pods before it may be on another node the next time.
			pl.shared.waiting.Refused(pod.UID, wakeup.Refusal{Nodes: pl.allNodes(), Again: true}, pl.binder.Clock.Now())
		default:
			pl.waitFor(pod, c, true)
		}
	}
}

func (pl *Plugin) allNodes() iter.Seq[string] {
	nodes, err := pl.handle.SnapshotSharedLister().NodeInfos().List()
	return func(yield func(string) bool) {
		if err != nil {
			return
		}
		for _, node := range nodes {
			if !yield(node.Node().Name) {
				return
			}
		}
	}
}

// giveUpFor gives up what keeps a pod of the group off nodes. It returns nil if there is nothing of that kind.
func (pl *Plugin) giveUpFor(ctx context.Context, c *cycle.State, pod *v1.Pod) *fwk.Status {
	if status := pl.giveUpExtended(ctx, pod, c.Extended.Made()); status != nil {
		return status
	}
	if obstacle := pl.refusals.Obstacle(ctx, c, pod); obstacle != nil {
		return pl.giveUpObstacle(ctx, pod, obstacle)
	}
	return nil
}

// giveUpExtended removes what an earlier attempt made for the extended resources of a pod of the group.
func (pl *Plugin) giveUpExtended(ctx context.Context, pod *v1.Pod, made []*resourceapi.ResourceClaim) *fwk.Status {
	switch removed, err := pl.extended.GiveUp(ctx, pod, made); {
	case err != nil:
		return statusOfGivingUp(fmt.Errorf("pod %s: remove what an earlier attempt made for its extended resources: %w", klog.KObj(pod), err))
	case len(removed) > 0:
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
			fmt.Sprintf("pod %s: removed claim %s, which an earlier attempt made for its extended resources", klog.KObj(pod), strings.Join(removed, ", ")))
	}
	return nil
}

// giveUpObstacle gives up what is in the way of a pod of the group.
func (pl *Plugin) giveUpObstacle(ctx context.Context, pod *v1.Pod, obstacle *refusals.Obstacle) *fwk.Status {
	switch err := pl.binder.GiveUp(ctx, pod, obstacle.Release()); {
	case err == nil && obstacle.Shared:
		return fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf("pod %s %s", klog.KObj(pod), obstacle.GivenUp()))
	case err == nil:
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, fmt.Sprintf("pod %s %s", klog.KObj(pod), obstacle.GivenUp()))
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf("claim %s has changed", klog.KObj(obstacle.Claim)))
	default:
		return statusOfGivingUp(fmt.Errorf("give up the allocation of claim %s: %w", klog.KObj(obstacle.Claim), err))
	}
}

// giveUpKept gives up what is reserved for the group, or by a scheduler before for pods of it that fit with it, or were not tried, as those after the first
// one without which the group cannot be are not. A pod that waits holds nothing, see obstacle. It returns nil if there is nothing of that kind.
func (pl *Plugin) giveUpKept(ctx context.Context, pods []*v1.Pod) (status *fwk.Status) {
	ctx, cancel := context.WithTimeout(ctx, binding.GiveUpTimeout) // for all, as nobody else is scheduled meanwhile: the next attempt goes on
	defer cancel()
	for _, pod := range pods {
		names, err := podclaims.NamesOf(pod)
		if err != nil {
			continue // a claim is not made yet, so nothing has been reserved for the pod
		}
		users, err := pl.groups.ClaimsOf(pod)
		if err != nil {
			return moreOf(status, fwk.AsStatus(fmt.Errorf("pod %s: %w", klog.KObj(pod), err)))
		}
		for _, name := range names {
			claim, err := podclaims.Get(pl.shared.tracker, pod, name)
			if err != nil {
				continue
			}
			if kept := pl.refusals.Kept([]podclaims.Claim{{Claim: claim, User: cmp.Or(users[name.Name], podclaims.UserOf(pod))}}, pod); kept != nil {
				status = moreOf(status, pl.giveUpObstacle(ctx, pod, kept))
			}
		}
		status = moreOf(status, pl.giveUpExtended(ctx, pod, pl.extended.MadeFor(pod)))
		if status.Code() == fwk.Error {
			break
		}
	}
	return status
}

// moreOf returns the status that says more about what becomes of the group: an error, that it is tried again, that it is left to others, nothing.
func moreOf(a, b *fwk.Status) *fwk.Status {
	order := []fwk.Code{fwk.Success, fwk.Unschedulable, fwk.UnschedulableAndUnresolvable, fwk.Error}
	if slices.Index(order, b.Code()) > slices.Index(order, a.Code()) {
		return b
	}
	return a
}
