// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"slices"
	"time"

	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/failures"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
)

// HandleFailures returns a scheduler's failure handler that has its say in what is told of pods: kube-scheduler would tell each of them of
// preemption that found nobody, and warn of those that are postponed with the same reason as of all others. A pod that waits for claims to
// leave is tried whenever one of them changes; it gets one event for all that, its first.
func (s *Shared) HandleFailures(next scheduler.FailureHandlerFn) scheduler.FailureHandlerFn {
	return func(ctx context.Context, profile framework.Framework, pod *framework.QueuedPodInfo, status *fwk.Status,
		nominating *fwk.NominatingInfo, start time.Time,
	) {
		status = failures.WithoutVainPreemption(status)
		postponed := failures.PostponedIn(status)
		if postponed == nil || postponed.Reason != podevents.ReasonDeallocation {
			s.common.Nominations.EndWait(pod.Pod.UID)
		}
		if postponed != nil {
			toldBefore := postponed.Reason == podevents.ReasonDeallocation && !s.common.Nominations.BeginWait(pod.Pod)
			profile = failures.Retelling(profile, postponed, toldBefore)
		}
		next(ctx, profile, pod, status, nominating, start)
	}
}

// EndNominations returns a scheduler's failure handler that looks, after the scheduler's own, whether the pod that failed has got or lost a
// nomination: of one that the API does not show yet no event tells.
func (s *Shared) EndNominations(next scheduler.FailureHandlerFn) scheduler.FailureHandlerFn {
	return func(ctx context.Context, profile framework.Framework, pod *framework.QueuedPodInfo, status *fwk.Status,
		nominating *fwk.NominatingInfo, start time.Time,
	) {
		uid := pod.Pod.UID
		next(ctx, profile, pod, status, nominating, start)
		if nominating != nil && nominating.Mode() == fwk.ModeOverride {
			node := nominating.NominatedNodeName // "" takes it back
			s.waiting.Nominated(uid, node)
			if node != "" {
				s.common.Nominations.Overtake(pod.Pod, node, profile.NominatedPodsForNode(node))
			}
		}
		s.common.Nominations.End(uid, func(node string) bool {
			return !slices.ContainsFunc(profile.NominatedPodsForNode(node), func(info fwk.PodInfo) bool { return info.GetPod().UID == uid })
		})
	}
}
