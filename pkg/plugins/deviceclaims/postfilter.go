// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/holdings"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/searchtime"
	"stowage.dev/stowage/pkg/wakeup"
)

// PostFilter helps a pod for which no node was found. It waits for devices that others were evicted for, see
// contention.Rivals.Await. What is refused because it failed for the pod is let go of, see tryAgain. If a claim's own allocation keeps the
// pod away from nodes, and nobody else uses the claim, it gives up that allocation, and preemption is not tried: the pod may fit now. If
// others use the claim, too, it gives up no more than the pod's reservation. Otherwise it explains what devices were missing and whose
// release would help, and leaves the pod to the plugins after it.
func (pl *Plugin) PostFilter(ctx context.Context, state fwk.CycleState, pod *v1.Pod,
	_ fwk.NodeToStatusReader,
) (*fwk.PostFilterResult, *fwk.Status) {
	c, err := cycle.Read(state)
	if err != nil {
		return nil, fwk.AsStatus(err)
	}
	if c == nil {
		return nil, pl.refusedByPreFilter(ctx, pod)
	}
	until := pl.waitFor(pod, c, false)
	if node, leaving := c.Results.LeavingFor(); len(leaving) > 0 {
		return pl.rivals.Await(ctx, pod, node, leaving)
	}
	if status := pl.tryAgain(ctx, c, pod); status != nil {
		return nil, status
	}
	switch removed, err := pl.extended.GiveUp(ctx, pod, c.Extended.Made()); {
	case err != nil:
		return nil, pl.notGivenUp(pod, c, fmt.Errorf("remove what an earlier attempt made for the pod's extended resources: %w", err))
	case len(removed) > 0:
		tryAtOnce(ctx, pl.handle, pod)
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
			fmt.Sprintf("removed claim %s, which an earlier attempt made for the pod's extended resources", strings.Join(removed, ", ")))
	}
	where, missing := pl.refusals.Explain(ctx, c, pod)
	missing = podevents.Join(missing, searchtime.PutOff(pod, until, pl.binder.Clock.Now()))
	if obstacle := pl.refusals.Obstacle(ctx, c, pod); obstacle != nil {
		err := pl.binder.GiveUp(ctx, pod, obstacle)
		if err == nil {
			tryAtOnce(ctx, pl.handle, pod)
		}
		switch {
		case err == nil && obstacle.Shared: // it may take long until the others leave, too
			return nil, leftToOthers(podevents.Join(obstacle.String(), missing))
		case err == nil:
			return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, podevents.Join(obstacle.String(), missing))
		case apierrors.IsConflict(err), apierrors.IsNotFound(err):
			pl.waitFor(pod, c, true)
			return nil, fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf("claim %s has changed", klog.KObj(obstacle.Claim)))
		default:
			return nil, pl.notGivenUp(pod, c, fmt.Errorf("give up the allocation of claim %s: %w", klog.KObj(obstacle.Claim), err))
		}
	}
	return nil, leftToOthers(podevents.Join(where, missing))
}

// refusedByPreFilter ends an attempt in which no node was looked at.
func (pl *Plugin) refusedByPreFilter(ctx context.Context, pod *v1.Pod) *fwk.Status {
	pl.shared.waiting.NotRefused(pod.UID, pl.binder.Clock.Now())
	if pod.Spec.NodeName != "" {
		return leftToOthers("") // see PreFilter
	}
	given, err := pl.holdings.GiveUpIdle(ctx, pod)
	if err == nil {
		return leftToOthers(given)
	}
	pl.shared.waiting.Refused(pod.UID, wakeup.Refusal{Again: true}, pl.binder.Clock.Now()) // no event need follow
	if apierrors.IsConflict(err) {
		return leftToOthers(given)
	}
	return holdings.StatusOf(err)
}

// tryAtOnce has the scheduling queue try a pod again when its attempt has ended. One that has given something up may hold more, and nothing
// else need wake it: if others are faster, it fits nowhere.
func tryAtOnce(ctx context.Context, queue fwk.PodActivator, pod *v1.Pod) {
	queue.Activate(klog.FromContext(ctx), map[string]*v1.Pod{podclaims.PodName(pod).String(): pod})
}

// notGivenUp says why nothing could be given up for the pod. What had no answer is tried again by and by: no event need follow.
func (pl *Plugin) notGivenUp(pod *v1.Pod, c *cycle.State, err error) *fwk.Status {
	status := holdings.StatusOf(err)
	if status.Code() == fwk.Error {
		pl.waitFor(pod, c, true)
	}
	return status
}

// leftToOthers leaves the pod to the plugins after this one: to preemption, which takes back a nomination that holds no more, and to others
// that have work of their own. What preemption says of having found nobody is not told, see failures.WithoutVainPreemption.
func leftToOthers(why string) *fwk.Status {
	if why == "" {
		return fwk.NewStatus(fwk.Unschedulable)
	}
	return fwk.NewStatus(fwk.Unschedulable, why)
}

// waitFor tells the waiting room on which nodes devices were missing. If an allocation of the pod's own may be given up, or a class was
// missing, these are all. Returned is until when a pod without an answer is put off, zero if it is not. One that may be kept from its node
// by pods that are gone is not: nothing wakes it sooner. It is tried again by and by, and so is, with again, any pod.
func (pl *Plugin) waitFor(pod *v1.Pod, c *cycle.State, again bool) (until time.Time) {
	var nodes []string
	for node := range c.Results.Failures() {
		nodes = append(nodes, node)
	}
	unseen := c.Results.UnseenOn()
	nodes = append(nodes, unseen...)
	// That a claim leaves a device which a device plugin has is no news for anybody else.
	again = again || len(unseen) > 0 && c.Extended != nil
	undecided, besideGone := c.Results.IsUndecided(), pl.rivals.EvictsWhoIsGone(c.Results.Accepted(), pod)
	if undecided && !besideGone {
		until = pl.time.HasTimeAt(pod)
	}
	missing := slices.Values(nodes)
	if c.Results.Classless.Load() {
		missing = pl.allNodes()
	}
	for i := range c.Claims {
		if pl.refusals.MayGiveUp(c, i, pod) {
			missing = pl.allNodes()
			break
		}
	}
	pl.shared.waiting.Refused(pod.UID, wakeup.Refusal{
		Nodes: missing, Evictable: c.Results.Evictable(),
		Undecided: undecided, Again: besideGone || again, NotBefore: until,
	}, pl.binder.Clock.Now())
	return until
}
