// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"fmt"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	resourceinformers "k8s.io/client-go/informers/resource/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/dynamic-resource-allocation/resourceslice/tracker"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/inventory"
)

// Options say what to watch.
type Options struct {
	// DeviceTaintRules applies DeviceTaintRules to the slices. Without it they are not watched.
	DeviceTaintRules bool
	// ConsumableCapacity is the Kubernetes feature DRAConsumableCapacity.
	ConsumableCapacity bool
}

// Event is a change that is already visible in the store's view. Exactly one of Slice and Class is set.
type Event struct {
	// Slice is the slice that changed, with taint rules applied; its last state when it was deleted.
	Slice *resourceapi.ResourceSlice
	// Class is the class that changed; its last state when it was deleted.
	Class *resourceapi.DeviceClass
	// OldSlice is the slice before the change, nil when it was added or deleted.
	OldSlice *resourceapi.ResourceSlice
	// Deleted tells that the object is gone.
	Deleted bool
}

// Source keeps a store up to date until the context given to New ends.
type Source struct {
	store    *inventory.Store
	tracker  *tracker.Tracker
	synced   []cache.DoneChecker
	done     chan struct{}
	mu       sync.RWMutex
	listener []func(Event)

	// turn is held while upstream's tracker handles an event.
	turn sync.Mutex
	// order is held while an event of the tracker, or about a class, is handled here.
	order sync.Mutex
	// slices are those that the store has. The tracker may have replaced one by an equal one without telling.
	slices map[string]*resourceapi.ResourceSlice
}

// New wires the informers of a factory into the store. The caller starts that factory after New, as for any
// informer. client is for the events that the tracker writes about taint rules that do not apply.
func New(ctx context.Context, client kubernetes.Interface, resources resourceinformers.Interface, store *inventory.Store,
	opts Options,
) (*Source, error) {
	s := &Source{store: store, done: make(chan struct{}), slices: make(map[string]*resourceapi.ResourceSlice)}
	var err error
	trackerOpts := tracker.Options{
		EnableDeviceTaintRules:   opts.DeviceTaintRules,
		EnableConsumableCapacity: opts.ConsumableCapacity,
		SliceInformer:            slicesInTurn{resources.ResourceSlices(), &s.turn},
		KubeClient:               client,
	}
	if opts.DeviceTaintRules {
		trackerOpts.TaintInformer = rulesInTurn{resources.DeviceTaintRules(), &s.turn}
	}
	if s.tracker, err = tracker.StartTracker(ctx, trackerOpts); err != nil {
		return nil, fmt.Errorf("start the tracker for ResourceSlices and DeviceTaintRules: %w", err)
	}
	s.turn.Lock() // it tells the handler of what it has already
	sliceHandler, err := s.tracker.AddEventHandler(s.sliceHandler())
	s.turn.Unlock()
	if err != nil {
		s.tracker.Stop()
		return nil, fmt.Errorf("watch ResourceSlices: %w", err)
	}
	classes := resources.DeviceClasses().Informer()
	classHandler, err := classes.AddEventHandler(s.classHandler())
	if err != nil {
		s.tracker.Stop()
		return nil, fmt.Errorf("watch DeviceClasses: %w", err)
	}
	s.synced = []cache.DoneChecker{s.tracker.HasSyncedChecker(), sliceHandler.HasSyncedChecker(), classHandler.HasSyncedChecker()}

	go func() {
		defer close(s.done)
		<-ctx.Done()
		s.tracker.Stop()
		if err := classes.RemoveEventHandler(classHandler); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot stop watching DeviceClasses")
		}
	}()
	return s, nil
}

// WaitForSync blocks until the store has all objects that existed when the informers started, or ctx ends.
func (s *Source) WaitForSync(ctx context.Context) error {
	if !cache.WaitFor(ctx, "", s.synced...) {
		return fmt.Errorf("waiting for ResourceSlices, DeviceTaintRules and DeviceClasses: %w",
			context.Cause(ctx))
	}
	return nil
}

// HasSynced tells whether WaitForSync would return at once.
func (s *Source) HasSynced() bool {
	return !slices.ContainsFunc(s.synced, func(c cache.DoneChecker) bool { return !cache.IsDone(c) })
}

// Done is closed once the context given to New has ended and everything that it started has stopped.
func (s *Source) Done() <-chan struct{} { return s.done }

// AddListener has fn called for every later change, after the store has it. Calls come one at a time and, for one kind of object, in
// order: fn must not wait for another change.
func (s *Source) AddListener(fn func(Event)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.listener = append(slices.Clone(s.listener), fn)
}

func (s *Source) tell(event Event) {
	s.mu.RLock()
	listeners := s.listener
	s.mu.RUnlock()
	for _, fn := range listeners {
		fn(event)
	}
}

func (s *Source) sliceHandler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if slice, ok := obj.(*resourceapi.ResourceSlice); ok {
				s.sliceChanged(slice.Name, slice)
			}
		},
		UpdateFunc: func(_, newObj any) {
			if slice, ok := newObj.(*resourceapi.ResourceSlice); ok {
				s.sliceChanged(slice.Name, slice)
			}
		},
		DeleteFunc: func(obj any) {
			if slice, ok := last[*resourceapi.ResourceSlice](obj); ok {
				s.sliceChanged(slice.Name, nil)
			}
		},
	}
}

// sliceChanged takes the slice as it is now, nil if it is gone. What it was before is what the store has, whatever the tracker says: that
// may have changed without an event.
func (s *Source) sliceChanged(name string, slice *resourceapi.ResourceSlice) {
	s.order.Lock()
	defer s.order.Unlock()
	before := s.slices[name]
	switch {
	case slice != nil:
		s.slices[name] = slice
		s.store.SetSlice(slice)
		s.tell(Event{Slice: slice, OldSlice: before})
	case before != nil:
		delete(s.slices, name)
		s.store.DeleteSlice(name)
		s.tell(Event{Slice: before, Deleted: true})
	}
}

func (s *Source) classHandler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if class, ok := obj.(*resourceapi.DeviceClass); ok {
				s.classChanged(class, false)
			}
		},
		UpdateFunc: func(_, newObj any) {
			if class, ok := newObj.(*resourceapi.DeviceClass); ok {
				s.classChanged(class, false)
			}
		},
		DeleteFunc: func(obj any) {
			if class, ok := last[*resourceapi.DeviceClass](obj); ok {
				s.classChanged(class, true)
			}
		},
	}
}

func (s *Source) classChanged(class *resourceapi.DeviceClass, deleted bool) {
	s.order.Lock()
	defer s.order.Unlock()
	if deleted {
		s.store.DeleteClass(class.Name)
	} else {
		s.store.SetClass(class)
	}
	s.tell(Event{Class: class, Deleted: deleted})
}

// last returns the last known state of a deleted object.
func last[T any](obj any) (T, bool) {
	if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = tombstone.Obj
	}
	t, ok := obj.(T)
	return t, ok
}
