// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package waiting connects the waiting room, pkg/wakeup, with the scheduler: it tells the room what changes, says what a pod asks for, and
// puts the pods that the room names into the queue. It decides nothing.
package waiting

import (
	"context"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/source"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
	"stowage.dev/stowage/pkg/wakeup"
)

// Pods tells the waiting room what changes, and wakes the pods that it names.
//
// The framework would wake pods by the events of its own informers. Those may come before the tracker or the
// inventory has seen the change: the pod would be tried on the old state, fail, and never be woken again. So
// it is the tracker and the inventory that wake, and a pod is noted in the room before it looks at them. Whatever
// changes later than what it saw finds it there.
//
// The scheduling queue ignores the activation of a pod that is not waiting, retries one that is being scheduled just
// now, and leaves a gated one alone. The room keeps an entry until the pod is bound or gone.
type Pods struct {
	*wakeup.Room[*Profile, *framework.QueuedPodInfo]

	pods    corelisters.PodLister
	nodes   corelisters.NodeLister
	tracker *tracker.Tracker
	store   *inventory.Store
	// generation is that of the inventory at the last event of a slice. The inventory's events come one at a time.
	generation uint64

	mutex sync.Mutex
	// watchers are closed with the next event of their claim.
	watchers map[types.NamespacedName]chan struct{}
}

// NewPods returns no pods.
func NewPods(options wakeup.Options, pods corelisters.PodLister, nodes corelisters.NodeLister, claims *tracker.Tracker,
	store *inventory.Store,
) *Pods {
	return &Pods{
		Room: wakeup.New[*Profile, *framework.QueuedPodInfo](options),
		pods: pods, nodes: nodes, tracker: claims, store: store,
		watchers: map[types.NamespacedName]chan struct{}{},
	}
}

// Note is [wakeup.Room.Note] of a pod with the claims that it names and those that were made for its extended resources, unless the pod is
// gone. Those who tell of its end are told one by one: the scheduling queue may hear of its beginning after we have heard of its end, and
// then nobody would ever take it out again.
func (w *Pods) Note(pod *v1.Pod, named []podclaims.Name, tag *Profile) {
	var claims []types.NamespacedName
	for _, name := range named {
		claims = append(claims, name.NamespacedName)
	}
	if podclaims.AsksForExtended(pod) {
		for _, claim := range tag.Demand.Extended.MadeFor(pod) {
			claims = append(claims, types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name})
		}
	}
	w.Room.Note(pod, claims, tag)
	// Who is gone after this, and not before, is told of later.
	if known, err := w.pods.Pods(pod.Namespace).Get(pod.Name); err != nil || known.UID != pod.UID {
		w.Gone(pod.UID, false)
	}
}

// Run wakes pods until ctx ends. Events that come while it is at it are handled together.
func (w *Pods) Run(ctx context.Context) {
	due := time.After(0)
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.Wanted():
		case <-due:
		}
		again := w.Pass(ctx, w.world(ctx), func(wake wakeup.Wake[*Profile]) { activate(klog.FromContext(ctx), wake) })
		due = nil
		if !again.IsZero() {
			due = time.After(time.Until(again))
		}
	}
}

// world is what the room decides on.
func (w *Pods) world(ctx context.Context) wakeup.World[*Profile, *framework.QueuedPodInfo] {
	logger := klog.FromContext(ctx)
	evictions := contention.NewEvictions()
	return wakeup.World[*Profile, *framework.QueuedPodInfo]{
		Now: time.Now,
		State: func() (*inventory.View, usage.View) {
			return w.store.View(), w.tracker.Snapshot().Usage
		},
		Node: func(name string) *v1.Node {
			node, _ := w.nodes.Get(name) // nil with an error
			return node
		},
		Nodes: func() []*v1.Node {
			nodes, err := w.nodes.List(labels.Everything())
			if err != nil {
				logger.Error(err, "Cannot list nodes")
			}
			return nodes
		},
		Pod: func(pod *v1.Pod) *v1.Pod {
			known, err := w.pods.Pods(pod.Namespace).Get(pod.Name)
			if err != nil || known.UID != pod.UID {
				return nil
			}
			return known
		},
		Suitable: func(pod *v1.Pod, tag *Profile) func(*v1.Node) bool { return tag.Setup.Suitable(logger, pod) },
		Evicted: func(pod *v1.Pod, tag *Profile, node *v1.Node, inv *inventory.View, inUse usage.View) func(usage.View) usage.View {
			return evictions.Evicted(tag.Rivals, pod, node, inv, inUse)
		},
		Look:   func(pod *v1.Pod, tag *Profile, inv *inventory.View) *wakeup.Question { return tag.look(pod, inv) },
		Key:    func(pod *v1.Pod, _ *Profile) *framework.QueuedPodInfo { return queueKey(pod) },
		Before: func(tag *Profile, a, b *framework.QueuedPodInfo) bool { return tag.Setup.read().less(a, b) },
	}
}

