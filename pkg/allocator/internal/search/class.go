// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"encoding/binary"
	"slices"

	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/packing"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// classes finds out which devices of a node nothing can tell apart at a moment of the search. Two devices are in one
// class if every open alternative and every constraint sees them alike, and taking either leaves the same to others.
// It serves two shortcuts:
//
//   - If giving a device to a place leads nowhere, then no later device of its class is part of the way to the first
//     answer, at this place or a later one of the same request: exchanging the two would give an answer that comes
//     earlier.
//   - If the rest of the requests could be satisfied, or could not, in one state, the same is true in each state that
//     differs from it only in which devices of a class are gone, not in how many.
//
// Devices that share counters, or the value of an attribute that a constraint looks at, are exchanged only together:
// they form a part (part.go). Whoever can tell which GPU a partition is of, or which root a device is on, can tell
// two roots apart only by what there is on them.
type classes struct {
	*parts
	// views are by the requests that are still open: what has only mattered to others matters no more.
	views map[string]*view
	// known tells in which states the open requests can be satisfied.
	known map[string]bool
	// excluded are, by number of picks, the devices that the next pick may not be.
	excluded []bitset.Set
	// loads has what parts can give together (pack.go), by what they are like.
	loads map[string][]packing.Load

	gives    []packing.Gives // scratch
	numbers  []int           // scratch
	key      []byte          // scratch
	contents []int32         // scratch
}

// maxKnown bounds the memory of one search.
const maxKnown = 1 << 16

// likeness is the class of a device as things are. To a request that takes devices numbered at least from, a part that
// begins below is like no other.
type likeness struct {
	content, sign, own int32
	only               int32 // the part that begins below from; -1 if it does not
}

// classify makes the classes.
func (s *state) classify() {
	s.classes = &classes{
		parts: newParts(s), views: make(map[string]*view), known: make(map[string]bool),
		loads: make(map[string][]packing.Load),
	}
}

// at is the class of a device as things are, for the i-th request of the order.
func (c *classes) at(v *view, device, from int) likeness {
	n := c.of[device]
	k := likeness{content: c.content(v, n), sign: v.signs[device], own: c.status(v, device), only: -1}
	if c.list[n].devices[0] < from {
		k.only = n
	}
	return k
}

// picked notes one pick more of the device, or one less, and forgets what was found in its part.
func (c *classes) picked(device, change int) {
	if c == nil {
		return
	}
	p := &c.list[c.of[device]]
	p.view = nil
	p.picks += change
}

// alike are the devices that need not be tried, because one that nothing tells from them was.
type alike struct {
	view *view
	from int
	// excluded are what the next pick may not be, and forAll what no further one may be. Nil without classes.
	excluded, forAll bitset.Set
}

// alike returns those to begin with, for the k-th device of the alternative from the position on: those that the pick before might not
// be. The first pick of a request begins anew, and so does each one of a request whose devices have an order: the exchange of
// two might change it.
func (c *classes) alike(i int, a *compiled.Alternative, k, from int) (out alike) {
	if c == nil {
		return out
	}
	depth, ordered := len(c.picks), c.groupings.orderMatters(a)
	for len(c.excluded) <= depth {
		c.excluded = append(c.excluded, bitset.New(c.words*64))
	}
	out = alike{view: c.view(i), from: from, excluded: c.excluded[depth]}
	if !ordered {
		out.forAll = out.excluded
	}
	if k == 0 || ordered {
		clear(out.excluded)
	} else {
		copy(out.excluded, c.excluded[depth-1])
	}
	return out
}

// exclude adds the devices that are like one which was tried in vain.
func (c *classes) exclude(to *alike, device int, l *lane, taken bitset.Set) {
	if c == nil {
		return
	}
	class := c.at(to.view, device, to.from)
	for other := c.deviceOrder.next(l, taken, device+1); other >= 0; other = c.deviceOrder.next(l, taken, other+1) {
		if !to.excluded.Has(other) && c.at(to.view, other, to.from) == class {
			to.excluded.Add(other)
		}
	}
}

// view is the node in the eyes of some requests. It is nil where nobody asks for classes.
type view struct {
	open  []int   // the requests, as indexes into reqs.Requests, ascending
	lanes []int   // their alternatives
	signs []int32 // by device: what tells it from others of its part for as long as these are open; -1 if none may take it
	// initial has, by part, the content while nothing of it is picked; -1 if not known yet.
	initial []int32
	bound   []bool // by Constraint.Index: whether it applies to any of them
	admin   []int  // claims with admin access
}

// view is what the requests from the i-th of the order on see.
func (c *classes) view(i int) *view {
	open := slices.Clone(c.order[i:])
	slices.Sort(open)
	key := c.key[:0]
	for _, r := range open {
		key = binary.AppendUvarint(key, uint64(r))
	}
	c.key = key
	v := c.views[string(key)]
	if v == nil {
		v = c.newView(open)
		c.views[string(key)] = v
	}
	return v
}

func (c *classes) newView(open []int) *view {
	v := &view{open: open, signs: make([]int32, len(c.of)), initial: make([]int32, len(c.list)), bound: make([]bool, len(c.bound))}
	for i := range v.initial {
		v.initial[i] = -1
	}
	for _, r := range open {
		request := c.reqs.Requests[r]
		for _, a := range request.Alternatives {
			v.lanes = append(v.lanes, a.Lane)
			for _, constraint := range a.Constraints {
				v.bound[constraint.Index] = true
			}
			if a.Admin && !slices.Contains(v.admin, request.Claim) {
				v.admin = append(v.admin, request.Claim)
			}
		}
	}
	for device, n := range c.of {
		v.signs[device] = -1
		if n >= 0 {
			if sign, ok := c.sign(v, device); ok {
				v.signs[device] = intern(c.signs, sign)
			}
		}
	}
	return v
}

// describe describes what matters to the requests from the i-th of the order on: two states that differ in nothing else are equal.
func (c *classes) describe(i int) string {
	v := c.view(i)
	contents := c.contents[:0]
	for n := range c.list {
		if content := c.content(v, int32(n)); content != 0 {
			contents = append(contents, content)
		}
	}
	slices.Sort(contents)
	c.contents = contents
	key := c.key[:0]
	claim := -1
	for _, r := range v.open {
		key = binary.AppendUvarint(key, uint64(r))
		if next := c.reqs.Requests[r].Claim; next != claim {
			claim = next
			key = binary.AppendUvarint(key, uint64(c.used[claim]))
		}
	}
	key = append(key, '/')
	for _, content := range contents {
		key = binary.AppendUvarint(key, uint64(content))
	}
	c.key = key
	return string(key)
}

// remember notes whether the open requests can be satisfied in the state.
func (c *classes) remember(state string, possible bool) {
	if len(c.known) < maxKnown {
		c.known[state] = possible
	}
}

func intern(known map[string]int32, key []byte) int32 {
	n, ok := known[string(key)]
	if !ok {
		n = int32(len(known)) + 1
		known[string(key)] = n
	}
	return n
}
