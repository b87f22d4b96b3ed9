// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"stowage.dev/stowage/pkg/snapshot"
)

// collect is how long changes are collected before they make a version. An allocation comes as several writes.
const collect = 150 * time.Millisecond

// follows is what a map shows of a cluster.
var follows = snapshot.Followed{PendingPods: true}

// Status is how far the map can be trusted.
type Status struct {
	// Ready: all objects that were there at the start are told.
	Ready bool `json:"ready"`
	// Missing are kinds that the user may not read.
	Missing []snapshot.Missing `json:"missing,omitempty"`
	// Unreachable is why the API server does not tell changes, and since when.
	Unreachable string       `json:"unreachable,omitempty"`
	Since       *metav1.Time `json:"since,omitempty"`
}

// Feed keeps a history up to date with a cluster. It is a [snapshot.Follower].
type Feed struct {
	*Cluster
	history *History
	now     func() time.Time
	touched chan struct{}

	mu      sync.Mutex
	status  Status
	errors  map[string]error
	changed chan struct{}
}

// NewFeed returns one for a history.
func NewFeed(history *History) *Feed {
	return &Feed{
		Cluster: NewCluster(), history: history, now: time.Now, touched: make(chan struct{}, 1),
		errors: map[string]error{}, changed: make(chan struct{}),
	}
}

// Follow follows a cluster until ctx ends.
func (f *Feed) Follow(ctx context.Context, client kubernetes.Interface) error {
	ctx, cancel := context.WithCancelCause(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel(nil)
	return snapshot.Follow(ctx, client, follows, f, func(missing []snapshot.Missing) {
		f.setStatus(func(s *Status) { s.Missing = missing })
		running.Go(func() {
			if err := f.run(ctx); err != nil {
				cancel(err)
			}
		})
	})
}

// MayFollow is the error with which Follow would end at once.
func MayFollow(ctx context.Context, client kubernetes.Interface) error {
	return snapshot.MayFollow(ctx, client, follows)
}

// Fill makes the one version of a snapshot.
func (f *Feed) Fill(s *snapshot.Snapshot) error {
	for object := range s.All() {
		f.Cluster.Put(object.(metav1.Object))
	}
	values, err := f.Changes()
	if err != nil {
		return err
	}
	f.history.Commit(s.Taken.Time, values)
	f.setStatus(func(status *Status) { status.Ready, status.Missing = true, s.Missing })
	return nil
}

// run makes a version whenever something has changed.
func (f *Feed) run(ctx context.Context) error {
	for {
		values, err := f.Changes()
		if err != nil {
			return err
		}
		f.history.Commit(f.now(), values)
		f.setStatus(func(s *Status) { s.Ready = true })
		select {
		case <-ctx.Done():
			return nil
		case <-f.touched:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(collect):
		}
	}
}

// Put is part of [snapshot.Follower].
func (f *Feed) Put(object metav1.Object) {
	f.Cluster.Put(object)
	f.touch()
}

// Delete is part of [snapshot.Follower].
func (f *Feed) Delete(object metav1.Object) {
	f.Cluster.Delete(object)
	f.touch()
}

func (f *Feed) touch() {
	select {
	case f.touched <- struct{}{}:
	default:
	}
}

// Reachable is part of [snapshot.Follower].
func (f *Feed) Reachable(resource string, err error) {
	f.mu.Lock()
	if err == nil {
		delete(f.errors, resource)
	} else {
		f.errors[resource] = err
	}
	text := ""
	for _, resource := range slices.Sorted(maps.Keys(f.errors)) {
		text = fmt.Sprintf("%s: %v", resource, f.errors[resource])
		break // the others say the same
	}
	f.mu.Unlock()
	f.setStatus(func(s *Status) {
		switch {
		case text == "":
			s.Since = nil
		case s.Unreachable == "":
			now := metav1.NewTime(f.now())
			s.Since = &now
		}
		s.Unreachable = text
	})
}

// Status is the present one, with what is closed when it changes.
func (f *Feed) Status() (Status, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.status, f.changed
}

func (f *Feed) setStatus(change func(*Status)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.status
	change(&f.status)
	if before.equal(&f.status) {
		return
	}
	close(f.changed)
	f.changed = make(chan struct{})
}

func (s *Status) equal(other *Status) bool {
	return s.Ready == other.Ready && s.Unreachable == other.Unreachable && slices.Equal(s.Missing, other.Missing)
}
