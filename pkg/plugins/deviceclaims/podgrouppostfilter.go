// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"fmt"
	"iter"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
	"stowage.dev/stowage/pkg/wakeup"
)

// PodGroupPostFilter helps a group of pods for which no placement was found, as PostFilter helps a single pod. It waits for devices
// that others were evicted for; or gives up an allocation that keeps its own pod off nodes; or lets pods have what failed for them;
// or explains what the first pod that found no devices lacks, and leaves the group to the plugins after it. Should these try what
// would be without some pods, it is prepared for that.
func (pl *Plugin) PodGroupPostFilter(ctx context.Context, state fwk.PodGroupCycleState, group fwk.PodGroupInfo,
	schedule fwk.PodGroupSchedulingFunc,
) (*fwk.PodGroupPostFilterResult, *fwk.Status) {
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
		if status := pl.holdings.GiveUpFor(ctx, c, pod); status != nil {
			return nil, status
		}
		if len(explanation) == 0 {
			if why := podevents.Join(pl.refusals.Explain(ctx, c, pod)); why != "" {
				explanation = append(explanation, fmt.Sprintf("pod %s: %s", klog.KObj(pod), why))
				pl.tell(ctx, pod, why)
			}
		}
	}
	if status := pl.holdings.GiveUpKept(ctx, pods); status != nil {
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

// groupWaitsFor tells the waiting room on which nodes devices were missing, pod by pod. Each is tried again by and by. The queue tries a
// group again and again, too, but not one that has others evicted: while DefaultPreemption does that, the queue puts it aside, and then
// lets it sleep until a victim is gone, whatever else makes room for it.
//
// The framework stops at the first pod without which the group cannot be: those after it have no cycle. If one of them was woken, nothing
// has come of it, as the group waits for the first one.
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
