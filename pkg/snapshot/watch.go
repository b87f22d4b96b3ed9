// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// pause is how long changes are collected before they are told.
const pause = 500 * time.Millisecond

// Watch calls fn with the devices and claims of a cluster, and again whenever they have changed, until ctx ends or fn fails. The
// snapshots have slices, claims and taint rules alone. It needs the right to list and watch these.
func Watch(ctx context.Context, client kubernetes.Interface, fn func(*Snapshot) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel(nil)
	w := &watched{
		slices: map[string]*resourceapi.ResourceSlice{}, claims: map[string]*resourceapi.ResourceClaim{},
		rules: map[string]*resourceapi.DeviceTaintRule{}, changed: make(chan struct{}, 1),
	}
	return Follow(ctx, client, Followed{}, w, func([]Missing) {
		running.Go(func() {
			if err := w.tell(ctx, fn); err != nil {
				cancel(err)
			}
		})
	})
}

// watched are the objects of Watch by name.
type watched struct {
	mu      sync.Mutex
	slices  map[string]*resourceapi.ResourceSlice
	claims  map[string]*resourceapi.ResourceClaim
	rules   map[string]*resourceapi.DeviceTaintRule
	changed chan struct{}
}

// tell calls fn until ctx ends or fn fails.
func (w *watched) tell(ctx context.Context, fn func(*Snapshot) error) error {
	for {
		if err := fn(w.snapshot()); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-w.changed:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
	}
}

func (w *watched) snapshot() *Snapshot {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := New(Objects{
		ResourceSlices: slices.Collect(maps.Values(w.slices)), ResourceClaims: slices.Collect(maps.Values(w.claims)),
		DeviceTaintRules: slices.Collect(maps.Values(w.rules)),
	})
	s.Taken = metav1.Now()
	return s
}

// Put is part of Follower.
func (w *watched) Put(object metav1.Object) {
	w.change(func() {
		switch object := object.(type) {
		case *resourceapi.ResourceSlice:
			w.slices[Reference(object)] = object
		case *resourceapi.ResourceClaim:
			w.claims[Reference(object)] = object
		case *resourceapi.DeviceTaintRule:
			w.rules[Reference(object)] = object
		}
	})
}

// Delete is part of Follower.
func (w *watched) Delete(object metav1.Object) {
	w.change(func() {
		switch object.(type) {
		case *resourceapi.ResourceSlice:
			delete(w.slices, Reference(object))
		case *resourceapi.ResourceClaim:
			delete(w.claims, Reference(object))
		case *resourceapi.DeviceTaintRule:
			delete(w.rules, Reference(object))
		}
	})
}

// Reachable is part of Follower.
func (*watched) Reachable(string, error) {}

func (w *watched) change(change func()) {
	w.mu.Lock()
	change()
	w.mu.Unlock()
	select {
	case w.changed <- struct{}{}:
	default:
	}
}
