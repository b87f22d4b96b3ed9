// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"context"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/usage"
)

// EventKind says what an Event tells of.
type EventKind string

const (
	// ClaimAdded: a claim is known now. Old is nil.
	ClaimAdded EventKind = "ClaimAdded"
	// ClaimUpdated: a newer object of the same claim is known.
	ClaimUpdated EventKind = "ClaimUpdated"
	// ClaimDeleted: the claim is gone. New is nil.
	ClaimDeleted EventKind = "ClaimDeleted"
	// AllocationReleased: an allocation has left layer 2, because the last pod
	// with an interest in it has gone or because it is written. Old and New are
	// nil.
	AllocationReleased EventKind = "AllocationReleased"
	// AllocationMoved: an unborn claim, which Claim names, has given its allocation
	// in flight to the claim that was created in its place. Its devices are held as
	// before. Old, New and Freed are nil.
	AllocationMoved EventKind = "AllocationMoved"
)

// Event tells of one change of the tracker's state.
type Event struct {
	Kind  EventKind
	Claim usage.ClaimRef
	// Old and New are the objects before and after a change of layer 1.
	Old, New *resourceapi.ResourceClaim
	// Freed are the devices that the claim held before and does not hold now.
	// They need not be free: others may hold them still.
	Freed []usage.DeviceID
	// Revision is the tracker's revision with this change. The change is in
	// every Snapshot with that revision or a larger one.
	Revision uint64
}

// eventQueue holds events between a change and its delivery. The tracker's mutex
// guards it.
type eventQueue struct {
	subscribers []func(Event)
	pending     []Event
	closed      bool
	wake        chan struct{} // one token while there may be pending events
}

func newEventQueue() eventQueue {
	return eventQueue{wake: make(chan struct{}, 1)}
}

// Subscribe makes the tracker call fn for every change, in order, one at a time,
// from a goroutine of Run, without a lock held. Events of changes after Subscribe
// has returned are not missed: who subscribes first and then takes a Snapshot
// sees every change either in the snapshot or as an event.
//
// fn should not take long: events wait in memory meanwhile.
func (t *Tracker) Subscribe(fn func(Event)) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.events.subscribers = append(t.events.subscribers, fn)
}

// changed counts a change of layer 1 or 2 and queues its event.
func (t *Tracker) changed(event Event) {
	t.revision++
	if len(t.events.subscribers) == 0 || t.events.closed {
		return
	}
	event.Revision = t.revision
	t.events.pending = append(t.events.pending, event)
	select {
	case t.events.wake <- struct{}{}:
	default: // there is a token already
	}
}

// deliverEvents calls the subscribers until ctx ends.
func (t *Tracker) deliverEvents(ctx context.Context) {
	defer t.closeEvents()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.events.wake:
		}
		events, subscribers := t.takeEvents()
		for _, event := range events {
			for _, fn := range subscribers {
				if ctx.Err() != nil {
					return
				}
				fn(event)
			}
		}
	}
}

func (t *Tracker) takeEvents() ([]Event, []func(Event)) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	events := t.events.pending
	t.events.pending = nil
	return events, t.events.subscribers
}

// closeEvents drops what is pending: nobody will take it any more.
func (t *Tracker) closeEvents() {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	t.events.closed = true
	t.events.pending = nil
}
