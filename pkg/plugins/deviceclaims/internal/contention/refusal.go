// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contention

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// Judge says with which code a node is refused whose devices do not satisfy the pod.
//
// Unschedulable makes preemption try the node with ever different pods taken away, thousands of nodes if need be. So
// only nodes get it that would do without all pods of lower priority, which is decided once; it costs what the node cost
// already, and nothing where no such pod holds devices.
//
// The node that the pod is nominated to gets it, too, if it would do as soon as the claims have left that are about to:
// Unresolvable would make the pod preempt again. These claims are returned.
//
// A pod of a group never gets it: it is the group that preempts, and it does not ask.
func (r *Rivals) Judge(ctx context.Context, s *Situation, pod *v1.Pod, refused Refused) Refusal {
	if s.WhatIf.IsDryRun() || s.Trial != nil || !refused.Failure.Resolvable() {
		return Refusal{Code: fwk.UnschedulableAndUnresolvable}
	}
	node := refused.Node.Node()
	undecided := false
	if r.isNominated(pod, node.Name) {
		leaving := s.Holders.leavingOn(PoolsOf(node, s.Inventory), s.Usage, pod)
		fits, inTime := s.fitsWithout(ctx, refused, leaving)
		if fits {
			return Refusal{Code: fwk.Unschedulable, Leaving: leaving}
		}
		undecided = !inTime
	}
	if MayPreempt(pod) {
		fits, inTime := s.fitsWithout(ctx, refused, s.Holders.releasedWith(r.victimsOn(refused.Node, pod)))
		if fits {
			return Refusal{Code: fwk.Unschedulable, Undecided: undecided}
		}
		undecided = undecided || !inTime
	}
	return Refusal{Code: fwk.UnschedulableAndUnresolvable, Undecided: undecided}
}

// Refused is a node whose devices do not satisfy a pod.
type Refused struct {
	Node     fwk.NodeInfo
	Requests *allocator.Requests
	Failure  *allocator.Failure
	// Time is that of the pod's searches.
	Time allocator.Attempt
}

// Refusal is how such a node is refused.
type Refusal struct {
	Code fwk.Code
	// Leaving are the claims whose end the pod has to wait for, on the node that it is nominated to.
	Leaving []*Holder
	// Undecided tells that there was no time to find out whether others can be evicted: the pod is tried again.
	Undecided bool
}

// MayPreempt tells whether others may be evicted for the pod.
func MayPreempt(pod *v1.Pod) bool {
	return pod.Spec.PreemptionPolicy == nil || *pod.Spec.PreemptionPolicy != v1.PreemptNever
}

// victimsOn returns the pods of a node that may hold devices and have a lower priority than the pod, and those that go with them.
func (r *Rivals) victimsOn(nodeInfo fwk.NodeInfo, pod *v1.Pod) map[types.UID]*v1.Pod {
	victims := map[types.UID]*v1.Pod{}
	priority := corev1helpers.PodPriority(pod)
	for _, info := range nodeInfo.GetPods() {
		other := info.GetPod()
		if !podclaims.UsesDevices(other) || corev1helpers.PodPriority(other) >= priority {
			continue
		}
		for _, victim := range r.Groups.DisruptedWith(other) {
			victims[victim.UID] = victim
		}
	}
	return victims
}

// fitsWithout tells whether the node would do if some claims ended, and whether there was time to find out.
func (s *Situation) fitsWithout(ctx context.Context, refused Refused, holders []*Holder) (fits, inTime bool) {
	if len(holders) == 0 {
		return false, true
	}
	input := s.Input(ctx, refused.Requests, refused.Node.Node())
	input.Usage, input.Attempt = without(input.Usage, holders), refused.Time
	NodesDecidedAgain.Inc()
	result := allocator.Check(ctx, input)
	return result.Fits(), result.Failure == nil || result.Failure.Reason != explain.ReasonUndecided
}
