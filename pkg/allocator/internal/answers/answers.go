// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package answers keeps what searches for one pod found on nodes that look alike to it: one searches, the others have the same
// answer. That is for searches that take long; what is found at once is found at once on each node.
package answers

import (
	"context"
	"crypto/sha256"
	"sync"
)

// Fingerprint stands for all of a node that a search looks at. Two nodes with the same one have the same answer: it is
// a cryptographic hash.
type Fingerprint [sha256.Size]byte

// Table has the answers for one pod. The zero value is empty.
type Table struct {
	mu    sync.Mutex
	known map[Fingerprint]*Answer
}

// maxAnswers bounds the memory for one pod. Nodes beyond are searched each for itself.
const maxAnswers = 4096

// Answer is what a search found, once it is settled.
type Answer struct {
	// Fits tells whether the node fits, and Chosen, by request, which alternative is chosen if it does.
	Fits   bool
	Chosen []int
	// Err is why the search ended early; true only for the attempt whose time was over.
	Err error

	settled chan struct{}
	// private answers are true for one node only: they name a device, or were not found for a reason of their own.
	private bool
	// attempt is the one that searches; it is comparable.
	attempt any
}

// Take returns the answer for nodes with this look, nil if there is no room for it, and whether the caller has to find and
// settle it.
func (t *Table) Take(print Fingerprint, attempt any) (a *Answer, mine bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if a := t.known[print]; a != nil {
		return a, false
	}
	if len(t.known) >= maxAnswers {
		return nil, false
	}
	if t.known == nil {
		t.known = make(map[Fingerprint]*Answer)
	}
	a = &Answer{settled: make(chan struct{}), private: true, attempt: attempt}
	t.known[print] = a
	return a, true
}

// Len is how many answers there are, settled or not.
func (t *Table) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.known)
}

// Share says what was found. Without it the answer is of no use to others.
func (a *Answer) Share(fits bool, chosen []int, err error) {
	a.private, a.Fits, a.Chosen, a.Err = false, fits, chosen, err
}

// Settle lets those go on that wait. Nothing may be shared after it.
func (a *Answer) Settle() { close(a.settled) }

// Await waits for the answer, and tells whether the attempt may use it for another node with the same look: it is settled, and is neither
// private nor the error of another attempt. An attempt waits for itself only: who judges the node beside it may have less time.
func (a *Answer) Await(ctx context.Context, attempt any) bool {
	if a.attempt == attempt {
		select {
		case <-a.settled:
		case <-ctx.Done():
		}
	}
	select {
	case <-a.settled:
		return ctx.Err() == nil && !a.private && (a.Err == nil || a.attempt == attempt)
	default:
		return false
	}
}
