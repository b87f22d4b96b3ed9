// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podclaims

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/kubernetes/pkg/scheduler/util"

	"stowage.dev/stowage/pkg/usage"
)

// UsesDevices tells whether a pod may hold devices, from what the pod says itself.
func UsesDevices(pod *v1.Pod) bool {
	return len(pod.Spec.ResourceClaims) > 0 || pod.Status.ExtendedResourceClaimStatus != nil || AsksForExtended(pod)
}

// NamedBy returns the names of the claims that a pod uses, as far as they have been made.
func NamedBy(pod *v1.Pod) []string {
	var names []string
	for i := range pod.Spec.ResourceClaims {
		if name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i]); err == nil && name != nil {
			names = append(names, *name)
		}
	}
	if extended := pod.Status.ExtendedResourceClaimStatus; extended != nil {
		names = append(names, extended.ResourceClaimName)
	}
	return names
}

// Uses tells whether the pod names the claim.
func Uses(pod *v1.Pod, claim usage.ClaimRef) bool {
	return pod.Namespace == claim.Namespace && slices.Contains(NamedBy(pod), claim.Name)
}

// AsksForExtended tells whether any container of the pod asks for an extended resource that a DeviceClass may stand for.
func AsksForExtended(pod *v1.Pod) bool {
	for _, containers := range [][]v1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range containers {
			for name, quantity := range containers[i].Resources.Requests {
				if !quantity.IsZero() && util.IsDRAExtendedResourceName(name) {
					return true
				}
			}
		}
	}
	return false
}

// PodName is the name that stands for the pod where its UID does not matter.
func PodName(pod *v1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
}

// NodesByName returns the nodes that a selector lists by name, nil if it selects in another way. That is how
// allocations of node-local devices look.
func NodesByName(selector *v1.NodeSelector) sets.Set[string] {
	names := sets.New[string]()
	for _, term := range selector.NodeSelectorTerms {
		if len(term.MatchExpressions) != 0 || len(term.MatchFields) != 1 {
			return nil
		}
		field := term.MatchFields[0]
		if field.Key != metav1.ObjectNameField || field.Operator != v1.NodeSelectorOpIn {
			return nil
		}
		names.Insert(field.Values...)
	}
	return names
}

// GroupOf returns the name of the pod's group, empty if it has none.
func GroupOf(pod *v1.Pod) string {
	if group := pod.Spec.SchedulingGroup; group != nil && group.PodGroupName != nil {
		return *group.PodGroupName
	}
	return ""
}

// GroupKey is the name of the pod's group with its namespace.
func GroupKey(pod *v1.Pod) types.NamespacedName {
	return types.NamespacedName{Namespace: pod.Namespace, Name: GroupOf(pod)}
}

// UserOf is how a pod stands among those that a claim is reserved for.
func UserOf(pod *v1.Pod) resourceapi.ResourceClaimConsumerReference {
	return resourceapi.ResourceClaimConsumerReference{APIGroup: v1.GroupName, Resource: "pods", Name: pod.Name, UID: pod.UID}
}
