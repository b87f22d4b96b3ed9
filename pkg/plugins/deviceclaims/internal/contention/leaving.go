// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contention

import (
	"context"
	"fmt"
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// Await has a pod wait for the devices of claims that others were evicted for and that are about to become free on the node that it is
// nominated to, and not preempt meanwhile. The pods of a claim are gone before kube-controller-manager takes the allocation back, and a pod
// whose binding was cancelled gives its devices back a moment later; a preemptor that is tried in between would find no device and evict
// somebody else. The status ends the attempt and leaves the nomination as it is.
func (r *Rivals) Await(ctx context.Context, pod *v1.Pod, node string, leaving []*Holder) (*fwk.PostFilterResult, *fwk.Status) {
	// First noted, then looked: what has changed before the note is seen now, and what changes later wakes the pod.
	r.Leaving.Add(r.Handle, pod, uidsOf(leaving))
	if slices.ContainsFunc(leaving, r.hasChanged) {
		r.Leaving.Remove(pod.UID)
		r.Handle.Activate(klog.FromContext(ctx), map[string]*v1.Pod{podclaims.PodName(pod).String(): pod})
	}
	// The nomination is said again: the scheduler takes it from the pod's status otherwise, where it may not be yet.
	return framework.NewPostFilterResultWithNominatedNode(node), fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
		fmt.Sprintf("node %s: %s", node, r.describeLeaving(leaving, pod.Namespace)))
}

// hasChanged tells whether a claim is not what it was when the attempt looked at it.
func (r *Rivals) hasChanged(st *Holder) bool {
	if st.left {
		return true
	}
	now := r.Claims.Holding(st.claim)
	return now.Claim != st.known.Claim || now.InFlight != st.known.InFlight || !slices.Equal(now.Owners, st.known.Owners)
}

// WaitingForDeallocation is in what a pod is told that waits for claims to leave. It is no warning, see failures.PostponedIn.
const WaitingForDeallocation = " released, waiting for "

// describeLeaving says that claims are about to give up their devices.
func (r *Rivals) describeLeaving(leaving []*Holder, namespace string) string {
	whose := "their"
	if len(leaving) == 1 {
		whose = "its"
	}
	return r.listClaims(leaving, namespace) + WaitingForDeallocation + whose + " deallocation"
}

// uidsOf returns the claims' UIDs.
func uidsOf(holders []*Holder) []types.UID {
	uids := make([]types.UID, len(holders))
	for i, st := range holders {
		uids[i] = st.claim.UID
	}
	return uids
}

// listClaims names claims to a user of the namespace.
func (r *Rivals) listClaims(holders []*Holder, namespace string) string {
	var names []string
	foreign := 0
	for _, st := range holders {
		if st.claim.Namespace != namespace && !r.NameAll {
			foreign++
			continue
		}
		names = append(names, st.claim.String())
	}
	slices.Sort(names)
	return explain.ListClaims(names, foreign)
}

// AwaitForGroup keeps a group from preempting while devices that others were evicted for are about to become free, see
// Await: if with them it would fit, it is told to wait, and its pods stay nominated. own are its claims. The status is nil otherwise.
func (r *Rivals) AwaitForGroup(ctx context.Context, pods []*v1.Pod, own sets.Set[types.UID],
	schedule fwk.PodGroupSchedulingFunc,
) (*fwk.PodGroupPostFilterResult, *fwk.Status) {
	nominations, err := r.nominationsOf(pods)
	if err != nil {
		return nil, fwk.AsStatus(err)
	}
	holders := r.NewHolders()
	holders.Own = own
	inv, view := r.Devices(), r.Claims.Snapshot().Usage
	var leaving []*Holder
	for _, name := range sets.List(sets.New(slices.Collect(maps.Values(nominations))...)) {
		node, err := r.Handle.SnapshotSharedLister().NodeInfos().Get(name)
		if err != nil {
			continue
		}
		for _, st := range holders.leavingOn(PoolsOf(node.Node(), inv), view, pods[0]) {
			if !slices.Contains(leaving, st) {
				leaving = append(leaving, st)
			}
		}
	}
	if len(leaving) == 0 {
		return nil, nil
	}
	if !r.Trial.Fits(ctx, schedule, leaving, false) {
		return nil, nil
	}
	// First noted, then looked, as for a single pod.
	activate := map[string]*v1.Pod{}
	result := &fwk.PodGroupPostFilterResult{NominatingInfos: map[types.NamespacedName]*fwk.NominatingInfo{}}
	for _, pod := range pods {
		name := types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}
		activate[name.String()] = pod
		r.Leaving.Add(r.Handle, pod, uidsOf(leaving))
		if node := nominations[pod.UID]; node != "" {
			result.NominatingInfos[name] = &fwk.NominatingInfo{NominatingMode: fwk.ModeOverride, NominatedNodeName: node}
		}
	}
	if slices.ContainsFunc(leaving, r.hasChanged) {
		for _, pod := range pods {
			r.Leaving.Remove(pod.UID)
		}
		r.Handle.Activate(klog.FromContext(ctx), activate)
	}
	return result, fwk.NewStatus(fwk.Success, r.describeLeaving(leaving, pods[0].Namespace))
}

// nominationsOf returns the nodes that the pods are nominated to, by pod.
func (r *Rivals) nominationsOf(pods []*v1.Pod) (map[types.UID]string, error) {
	nominations := map[types.UID]string{}
	unsure := sets.New[types.UID]()
	for _, pod := range pods {
		if node := pod.Status.NominatedNodeName; node != "" {
			nominations[pod.UID] = node
		} else {
			unsure.Insert(pod.UID)
		}
	}
	if unsure.Len() == 0 {
		return nominations, nil
	}
	// The scheduler may not have heard of its own write to a pod.
	nodes, err := r.Handle.SnapshotSharedLister().NodeInfos().List()
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	for _, node := range nodes {
		for _, info := range r.Handle.NominatedPodsForNode(node.Node().Name) {
			if uid := info.GetPod().UID; unsure.Has(uid) {
				nominations[uid] = node.Node().Name
			}
		}
	}
	return nominations, nil
}
