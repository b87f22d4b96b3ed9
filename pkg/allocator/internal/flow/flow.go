// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package flow decides whether requests find devices without taking any twice.
package flow

import (
	"slices"

	"stowage.dev/stowage/pkg/inventory/bitset"
)

// Seeker is a request that wants devices of a set.
type Seeker struct {
	Candidates bitset.Set
	Wanted     int
}

// Flow is a bipartite network: requests on one side, on the other groups of devices that are open to the same
// requests, with as much capacity as devices.
type Flow struct {
	wanted  []int
	groups  []group
	visited []bool // scratch
}

type group struct {
	open uint64 // bit i: open to request i
	free int
	load []int // by request
}

// Begin empties the flow and keeps its memory.
func (f *Flow) Begin() *Flow {
	f.wanted, f.groups = f.wanted[:0], f.groups[:0]
	return f
}

// Of makes it the flow of the requests.
func (f *Flow) Of(requests []Seeker, words int) *Flow {
	f.Begin()
	for _, o := range requests {
		f.Want(o.Wanted)
	}
	for w := range words {
		var union uint64
		for _, o := range requests {
			union |= o.Candidates[w]
		}
		for ; union != 0; union &= union - 1 {
			bit := union & -union
			var open uint64
			for i, o := range requests {
				if o.Candidates[w]&bit != 0 {
					open |= 1 << i
				}
			}
			f.Add(open)
		}
	}
	return f
}

// Want adds a request that wants so many, before groups are added.
func (f *Flow) Want(wanted int) { f.wanted = append(f.wanted, wanted) }

// Add adds one device that is open to the requests with these bits.
func (f *Flow) Add(open uint64) {
	for i := range f.groups {
		if f.groups[i].open == open {
			f.groups[i].free++
			return
		}
	}
	added := group{open: open, free: 1}
	if n := len(f.groups); n < cap(f.groups) { // the memory of an earlier one
		added.load = f.groups[:n+1][n].load[:0]
	}
	added.load = slices.Grow(added.load, len(f.wanted))[:len(f.wanted)]
	clear(added.load)
	f.groups = append(f.groups, added)
}

// Saturates tells whether every request gets what it wants.
func (f *Flow) Saturates() bool {
	visited := slices.Grow(f.visited[:0], len(f.groups))[:len(f.groups)]
	f.visited = visited
	for r, wanted := range f.wanted {
		for range wanted {
			clear(visited)
			if !f.augment(r, visited) {
				return false
			}
		}
	}
	return true
}

// augment finds one device for request r, moving other requests to other groups if need be.
func (f *Flow) augment(r int, visited []bool) bool {
	for g := range f.groups {
		group := &f.groups[g]
		if group.open&(1<<r) == 0 || visited[g] {
			continue
		}
		visited[g] = true
		if group.free > 0 {
			group.free--
			group.load[r]++
			return true
		}
		for other, load := range group.load {
			if load > 0 && other != r && f.augment(other, visited) {
				group.load[other]--
				group.load[r]++
				return true
			}
		}
	}
	return false
}
