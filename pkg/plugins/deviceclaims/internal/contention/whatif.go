// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contention

import (
	"context"
	"slices"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/internal/sharded"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/usage"
)

// WhatIf is how the cluster would be without some of its pods, and a node with some that are nominated to it. It is never changed;
// each pod added or removed makes a new one, so that clones of a cycle state can share it. To make one costs little, however many pods
// are removed: preemption puts thousands back, one after the other. Nil stands for the cluster as it is.
type WhatIf struct {
	// removed are the pods with devices that have been taken away.
	removed podSet
	// nominees are the pods that have been added, for the node that is looked at. Read only.
	nominees []*v1.Pod
	// dryRun tells that pods were taken away at some time, that claims count as gone, or that nothing counts as having failed:
	// somebody tries what has to go.
	dryRun bool

	// last is what over has made last, for the one pod that is being scheduled. Filter and Reserve ask for the same.
	last atomic.Pointer[nodeUsage]
}

// nodeUsage is what has been made of the usage with the revision base for a node.
type nodeUsage struct {
	base uint64
	node *v1.Node
	view usage.View
}

// podSet is an immutable set of pods, by UID.
type podSet = sharded.Map[types.UID, struct{}]

// IsDryRun tells whether somebody tries what has to go.
func (w *WhatIf) IsDryRun() bool { return w != nil && w.dryRun }

// HasRemoved tells whether the pod has been taken away.
func (w *WhatIf) HasRemoved(pod *v1.Pod) bool {
	if w == nil {
		return false
	}
	_, removed := w.removed.Get(pod.UID)
	return removed
}

func (w *WhatIf) clone() *WhatIf {
	if w == nil {
		return &WhatIf{}
	}
	return &WhatIf{removed: w.removed, nominees: w.nominees, dryRun: w.dryRun}
}

// Without returns the cluster without one more pod.
func (w *WhatIf) Without(pod *v1.Pod) *WhatIf {
	if w.IsDryRun() && !podclaims.UsesDevices(pod) {
		return w
	}
	next := w.clone()
	next.dryRun = true
	if podclaims.UsesDevices(pod) {
		next.removed = next.removed.Set(pod.UID, struct{}{})
	}
	return next
}

// With returns the cluster with a pod put back or, if the pod has no node, as one that is nominated.
func (w *WhatIf) With(pod *v1.Pod) *WhatIf {
	switch {
	case w.HasRemoved(pod):
		next := w.clone()
		next.removed = next.removed.Delete(pod.UID)
		return next
	case pod.Spec.NodeName == "":
		next := w.clone()
		next.nominees = append(slices.Clip(next.nominees), pod)
		return next
	}
	return w
}

// View returns who holds what that matters for a node: as it was when the cycle began, with what other pods of the group have on trial, and
// as the pods that were added and removed make it. Without a node it is what matters for all, with no regard to these pods.
func (s *Situation) View(ctx context.Context, node *v1.Node) usage.View {
	view := s.Usage
	if s.Trial != nil {
		view = s.Trial.over(view)
	}
	if s.WhatIf == nil || node == nil {
		return view
	}
	return s.WhatIf.over(ctx, s.Facts, node, view)
}

// over returns the usage as the pods that were added and removed make it for the node. It looks at nothing but the node's pools, so that
// its cost does not depend on how many pods are removed elsewhere.
func (w *WhatIf) over(ctx context.Context, f *Facts, node *v1.Node, view usage.View) usage.View {
	if last := w.last.Load(); last != nil && last.base == view.Revision() && last.node == node {
		return last.view
	}
	next := &nodeUsage{base: view.Revision(), node: node, view: f.Holders.withoutPods(view, PoolsOf(node, f.Inventory), w.removed)}
	if len(w.nominees) > 0 {
		next.view = f.Holders.WithNominees(ctx, w.nominees, node, f.Inventory, next.view)
	}
	w.last.Store(next)
	return next.view
}
