// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"slices"
	"sync"
	"sync/atomic"
)

// variety has the different values that one selector has given for slices, or one matcher for pools. Most nodes of a cluster are of
// few kinds, so of tens of thousands of values few are different: those that are equal are kept once, and can be told by a small number.
type variety[T any] struct {
	known atomic.Pointer[[]*T] // copied to be changed

	mu sync.Mutex
}

// mostValues is how many different values have a number; they go from 1.
const mostValues = 255

// share returns a value that is equal to the one given, and its number. Where there are too many different ones it is the given one,
// without a number, which is 0.
func (v *variety[T]) share(value *T, equal func(a, b *T) bool) (shared *T, number uint32) {
	v.mu.Lock()
	defer v.mu.Unlock()
	var known []*T
	if p := v.known.Load(); p != nil {
		known = *p
	}
	if i := slices.IndexFunc(known, func(other *T) bool { return equal(other, value) }); i >= 0 {
		return known[i], uint32(i) + 1
	}
	if len(known) == mostValues {
		return value, 0
	}
	more := append(slices.Clone(known), value)
	v.known.Store(&more)
	return value, uint32(len(more))
}

// value has the number, which share has returned.
func (v *variety[T]) value(number uint32) *T { return (*v.known.Load())[number-1] }

// notes keeps, on an immutable object, a number that is not 0 for each slot. They take half of what pointers take, which counts
// where there are tens of thousands of objects and a hundred slots. A note that is put while another one is may be lost, which costs one
// more computation and nothing else.
type notes struct{ pages slots[page] }

type page [16]atomic.Uint32

func (n *notes) get(slot int) uint32 {
	p := n.pages.get(slot / len(page{}))
	if p == nil {
		return 0
	}
	return p[slot%len(p)].Load()
}

func (n *notes) put(slot int, note uint32) {
	p := n.pages.get(slot / len(page{}))
	if p == nil {
		p = new(page)
		n.pages.put(slot/len(p), p)
	}
	p[slot%len(p)].Store(note)
}

// shareWith makes n have whatever o has. What is put into one of them later the other may have as well: they are about objects that are
// judged alike. Nobody else may know n yet.
func (n *notes) shareWith(o *notes) { n.pages.copyFrom(&o.pages) }
