// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podclaims

import (
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/scheduler/framework/preemption"

	"stowage.dev/stowage/pkg/usage"
)

// Groups knows the groups that pods belong to.
type Groups struct{ handle groupsHandle }

type groupsHandle interface {
	SnapshotSharedLister() fwk.SharedLister
	PodGroupManager() fwk.PodGroupManager
}

// NewGroups returns the groups that a scheduler's handle knows.
func NewGroups(handle groupsHandle) *Groups { return &Groups{handle} }

// PriorityOf returns the priority that counts when pods are evicted: that of the pod's group, if it has one.
func (g *Groups) PriorityOf(pod *v1.Pod) int32 {
	if GroupOf(pod) == "" || !utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload) {
		return corev1helpers.PodPriority(pod)
	}
	return preemption.GetPodPriority(pod, g.handle.SnapshotSharedLister().PodGroups(), nil)
}

// ClaimsOf returns the pod's claims, by name, that are reserved not for the pod but for its group, because the group names the
// same claim (KEP-5729). They stay reserved until kube-controller-manager finds the group gone.
func (g *Groups) ClaimsOf(pod *v1.Pod) (map[string]resourceapi.ResourceClaimConsumerReference, error) {
	name := GroupOf(pod)
	if name == "" || len(pod.Spec.ResourceClaims) == 0 || !utilfeature.DefaultFeatureGate.Enabled(features.DRAWorkloadResourceClaims) {
		return nil, nil
	}
	group, err := g.handle.SnapshotSharedLister().PodGroups().Get(pod.Namespace, name)
	if err != nil {
		return nil, fmt.Errorf("pod group %s/%s: %w", pod.Namespace, name, err)
	}
	users := map[string]resourceapi.ResourceClaimConsumerReference{}
	for i := range pod.Spec.ResourceClaims {
		ref := &pod.Spec.ResourceClaims[i]
		user, err := resourceclaim.BindTo(pod, group, ref)
		if err != nil {
			return nil, fmt.Errorf("spec.resourceClaims[%d]: %w", i, err)
		}
		if claim, _, err := resourceclaim.Name(pod, ref); err == nil && claim != nil && user.UID == group.UID {
			users[*claim] = user
		}
	}
	return users, nil
}

// ScheduledUsers returns the pods of the pod's group that use the claim and have a node, or are being bound to one.
func (g *Groups) ScheduledUsers(pod *v1.Pod, claim *resourceapi.ResourceClaim) ([]*v1.Pod, error) {
	state, err := g.handle.PodGroupManager().PodGroupStates().Get(pod.Namespace, GroupOf(pod))
	if err != nil {
		return nil, fmt.Errorf("pod group %s/%s: %w", pod.Namespace, GroupOf(pod), err)
	}
	return slices.DeleteFunc(state.ScheduledPods(), func(member *v1.Pod) bool { return !Uses(member, usage.RefOf(claim)) }), nil
}

// DisruptedWith returns the pods that go with a pod that is evicted: itself, or all of a group that is only disrupted as a whole.
func (g *Groups) DisruptedWith(pod *v1.Pod) []*v1.Pod {
	alone := []*v1.Pod{pod}
	name := GroupOf(pod)
	if name == "" || !utilfeature.DefaultFeatureGate.Enabled(features.GenericWorkload) {
		return alone
	}
	snapshot := g.handle.SnapshotSharedLister()
	group, err := snapshot.PodGroups().Get(pod.Namespace, name)
	if err != nil || group.Spec.DisruptionMode == nil || group.Spec.DisruptionMode.All == nil {
		return alone
	}
	state, err := snapshot.PodGroupStates().Get(pod.Namespace, name)
	if err != nil {
		return alone
	}
	return append(alone, state.ScheduledPods()...)
}

// UsedByGroup tells whether the claim is reserved for the pod's group, and another pod of the group uses it and has a node.
func (g *Groups) UsedByGroup(pc Claim, pod *v1.Pod) bool {
	if pc.User.UID == pod.UID || !IsReservedFor(pc.Claim, pc.User.UID) {
		return false
	}
	users, err := g.ScheduledUsers(pod, pc.Claim)
	return err != nil || len(users) > 0
}

// UsedByOthers tells whether somebody uses the claim besides the pod, and its group of which no other pod that uses it has a node.
func (g *Groups) UsedByOthers(pc Claim, pod *v1.Pod) bool {
	switch {
	case UsedOnlyBy(pc.Claim, pod.UID):
		return false
	case !UsedOnlyBy(pc.Claim, pod.UID, pc.User.UID):
		return true
	}
	users, err := g.ScheduledUsers(pod, pc.Claim)
	return err != nil || len(users) > 0
}
