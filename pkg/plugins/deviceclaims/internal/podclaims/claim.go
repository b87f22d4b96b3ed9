// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podclaims

import (
	"fmt"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
)

// Claim is one claim of the pod.
type Claim struct {
	Claim *resourceapi.ResourceClaim
	// Nodes are where the claim's allocation can be used. Nil if that is everywhere, or without allocation.
	Nodes *nodeaffinity.NodeSelector
	// User is whom the claim is reserved for: the pod, or its group.
	User resourceapi.ResourceClaimConsumerReference
	// Shared is what another pod of the group has been given for the claim in this cycle of the group, nil if nothing.
	Shared *resourceapi.AllocationResult
}

// Allocation is what the claim has in this cycle, nil if that is still to be decided.
func (pc *Claim) Allocation() *resourceapi.AllocationResult {
	if pc.Shared != nil {
		return pc.Shared
	}
	return pc.Claim.Status.Allocation
}

// NodesOf returns the nodes on which an allocation of the claim can be used, nil for all.
func NodesOf(claim *resourceapi.ResourceClaim, allocation *resourceapi.AllocationResult) (*nodeaffinity.NodeSelector, error) {
	if allocation.NodeSelector == nil {
		return nil, nil
	}
	nodes, err := nodeaffinity.NewNodeSelector(allocation.NodeSelector)
	if err != nil {
		return nil, fmt.Errorf("claim %s, status.allocation.nodeSelector: %w", klog.KObj(claim), err)
	}
	return nodes, nil
}

// Usable returns the pod's claims, or the first reason why it cannot use them, whatever node it is on.
func Usable(claims Getter, pod *v1.Pod) ([]Name, error) {
	names, err := NamesOf(pod)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if _, err := Get(claims, pod, name); err != nil {
			return nil, err
		}
	}
	return names, nil
}
