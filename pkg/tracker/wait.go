// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"context"
	"fmt"
)

// waiter waits until list and watch have reached a resource version.
type waiter struct {
	version string
	reached chan struct{} // closed when they have
}

// WaitObserved waits until the list and the watch have brought everything up to
// a resource version. It does not matter how: by the event of that version, by a
// later one or a bookmark, or by a list. So who waits for the version that a write
// was answered with need not care whether the watch was faster, whether the write
// changed nothing, or what became of the object afterwards.
//
// It fails if ctx ends first, with the cause, or with ErrClaimVersion if the
// version cannot be compared.
func (t *Tracker) WaitObserved(ctx context.Context, version string) error {
	if !wellFormed(version) {
		return fmt.Errorf("wait for resourceVersion %q: %w", version, ErrClaimVersion)
	}
	w := &waiter{version: version, reached: make(chan struct{})}
	t.mutex.Lock()
	if t.claims.hasObserved(version) {
		t.mutex.Unlock()
		return nil
	}
	t.waiters[w] = struct{}{}
	t.mutex.Unlock()

	select {
	case <-w.reached:
		return nil
	case <-ctx.Done():
	}
	t.mutex.Lock()
	defer t.mutex.Unlock()
	delete(t.waiters, w)
	return fmt.Errorf("the watch of ResourceClaims is at resourceVersion %q, not yet at %s: %w", t.claims.observed,
		version, context.Cause(ctx))
}

// tellWaiters lets those go on whose version has been reached. It must run after
// every change of the position.
func (t *Tracker) tellWaiters() {
	for w := range t.waiters {
		if t.claims.hasObserved(w.version) {
			close(w.reached)
			delete(t.waiters, w)
		}
	}
}
