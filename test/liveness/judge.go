package liveness

import (
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/kubernetes/pkg/scheduler/framework/preemption"
)

// judgeRest returns what no cluster at rest may have: devices that a claim has for nobody.
func (h *history) judgeRest() []string {
	claims, err := h.user.ResourceV1().ResourceClaims("").List(h.ctx, metav1.ListOptions{})
	if err != nil {
		return []string{err.Error()}
	}
	pods, err := h.user.CoreV1().Pods("").List(h.ctx, metav1.ListOptions{})
	if err != nil {
		return []string{err.Error()}
	}
	groups, err := h.user.SchedulingV1beta1().PodGroups("").List(h.ctx, metav1.ListOptions{})
	if err != nil {
		return []string{err.Error()}
	}
	alive := map[types.UID]v1.Pod{}
	for _, pod := range pods.Items {
		alive[pod.UID] = pod
	}
	var found []string
	for _, claim := range claims.Items {
		if claim.Status.Allocation == nil {
			continue
		}
		if len(claim.Status.ReservedFor) == 0 {
			found = append(found, fmt.Sprintf("claim %s holds devices for nobody", claim.Name))
		}
		for _, user := range claim.Status.ReservedFor {
			if slices.ContainsFunc(groups.Items, func(group schedulingapi.PodGroup) bool { return group.UID == user.UID }) {
				continue // a group keeps its claims to its end
			}
			if pod, ok := alive[user.UID]; !ok {
				found = append(found, fmt.Sprintf("claim %s is reserved for %s %s, which is gone", claim.Name, user.Resource, user.Name))
			} else if pod.Spec.NodeName == "" {
				found = append(found, fmt.Sprintf("claim %s holds devices for pod %s, which waits", claim.Name, user.Name))
			}
		}
	}
	return found
}

// waitsForADeletion tells whether a pod waits for one that its user has deleted and that has not ended: preemption took that one for a
// victim, as upstream's does. A new scheduler may evict another pod instead, so it is not asked.
func (h *history) waitsForADeletion() bool {
	pods, err := h.user.CoreV1().Pods("").List(h.ctx, metav1.ListOptions{})
	if err != nil {
		h.err = err
		return true
	}
	return slices.ContainsFunc(pods.Items, func(waiting v1.Pod) bool {
		node := waiting.Status.NominatedNodeName
		return waiting.Spec.NodeName == "" && node != "" && slices.ContainsFunc(pods.Items, func(other v1.Pod) bool {
			return other.Spec.NodeName == node && other.DeletionTimestamp != nil && !preemption.PodTerminatingByPreemption(&other) &&
				corev1helpers.PodPriority(&other) < corev1helpers.PodPriority(&waiting)
		})
	})
}
