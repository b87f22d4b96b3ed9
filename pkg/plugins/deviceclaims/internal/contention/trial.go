// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contention

import (
	"context"
	"fmt"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// Trial is where the pods of a group have their devices while the framework tries the group: pod after pod goes through PreFilter,
// Filter and Reserve, and in the end all are unreserved. Nothing else is scheduled in this process meanwhile, so neither the tracker
// nor the API needs to know of it. If the group fits, Reserve runs once more for each pod, and that is for good.
//
// All profiles of a scheduler share one. Filter reads it in many goroutines; what changes it runs in the one that schedules.
type Trial struct {
	mutex sync.Mutex
	given []*given
	// leaving are claims of others that count as gone.
	leaving []*Holder
	// forgetful tells that nothing counts as having failed for a pod, see podmemory.FailedDevices.
	forgetful bool
	// views[i] is what over made of the view with the revision base for the first i of given, as far as it has. Preemption has the pods of
	// a group give back the last first, again and again.
	views []usage.View
	base  uint64

	// onNodes are the pods with devices on all nodes, noted when preemption for a group may begin. Nil if it may not.
	onNodes sets.Set[types.UID]
	// without is the cluster without those of them that preemption has taken away, nil before that is known.
	without *WhatIf
}

// given is what a claim has been given on trial.
type given struct {
	claim      usage.ClaimRef
	allocation *resourceapi.AllocationResult
	pods       sets.Set[types.UID]
}

// Give notes what a pod of the group has been given.
func (t *Trial) Give(pod types.UID, reserved []tracker.Reservation) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	for _, r := range reserved {
		t.given = append(t.given, &given{claim: usage.RefOf(r.Claim), allocation: r.Allocation, pods: sets.New(pod)})
	}
}

// Join makes a pod one of those that a claim has been given something for.
func (t *Trial) Join(pod, claim types.UID) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if g := t.of(claim); g != nil {
		g.pods.Insert(pod)
	}
}

// Allocation returns what a claim has been given, nil if nothing.
func (t *Trial) Allocation(claim types.UID) *resourceapi.AllocationResult {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if g := t.of(claim); g != nil {
		return g.allocation
	}
	return nil
}

func (t *Trial) of(claim types.UID) *given {
	for _, g := range t.given {
		if g.claim.UID == claim {
			return g
		}
	}
	return nil
}

// TakeBack takes from a pod what it has been given. What it shares with other pods stays theirs.
func (t *Trial) TakeBack(pod types.UID) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	stay := 0 // at the beginning of given
	for i, g := range t.given {
		if g.pods.Delete(pod); len(g.pods) > 0 && stay == i {
			stay++
		}
	}
	t.given = slices.DeleteFunc(t.given, func(g *given) bool { return len(g.pods) == 0 })
	t.views = t.views[:min(len(t.views), stay+1)]
}

// Fits tells whether the group fits while the devices of some claims count as free or, with forgetful, nothing as having failed for its
// pods.
func (t *Trial) Fits(ctx context.Context, schedule fwk.PodGroupSchedulingFunc, leaving []*Holder, forgetful bool) bool {
	set := func(leaving []*Holder, forgetful bool) {
		t.mutex.Lock()
		defer t.mutex.Unlock()
		t.leaving, t.forgetful, t.views = leaving, forgetful, nil
	}
	set(leaving, forgetful)
	defer set(nil, false)
	_, status := schedule(ctx)
	return status.IsSuccess()
}

// IsForgetful tells whether nothing counts as having failed for the pods.
func (t *Trial) IsForgetful() bool {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return t.forgetful
}

// over returns the usage with what pods have on trial.
func (t *Trial) over(view usage.View) usage.View {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if len(t.given) == 0 && len(t.leaving) == 0 {
		return view
	}
	if len(t.views) == 0 || t.base != view.Revision() {
		t.base, t.views = view.Revision(), append(t.views[:0], without(view, t.leaving))
	}
	last := t.views[len(t.views)-1]
	for _, g := range t.given[len(t.views)-1:] {
		last = last.With(g.claim, g.allocation)
		t.views = append(t.views, last)
	}
	return last
}

// ForbidPreemption tells that no preemption for a group may begin.
func (t *Trial) ForbidPreemption() {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.onNodes, t.without = nil, nil
}

// AllowPreemption tells that preemption for a group may begin, on nodes as they are now.
func (t *Trial) AllowPreemption(handle fwk.Handle) error {
	onNodes, err := podsWithDevices(handle)
	if err != nil {
		return err
	}
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.onNodes, t.without = onNodes, nil
	return nil
}

// WhatIf returns, for one pod, the cluster without the pods that have been taken off their nodes because preemption finds out whether a
// group would fit without them; or as it is, if what is leaving counts as gone, or nothing as having failed. Nil if none of that is so.
//
// Nobody tells a plugin: the framework begins with new cycle states on a snapshot from which pods are missing. It is as long as
// this snapshot is open to changes, and only one can have it open.
func (t *Trial) WhatIf(handle fwk.Handle) (*WhatIf, error) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	switch {
	case len(t.leaving) > 0, t.forgetful:
		return &WhatIf{dryRun: true}, nil
	case t.onNodes == nil:
		return nil, nil
	}
	if snapshot := handle.MutableSnapshotSharedLister(); snapshot.StartMutations() == nil {
		t.onNodes, t.without = nil, nil
		return nil, snapshot.EndMutations()
	}
	if t.without == nil {
		left, err := podsWithDevices(handle)
		if err != nil {
			return nil, err
		}
		t.without = &WhatIf{dryRun: true}
		for uid := range t.onNodes.Difference(left) {
			t.without.removed = t.without.removed.Set(uid, struct{}{})
		}
	}
	return t.without.clone(), nil
}

// podsWithDevices returns the pods on all nodes of the snapshot that may hold devices.
func podsWithDevices(handle fwk.Handle) (sets.Set[types.UID], error) {
	nodes, err := handle.SnapshotSharedLister().NodeInfos().List()
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	pods := sets.New[types.UID]()
	for _, node := range nodes {
		for _, info := range node.GetPods() {
			if pod := info.GetPod(); podclaims.UsesDevices(pod) {
				pods.Insert(pod.UID)
			}
		}
	}
	return pods, nil
}
