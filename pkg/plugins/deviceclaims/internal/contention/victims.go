// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contention

import (
	"context"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/decisions"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/tracker"
)

// VictimHandler wakes a nominated pod whenever one of those is gone that were evicted for it. The scheduling queue may
// let it sleep: it drops the events that come while DefaultPreemption still evicts, and what goes last need not be
// what the plugins wait for that refused the pod. If one victim had the volume and goes first, and the other one had the
// device, nobody else would wake the pod. As long as victims are being evicted the queue keeps the pod back.
func VictimHandler(ctx context.Context, handle fwk.Handle, claims *tracker.Tracker) cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{DeleteFunc: func(obj any) {
		victim, ok := obj.(*v1.Pod)
		if !ok || !wasPreempted(victim) {
			return
		}
		woken := map[string]*v1.Pod{}
		for _, info := range handle.NominatedPodsForNode(victim.Spec.NodeName) {
			if pod := info.GetPod(); podclaims.UsesDevices(pod) {
				woken[pod.Namespace+"/"+pod.Name] = pod
			}
		}
		if len(woken) > 0 {
			for _, name := range podclaims.NamedBy(victim) {
				if claim, err := claims.Get(victim.Namespace, name); err == nil {
					decisions.Log(ctx, decisions.Evicted, victim, victim.Spec.NodeName, claim, claim.Status.Allocation,
						"it was evicted for "+strings.Join(slices.Sorted(maps.Keys(woken)), ", "))
				}
			}
			handle.Activate(klog.FromContext(ctx), woken)
		}
	}}
}

// wasPreempted tells whether a scheduler evicted the pod from its node.
func wasPreempted(pod *v1.Pod) bool {
	return pod.Spec.NodeName != "" && slices.ContainsFunc(pod.Status.Conditions, func(c v1.PodCondition) bool {
		return c.Type == v1.DisruptionTarget && c.Status == v1.ConditionTrue && c.Reason == v1.PodReasonPreemptionByScheduler
	})
}

// EvictsWhoIsGone tells whether pods that are gone may be evicted for the pod once more. The scheduler can hear of devices that are free
// before it hears of the end of the pods that had them. These then are in the way of something else on the node that the pod is
// nominated to, of a volume for example, and to evict one that is gone brings about no event. The one of its end may have come
// while the queue kept the pod back for the eviction, so nobody would wake it.
//
// accepted are the nodes that have devices for the pod.
func (r *Rivals) EvictsWhoIsGone(accepted []string, pod *v1.Pod) bool {
	isGone := func(other fwk.PodInfo) bool { return r.hasLostItsClaims(other.GetPod()) }
	return slices.ContainsFunc(accepted, func(name string) bool {
		info, err := r.Handle.SnapshotSharedLister().NodeInfos().Get(name)
		return err == nil && r.isNominated(pod, name) && slices.ContainsFunc(info.GetPods(), isGone)
	})
}

// hasLostItsClaims tells whether the pod had claims, and none is reserved for it or its group any more: kube-controller-manager gives up
// the reservations of a pod that has ended.
func (r *Rivals) hasLostItsClaims(pod *v1.Pod) bool {
	names := podclaims.NamedBy(pod)
	return len(names) > 0 && len(r.Claims.InFlightFor(pod.UID)) == 0 && !slices.ContainsFunc(names, func(name string) bool {
		claim, err := r.Claims.Get(pod.Namespace, name)
		return err == nil &&
			resourceclaim.IsReservedForPod(pod, claim, utilfeature.DefaultFeatureGate.Enabled(features.DRAWorkloadResourceClaims))
	})
}