// activate puts the pod into the active queue of its scheduler, past any pause.
func activate(logger klog.Logger, wake wakeup.Wake[*Profile]) {
	logger.V(4).Info("Waking a pod that may fit now", "pod", klog.KObj(wake.Pod), "cause", wake.Cause)
	wake.Tag.Handle.Activate(logger, map[string]*v1.Pod{wake.Pod.Namespace + "/" + wake.Pod.Name: wake.Pod})
}

// OnClaimEvent takes the tracker's events.
func (w *Pods) OnClaimEvent(event tracker.Event) {
	name := types.NamespacedName{Namespace: event.Claim.Namespace, Name: event.Claim.Name}
	w.mutex.Lock()
	if watcher := w.watchers[name]; watcher != nil {
		close(watcher)
		delete(w.watchers, name)
	}
	w.mutex.Unlock()
	w.ClaimChanged(name)
	w.Freed(freedBy(event), event.Revision)
}

// freedBy returns the devices of which there may be more for others. A claim whose allocation was exchanged for another one
// may have given up a part of what it has of a device. One that has lost a user may be one that its other users can be evicted for.
func freedBy(event tracker.Event) []usage.DeviceID {
	if event.Old == nil || event.New == nil {
		return event.Freed
	}
	before, after := event.Old.Status.Allocation, event.New.Status.Allocation
	if before == nil || after == nil ||
		!hasLostUsers(event.Old, event.New) && amount.Semantic.DeepEqual(before.Devices.Results, after.Devices.Results) {
		return event.Freed
	}
	freed := make([]usage.DeviceID, len(before.Devices.Results))
	for i := range before.Devices.Results {
		freed[i] = usage.DeviceOf(&before.Devices.Results[i])
	}
	return freed
}

// hasLostUsers tells whether a claim is not reserved any more for somebody.
func hasLostUsers(before, after *resourceapi.ResourceClaim) bool {
	users := sets.New[types.UID]()
	for _, user := range after.Status.ReservedFor {
		users.Insert(user.UID)
	}
	return slices.ContainsFunc(before.Status.ReservedFor,
		func(user resourceapi.ResourceClaimConsumerReference) bool { return !users.Has(user.UID) })
}

// OnInventoryEvent takes the inventory's events.
func (w *Pods) OnInventoryEvent(event source.Event) {
	generation := w.store.View().Generation()
	if event.Class != nil {
		w.ClassChanged(event.Class.Name, generation)
		return
	}
	if generation == w.generation {
		return // nothing of it matters, such as for metadata
	}
	w.generation = generation
	w.SliceChanged(event.OldSlice, event.Slice, generation)
}

// PodHandler forgets pods that are bound or gone.
func (w *Pods) PodHandler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		UpdateFunc: func(_, obj any) {
			if pod, ok := obj.(*v1.Pod); ok && pod.Spec.NodeName != "" {
				w.Gone(pod.UID, true)
			}
		},
		DeleteFunc: func(obj any) {
			if pod, ok := obj.(*v1.Pod); ok {
				w.Gone(pod.UID, pod.Spec.NodeName != "")
			}
		},
	}
}

// Watch returns a channel that is closed with the next event of the claim.
func (w *Pods) Watch(claim types.NamespacedName) <-chan struct{} {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if w.watchers[claim] == nil {
		w.watchers[claim] = make(chan struct{})
	}
	return w.watchers[claim]
}

// SeenNow is the state that whoever looks from now on sees, or a later one.
func (w *Pods) SeenNow() wakeup.Seen {
	return wakeup.Seen{Usage: w.tracker.Snapshot().Revision, Inventory: w.store.View().Generation()}
}
