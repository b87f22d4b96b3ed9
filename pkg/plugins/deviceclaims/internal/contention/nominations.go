// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contention

import (
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/source"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/tracker"
)

// Nominations knows on which nodes devices have been kept from others for nominated pods, and tells when that ends. The framework tells
// only of nominations that the API has shown; but a pod is nominated for the scheduling queue before the API shows it.
type Nominations struct {
	pods corelisters.PodLister
	// ended is called for a node where less may be kept now.
	ended func(node string)
	// lost is called for a waiting pod that is nominated to a node behind another one, see Overtake.
	lost func(pod types.UID)

	mutex sync.Mutex
	byPod map[types.UID]*nomination
	// waits are pods that have been told that they wait for claims to leave.
	waits sets.Set[types.UID]
}

// nomination is what has been kept for one pod.
type nomination struct {
	claims []types.NamespacedName
	nodes  sets.Set[string]
}

// NewNominations returns no nominations. The lister knows which pods there are. ended is called for a node where less may be kept now, and
// lost for a waiting pod that is nominated to a node behind another one.
func NewNominations(pods corelisters.PodLister, ended func(node string), lost func(pod types.UID)) *Nominations {
	return &Nominations{pods: pods, ended: ended, lost: lost, byPod: map[types.UID]*nomination{}, waits: sets.New[types.UID]()}
}

// BeginWait notes that a pod waits for claims to leave. It is false if it did so before.
func (n *Nominations) BeginWait(pod *v1.Pod) bool {
	n.mutex.Lock()
	before := n.waits.Has(pod.UID)
	n.waits.Insert(pod.UID)
	n.mutex.Unlock()
	if !n.isPending(pod) {
		n.EndWait(pod.UID)
	}
	return !before
}

// isPending tells whether the pod is still there and has no node. Who first notes something about a pod and then asks learns of what has
// ended by then; of what ends later its handler is told.
func (n *Nominations) isPending(pod *v1.Pod) bool {
	now, err := n.pods.Pods(pod.Namespace).Get(pod.Name)
	return err == nil && now.UID == pod.UID && now.Spec.NodeName == ""
}

// EndWait notes that a pod waits no more.
func (n *Nominations) EndWait(pod types.UID) {
	n.mutex.Lock()
	defer n.mutex.Unlock()
	n.waits.Delete(pod)
}

// keep tells whether devices of the node are to be kept for a pod that is nominated to it, and notes that they are. Nothing is kept for
// a pod that is gone or has a node: the scheduling queue may hear of that later than we do.
func (n *Nominations) keep(pod *v1.Pod, node string) bool {
	n.mutex.Lock()
	known := n.byPod[pod.UID]
	if known == nil {
		known = &nomination{nodes: sets.New[string]()}
		for _, name := range podclaims.NamedBy(pod) {
			known.claims = append(known.claims, types.NamespacedName{Namespace: pod.Namespace, Name: name})
		}
		n.byPod[pod.UID] = known
	}
	known.nodes.Insert(node)
	n.mutex.Unlock()
	if !n.isPending(pod) {
		n.End(pod.UID, func(string) bool { return true })
		return false
	}
	return true
}

// End tells that nothing is kept for a pod any more on the nodes of which is says so.
func (n *Nominations) End(pod types.UID, is func(node string) bool) {
	n.mutex.Lock()
	var ended []string
	if known := n.byPod[pod]; known != nil {
		for node := range known.nodes {
			if is(node) {
				ended = append(ended, node)
			}
		}
		if known.nodes.Delete(ended...).Len() == 0 {
			delete(n.byPod, pod)
		}
	}
	n.mutex.Unlock()
	for _, node := range ended {
		n.ended(node)
	}
}

// PodHandler takes the ends of pods, and those that got a node. Of changes of nominations the scheduling queue tells, see waiting.Hints.
func (n *Nominations) PodHandler() cache.ResourceEventHandler {
	all := func(string) bool { return true }
	return cache.ResourceEventHandlerFuncs{
		UpdateFunc: func(oldObj, obj any) {
			pod, ok := obj.(*v1.Pod)
			if !ok || pod.Spec.NodeName == "" {
				return
			}
			n.EndWait(pod.UID)
			n.End(pod.UID, all)
			if before, known := oldObj.(*v1.Pod); known && podclaims.UsesDevices(pod) && isEnding(pod) && !isEnding(before) {
				n.leaves(pod.Spec.NodeName)
			}
		},
		DeleteFunc: func(obj any) {
			if pod, ok := obj.(*v1.Pod); ok {
				n.EndWait(pod.UID)
				n.End(pod.UID, all)
			}
		},
	}
}

// isEnding tells whether a pod has ended, or is about to.
func isEnding(pod *v1.Pod) bool {
	return pod.DeletionTimestamp != nil || pod.Status.Phase == v1.PodSucceeded || pod.Status.Phase == v1.PodFailed
}

// leaves tells that a pod with devices has begun to end on a node. Who is nominated there may count on these devices, see WithNominees, and
// leave others.
func (n *Nominations) leaves(node string) {
	kept := false
	n.mutex.Lock()
	for _, known := range n.byPod {
		kept = kept || known.nodes.Has(node)
	}
	n.mutex.Unlock()
	if kept {
		n.ended(node)
	}
}

// tell tells that less may be kept now on the nodes of some nominations.
func (n *Nominations) tell(some func(known *nomination) bool) {
	changed := sets.New[string]()
	n.mutex.Lock()
	for _, known := range n.byPod {
		if some(known) {
			changed.Insert(known.nodes.UnsortedList()...)
		}
	}
	n.mutex.Unlock()
	for node := range changed {
		n.ended(node)
	}
}

// OnInventoryEvent takes the inventory's events. By another class a nominated pod may need other devices, or find none. What slices change
// on a node is news for who waits for its devices anyway.
func (n *Nominations) OnInventoryEvent(event source.Event) {
	if event.Class != nil {
		n.tell(func(*nomination) bool { return true })
	}
}

// OnClaimEvent takes the tracker's events. A nominated pod whose claim is gone or about to go, has devices elsewhere, or
// has lost a user or got one, may need less.
func (n *Nominations) OnClaimEvent(event tracker.Event) {
	if before, after := event.Old, event.New; before != nil && after != nil &&
		amount.Semantic.DeepEqual(before.Status.Allocation, after.Status.Allocation) &&
		amount.Semantic.DeepEqual(before.Status.ReservedFor, after.Status.ReservedFor) &&
		before.DeletionTimestamp.Equal(after.DeletionTimestamp) {
		return
	}
	claim := types.NamespacedName{Namespace: event.Claim.Namespace, Name: event.Claim.Name}
	n.tell(func(known *nomination) bool { return slices.Contains(known.claims, claim) })
}

// Overtake notes that a pod has been nominated to a node. Those of lower priority that are nominated there, too, may have lost what was
// evicted for them. Preemption takes their nominations, but not of a pod of which the API does not show it yet.
func (n *Nominations) Overtake(pod *v1.Pod, node string, nominees []fwk.PodInfo) {
	if pod.Status.NominatedNodeName == node {
		return // and was when they were tried
	}
	for _, info := range nominees {
		if other := info.GetPod(); corev1helpers.PodPriority(other) < corev1helpers.PodPriority(pod) {
			n.lost(other.UID)
		}
	}
}
