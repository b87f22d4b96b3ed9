// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package refusals finds out why no node does for a pod: what devices are missing and whose release would help, for which
// nodes its claims are allocated already, and which of these allocations is in its way. What is done about that, it does not
// know.
package refusals

import (
	"context"
	"iter"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	resourcelisters "k8s.io/client-go/listers/resource/v1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	v1helper "k8s.io/kubernetes/pkg/apis/core/v1/helper"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"

	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// Finder finds that out for the pods of one profile.
type Finder struct {
	// Nodes are those of the cycle.
	Nodes interface {
		SnapshotSharedLister() fwk.SharedLister
	}
	// Setup says what the profile has besides this plugin.
	Setup interface {
		Filters(plugin string) bool
		Suitable(logger klog.Logger, pod *v1.Pod) func(*v1.Node) bool
	}
	// Rules are the DeviceTaintRules, nil without that feature.
	Rules  resourcelisters.DeviceTaintRuleLister
	Groups *podclaims.Groups
	// Binder knows which claims cannot be used for now, and who uses them.
	Binder interface {
		WhyBroken(claim *resourceapi.ResourceClaim) string
		CheckNotAdopted(claim *resourceapi.ResourceClaim, users ...types.UID) error
	}
	Extended *extended.Resources
	Rivals   *contention.Rivals
	// HoldersLimit is for finding the claims whose release would help, ObstacleLimit for finding which of a pod's own
	// allocations is in its way.
	HoldersLimit, ObstacleLimit time.Duration
}

// suitableNodes iterates over the nodes that the pod may be on by their labels and taints.
func (f *Finder) suitableNodes(ctx context.Context, pod *v1.Pod) iter.Seq[*v1.Node] {
	suitable := f.Setup.Suitable(klog.FromContext(ctx), pod)
	return func(yield func(*v1.Node) bool) {
		nodes, err := f.Nodes.SnapshotSharedLister().NodeInfos().List()
		if err != nil {
			return
		}
		for _, info := range nodes {
			if suitable(info.Node()) && !yield(info.Node()) {
				return
			}
		}
	}
}

// nodeOf returns the node with the name as it is in this cycle, nil if there is none.
func (f *Finder) nodeOf(name string) *v1.Node {
	info, err := f.Nodes.SnapshotSharedLister().NodeInfos().Get(name)
	if err != nil {
		return nil
	}
	return info.Node()
}

// nodeThatCanHold is nodeOf for those nodes whose CPU, memory and alike suffice for the pod's containers when nobody else is there. This
// plugin is asked before NodeResourcesFit, and the release of devices on another node would help nobody.
func (f *Finder) nodeThatCanHold(pod *v1.Pod) func(name string) *v1.Node {
	if !f.Setup.Filters(names.NodeResourcesFit) {
		return f.nodeOf
	}
	least := map[v1.ResourceName]amount.Amount{}
	for i := range pod.Spec.Containers {
		for resource, quantity := range pod.Spec.Containers[i].Resources.Requests {
			if !v1helper.IsExtendedResourceName(resource) { // a class may stand for them
				least[resource] = least[resource].Add(amount.Of(quantity))
			}
		}
	}
	return func(name string) *v1.Node {
		node := f.nodeOf(name)
		if node == nil {
			return nil
		}
		for resource, wanted := range least {
			if offered, ok := node.Status.Allocatable[resource]; ok && amount.Of(offered).Less(wanted) {
				return nil
			}
		}
		return node
	}
}
