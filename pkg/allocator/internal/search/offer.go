// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"slices"
	"sort"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/evaluation"
	"stowage.dev/stowage/pkg/allocator/internal/poolstate"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// offer is what a node has for the requests before anything is picked. Devices of all pools of the node are numbered, each
// pool starting at a multiple of 64.
type offer struct {
	in       Input
	reqs     *compiled.Requests
	pools    []*inventory.NodePool
	states   []*poolstate.State // what holders leave, by pool
	problems []*inventory.PoolProblem
	// starts has the number of the first device of each pool.
	starts []int
	words  int // length of all bitsets
	arena  []uint64

	lanes   []lane                 // by Alternative.Lane
	matches []*inventory.PoolMatch // by lane and pool

	ending
}

// ending is what ended a search early, if anything did.
type ending struct {
	// Err is that the time was over.
	Err error
	// SelectorError is the device that has to be judged, and cannot be.
	SelectorError *evaluation.SelectorError
	// TooMany tells that a claim's allocation has no room for all devices.
	TooMany bool
	// stuck tells that the attempt would have to take a pick back, or more steps, and may not.
	stuck bool
}

func (e *ending) stopped() bool { return e.Err != nil || e.SelectorError != nil || e.stuck }

// open begins with the node's devices, in the memory of an earlier offer.
func (o *offer) open(in Input, devices *inventory.NodeDevices, stateOf func(*inventory.NodePool) *poolstate.State) {
	*o = offer{
		in: in, reqs: in.Requests, pools: devices.Pools, problems: devices.Problems,
		states: o.states[:0], starts: o.starts[:0], arena: o.arena[:0], lanes: o.lanes[:0], matches: o.matches[:0],
	}
	for _, p := range o.pools {
		o.starts = append(o.starts, o.words*64)
		o.words += bitset.Words(p.Len())
		o.states = append(o.states, stateOf(p))
	}
}

// close forgets everything but the memory.
func (o *offer) close() {
	clear(o.states)
	clear(o.matches)
	o.in, o.reqs, o.pools, o.problems, o.ending = Input{}, nil, nil, nil, ending{}
}

// newSet returns an empty set from the search's own memory.
func (o *offer) newSet() bitset.Set {
	n := len(o.arena)
	if n+o.words > cap(o.arena) || cap(o.arena) == 0 {
		// Sets made before keep the old memory.
		o.arena = make([]uint64, 0, max(256, 2*cap(o.arena), 8*o.words))
		n = 0
	}
	o.arena = o.arena[:n+o.words]
	set := o.arena[n : n+o.words : n+o.words]
	clear(set)
	return bitset.Set(set)
}

// place puts devices of a pool into the set, which is made when there are some.
func (o *offer) place(set, devices bitset.Set, pool int) bitset.Set {
	if devices != nil {
		if set == nil {
			set = o.newSet()
		}
		copy(set[o.starts[pool]/64:], devices)
	}
	return set
}

// poolOf is the index of the pool that the device is in.
func (o *offer) poolOf(device int) int {
	if len(o.starts) == 1 {
		return 0
	}
	return sort.SearchInts(o.starts, device+1) - 1
}

// Locate returns the pool that the device is in, and its index there.
func (o *offer) Locate(device int) (pool *inventory.NodePool, i int) {
	p := o.poolOf(device)
	return o.pools[p], device - o.starts[p]
}

// takes is what the alternative takes of the capacity of the shareable device, which is one of its candidates.
func (o *offer) takes(a *compiled.Alternative, device int) []amount.Amount {
	p := o.poolOf(device)
	return o.matches[a.Lane*len(o.pools)+p].Takes(device - o.starts[p])
}

// usesOf is what the device takes of the counters of its pool.
func (o *offer) usesOf(device int) []inventory.Use {
	pool, i := o.Locate(device)
	return pool.Uses(i)
}

// membershipsOf are the device's compatibility groups.
func (o *offer) membershipsOf(device int) []inventory.Membership {
	pool, i := o.Locate(device)
	return pool.Memberships(i)
}

// under are the devices that the alternatives under the constraint may take.
func (o *offer) under(c *compiled.Constraint) bitset.Set {
	set := o.newSet()
	for _, a := range o.reqs.Lanes {
		if slices.Contains(a.Constraints, c) {
			set.Or(o.lanes[a.Lane].candidates)
			set.Or(o.lanes[a.Lane].errors)
		}
	}
	return set
}

// fail ends the search because the alternative needs to judge a device on which a selector fails.
func (o *offer) fail(a *compiled.Alternative, device int) bool {
	pool, i := o.Locate(device)
	o.SelectorError = o.in.SelectorError(o.reqs, a, pool, i)
	return false
}

// lane is an alternative on this node.
type lane struct {
	// candidates may be picked if nothing picked before forbids it. For a request for all devices these
	// are the ones to take.
	candidates bitset.Set
	// errors are the devices that cannot be judged. Nil if none.
	errors bitset.Set
	wanted int
	// hopeless lanes cannot be satisfied whatever else is picked.
	hopeless bool

	// What a device takes at least, see leastUsesOf and leastTakesOf, once it is known.
	leastUses, leastTakes           []named
	knowsUses, knowsTakes, mayShare bool
}

// prepare finds the devices for one alternative. It returns false if the node is out of the question.
func (o *offer) prepare(a *compiled.Alternative) bool {
	if a.All && len(o.problems) > 0 {
		return false // how many all are is not known, nor what is among them
	}
	l := lane{candidates: o.newSet(), wanted: a.Count}
	blocked := false
	for i, p := range o.pools {
		match := o.in.Match(a, p)
		if o.Err = o.in.Interrupted; o.Err != nil {
			return false
		}
		o.matches = append(o.matches, match)
		if a.All && match.Errors != nil {
			return o.fail(a, o.starts[i]+match.Errors.Next(0))
		}
		l.errors = o.place(l.errors, match.Errors, i)
		state, base := o.states[i], o.starts[i]/64
		own := l.candidates[base : base+bitset.Words(p.Len())]
		if a.All {
			copy(own, match.Match)
			blocked = blocked || state.Free(p, match, a.Admin) < match.Match.Count()
			continue
		}
		copy(own, match.Usable)
		taken := state.TakenFor(a.Admin)
		own.AndNot(taken)
		if l.errors != nil && !a.Admin {
			l.errors[base:].AndNot(state.Held)
		}
		state.DropCrowded(p, match, own)
	}
	n := l.candidates.Count()
	if a.All {
		l.wanted = n
		l.hopeless = blocked || n == 0
	} else {
		l.hopeless = n < a.Count && l.errors.Empty()
	}
	if n := len(o.lanes); n < cap(o.lanes) { // the memory of an earlier search
		former := &o.lanes[:n+1][n]
		l.leastUses, l.leastTakes = former.leastUses[:0], former.leastTakes[:0]
	}
	o.lanes = append(o.lanes, l)
	return true
}

// enough tells whether each request has an alternative that the node has devices for, and each claim's
// allocation has room for them.
func (o *offer) enough() bool {
	for _, c := range o.reqs.Claims {
		least := 0
		for _, r := range c.Requests {
			alive := false
			smallest := resourceapi.AllocationResultsMaxSize + 1
			for _, a := range r.Alternatives {
				alive = alive || !o.lanes[a.Lane].hopeless
				smallest = min(smallest, o.lanes[a.Lane].wanted)
			}
			if !alive {
				return false
			}
			least += smallest
		}
		if least > resourceapi.AllocationResultsMaxSize {
			o.TooMany = true
			return false
		}
	}
	return true
}
