// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package source

import (
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	resourceinformers "k8s.io/client-go/informers/resource/v1"
	"k8s.io/client-go/tools/cache"
)

// Upstream's tracker handles events of two informers, each of which calls it from a goroutine of its own, and does not keep the two
// apart: of two that apply the taint rules to one slice at a time, the one that has seen less may have the last word and a taint is
// lost, and events wait in one queue from which both take, so that one may overtake another. Here the two take turns. Then what an
// event says is how things are, and follows on what the event before has said.

// slicesInTurn gives out an informer for slices that calls its handlers in turn.
type slicesInTurn struct {
	resourceinformers.TypedResourceSliceInformer
	turn *sync.Mutex
}

func (s slicesInTurn) TypedInformer() resourceinformers.ResourceSliceIndexInformer {
	return inTurn[*resourceapi.ResourceSlice]{s.TypedResourceSliceInformer.TypedInformer(), s.turn}
}

// rulesInTurn does the same for taint rules.
type rulesInTurn struct {
	resourceinformers.TypedDeviceTaintRuleInformer
	turn *sync.Mutex
}

func (r rulesInTurn) TypedInformer() resourceinformers.DeviceTaintRuleIndexInformer {
	return inTurn[*resourceapi.DeviceTaintRule]{r.TypedDeviceTaintRuleInformer.TypedInformer(), r.turn}
}

// inTurn is an informer whose typed handlers, which are those of the tracker, hold turn while they run.
type inTurn[T cache.Object] struct {
	cache.TypedSharedIndexInformer[T]
	turn *sync.Mutex
}

func (i inTurn[T]) AddTypedEventHandler(handler cache.TypedResourceEventHandler[T],
	options ...cache.HandlerOptions,
) (cache.ResourceEventHandlerRegistration, error) {
	return i.TypedSharedIndexInformer.AddTypedEventHandler(turnHandler[T]{handler, i.turn}, options...)
}

type turnHandler[T cache.Object] struct {
	handler cache.TypedResourceEventHandler[T]
	turn    *sync.Mutex
}

func (h turnHandler[T]) OnAdd(obj T, isInInitialList bool) {
	h.turn.Lock()
	defer h.turn.Unlock()
	h.handler.OnAdd(obj, isInInitialList)
}

func (h turnHandler[T]) OnUpdate(oldObj, newObj T) {
	h.turn.Lock()
	defer h.turn.Unlock()
	h.handler.OnUpdate(oldObj, newObj)
}

func (h turnHandler[T]) OnDelete(obj cache.DeletedObject[T]) {
	h.turn.Lock()
	defer h.turn.Unlock()
	h.handler.OnDelete(obj)
}
