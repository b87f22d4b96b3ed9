// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"context"
	"fmt"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/usage"
)

// Tracker tracks claims. All methods may be called from any goroutine, and none
// of them waits for anything but the mutex, except for Run, WaitForSync and
// WaitObserved.
//
// One process needs one Tracker: what two of them have in flight is not known to
// each other.
type Tracker struct {
	logger klog.Logger
	judge  Judge         // nil for none
	synced chan struct{} // closed with the first Replace

	mutex sync.Mutex
	// claims is layer 1.
	claims claims
	// inFlight is layer 2.
	inFlight map[types.UID]*inFlight
	// index is layer 3. Only refold changes it.
	index *usage.Index
	// standings are the allocations in the order in which the list and the watch
	// brought them.
	standings standings
	waiters   map[*waiter]struct{}
	// revision counts the changes of claims and of what is in flight.
	revision uint64
	events   eventQueue
	running  bool
}

// New returns a tracker that knows no claims until it runs.
func New(logger klog.Logger, options ...Option) *Tracker {
	registerMetrics()
	t := &Tracker{
		logger:    klog.LoggerWithName(logger, "tracker"),
		synced:    make(chan struct{}),
		claims:    newClaims(),
		inFlight:  map[types.UID]*inFlight{},
		index:     usage.NewIndex(),
		standings: standings{},
		waiters:   map[*waiter]struct{}{},
		events:    newEventQueue(),
	}
	for _, option := range options {
		option(t)
	}
	return t
}

// Run lists and watches ResourceClaims and calls the subscribers, until ctx
// ends. It returns when all its goroutines have ended. Call it once.
//
// While the watch is broken the tracker keeps what it knows. The Reflector then
// resumes the watch where it broke or, if the API server has forgotten that
// revision, lists again, which reaches the tracker as one Replace.
func (t *Tracker) Run(ctx context.Context, lw cache.ListerWatcher) {
	t.mutex.Lock()
	again := t.running
	t.running = true
	t.mutex.Unlock()
	if again {
		t.logger.Error(nil, "The claim tracker is running already, not running it again")
		return
	}

	var wg sync.WaitGroup
	wg.Go(func() { t.deliverEvents(ctx) })
	defer wg.Wait()

	cache.NewReflectorWithOptions(lw, &resourceapi.ResourceClaim{}, t.Store(), cache.ReflectorOptions{
		Logger: &t.logger,
		Name:   "resourceclaims",
	}).RunWithContext(klog.NewContext(ctx, t.logger))
}

// HasSynced tells whether the first list has arrived. Before that, devices seem
// to be free that are not.
func (t *Tracker) HasSynced() bool {
	select {
	case <-t.synced:
		return true
	default:
		return false
	}
}

// WaitForSync waits until HasSynced is true. It fails only if ctx ends first.
func (t *Tracker) WaitForSync(ctx context.Context) error {
	if t.HasSynced() {
		return nil
	}
	select {
	case <-t.synced:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("waiting for the first list of ResourceClaims: %w", context.Cause(ctx))
	}
}

// Snapshot is the state of the tracker at one moment.
type Snapshot struct {
	// Usage is who holds what.
	Usage usage.View
	// Revision counts the changes so far. An Event with a larger Revision tells
	// of a change that is not in this snapshot.
	Revision uint64
}

// Snapshot returns the present state. The cost grows with the number of pools whose usage has changed since the last call.
func (t *Tracker) Snapshot() Snapshot {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	return Snapshot{Usage: t.index.View(), Revision: t.revision}
}

// Get returns the newest known object of a claim, whether the watch has brought
// it or a write of ours. The error is a NotFound API error.
func (t *Tracker) Get(namespace, name string) (*resourceapi.ResourceClaim, error) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	claim := t.claims.get(types.NamespacedName{Namespace: namespace, Name: name})
	if claim == nil {
		return nil, apierrors.NewNotFound(resourceapi.Resource("resourceclaims"), name)
	}
	return claim, nil
}

// OwnedBy returns the newest known objects of the claims that a pod of the namespace controls, ordered by name. Who may make
// claims in another namespace can name any pod as their owner; those are not the pod's.
func (t *Tracker) OwnedBy(namespace string, pod types.UID) []*resourceapi.ResourceClaim {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	var owned []*resourceapi.ResourceClaim
	for uid := range t.claims.byOwner[pod] {
		if claim := t.claims.byUID[uid]; claim.Namespace == namespace {
			owned = append(owned, claim)
		}
	}
	slices.SortFunc(owned, compareNames)
	return owned
}

// refold brings the usage of one claim in line with layers 1 and 2. It must run,
// under the same lock, after every change of either. It returns the devices that
// the claim holds no longer.
func (t *Tracker) refold(claim usage.ClaimRef) []usage.DeviceID {
	var allocated, inFlight *resourceapi.AllocationResult
	if known := t.claims.byUID[claim.UID]; known != nil {
		allocated = known.Status.Allocation
	}
	if pending := t.inFlight[claim.UID]; pending != nil {
		inFlight = pending.allocation
	}
	freed := t.index.Set(claim, allocated, inFlight)
	if t.judge != nil {
		t.judge.Taken(allocated)
		t.judge.Taken(inFlight)
	}
	heldDevices.Set(float64(t.index.Len()))
	return freed
}
