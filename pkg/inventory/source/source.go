package source

import (
	"context"
	"fmt"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/client-go/informers"
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

// DefaultOptions are those for the features on by default in Kubernetes 1.37.
func DefaultOptions() Options { return Options{DeviceTaintRules: true, ConsumableCapacity: true} }

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
	synced   []cache.InformerSynced
	done     chan struct{}
	mu       sync.RWMutex
	listener []func(Event)
}

// New wires the factory's informers into the store. The caller starts the factory after New, as for any
// informer. client is for the events that the tracker writes about taint rules that do not apply.
func New(ctx context.Context, client kubernetes.Interface, factory informers.SharedInformerFactory, store *inventory.Store, opts Options) (*Source, error) {
	s := &Source{store: store, done: make(chan struct{})}
	resources := factory.Resource().V1()

	var err error
	trackerOpts := tracker.Options{
		EnableDeviceTaintRules:   opts.DeviceTaintRules,
		EnableConsumableCapacity: opts.ConsumableCapacity,
		SliceInformer:            resources.ResourceSlices(),
		KubeClient:               client,
	}
	if opts.DeviceTaintRules {
		trackerOpts.TaintInformer = resources.DeviceTaintRules()
	}
	if s.tracker, err = tracker.StartTracker(ctx, trackerOpts); err != nil {
		return nil, fmt.Errorf("start the tracker for ResourceSlices and DeviceTaintRules: %w", err)
	}
	sliceHandler, err := s.tracker.AddEventHandler(s.sliceHandler())
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
	s.synced = []cache.InformerSynced{s.tracker.HasSynced, sliceHandler.HasSynced, classHandler.HasSynced}

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
	if !cache.WaitForCacheSync(ctx.Done(), s.synced...) {
		return fmt.Errorf("waiting for ResourceSlices, DeviceTaintRules and DeviceClasses: %w",
			context.Cause(ctx))
	}
	return nil
}

// HasSynced tells whether WaitForSync would return at once.
func (s *Source) HasSynced() bool {
	for _, synced := range s.synced {
		if !synced() {
			return false
		}
	}
	return true
}

// Done is closed once the context given to New has ended and everything that it started has stopped.
func (s *Source) Done() <-chan struct{} { return s.done }

// AddListener has fn called for every later change, after the store has it, with no lock held. Calls for one
// kind of object come one at a time and in order.
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
				s.store.SetSlice(slice)
				s.tell(Event{Slice: slice})
			}
		},
		UpdateFunc: func(oldObj, newObj any) {
			if slice, ok := newObj.(*resourceapi.ResourceSlice); ok {
				s.store.SetSlice(slice)
				old, _ := oldObj.(*resourceapi.ResourceSlice)
				s.tell(Event{Slice: slice, OldSlice: old})
			}
		},
		DeleteFunc: func(obj any) {
			if slice, ok := last[*resourceapi.ResourceSlice](obj); ok {
				s.store.DeleteSlice(slice.Name)
				s.tell(Event{Slice: slice, Deleted: true})
			}
		},
	}
}

func (s *Source) classHandler() cache.ResourceEventHandler {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) {
			if class, ok := obj.(*resourceapi.DeviceClass); ok {
				s.store.SetClass(class)
				s.tell(Event{Class: class})
			}
		},
		UpdateFunc: func(_, newObj any) {
			if class, ok := newObj.(*resourceapi.DeviceClass); ok {
				s.store.SetClass(class)
				s.tell(Event{Class: class})
			}
		},
		DeleteFunc: func(obj any) {
			if class, ok := last[*resourceapi.DeviceClass](obj); ok {
				s.store.DeleteClass(class.Name)
				s.tell(Event{Class: class, Deleted: true})
			}
		},
	}
}

// last returns the last known state of a deleted object.
func last[T any](obj any) (T, bool) {
	if tombstone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		obj = tombstone.Obj
	}
	t, ok := obj.(T)
	return t, ok
}
