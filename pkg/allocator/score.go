// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"math"
	"slices"

	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/poolstate"
	"stowage.dev/stowage/pkg/inventory"
)

// Scoring says which nodes are preferred among those that satisfy the claims.
type Scoring int

const (
	// NoScoring prefers nodes that offer earlier alternatives only.
	NoScoring Scoring = iota
	// MostAllocated prefers, after that, nodes of whose devices more are held: it packs.
	MostAllocated
	// LeastAllocated prefers nodes of whose devices fewer are held: it spreads.
	LeastAllocated
)

const (
	// PreferenceStep is what one step in the order of alternatives counts for in a [Result]'s score, unless that is for
	// nothing else (NoScoring). Occupancy, in thousandths, counts for less than a tenth of that.
	PreferenceStep = 10_000

	wholeDevice = 1000
)

// value is what a node is worth to a pod: by the order of alternatives, by how large the devices are that it would get, and by how
// many of the node's devices are held.
type value struct {
	preference int64
	size       size
	occupancy  occupancy
}

// add adds what a chosen alternative counts for.
func (v *value) add(seen *glance, in *Input, a *compiled.Alternative) {
	v.preference += a.Preference()
	if in.Scoring == NoScoring || a.Admin {
		return
	}
	v.occupancy.add(seen, in, a)
	if in.Policy == SmallestFit {
		v.size.add(seen, in, a)
	}
}

// result is the answer for a node that fits.
func (v *value) result(in *Input) Result {
	score := v.preference
	switch in.Scoring {
	case MostAllocated:
		score = v.preference*PreferenceStep + v.occupancy.permille()
	case LeastAllocated:
		score = v.preference*PreferenceStep + wholeDevice - 1 - v.occupancy.permille()
	case NoScoring:
	}
	return Result{Score: score, Size: v.size.total()}
}

// occupancy is how much of the devices of a node that match a pod's requests is held, in thousandths of a device.
type occupancy struct{ held, total int }

func (o occupancy) permille() int64 {
	if o.total <= 0 {
		return 0
	}
	return int64(min(wholeDevice-1, o.held*(wholeDevice-1)/o.total))
}

// add counts the devices that the alternative could have if nobody held any, and what the pod is going to hold of them.
// What is known of the node's pools answers that without a look at their devices, unless they are shared.
func (o *occupancy) add(seen *glance, in *Input, a *compiled.Alternative) {
	wanted := a.Count
	for p, t := range seen.pools(in) {
		match := in.evaluator.Match(a, p)
		usable := match.Usable.AndNotCount(p.Unsupported())
		if usable == 0 {
			continue
		}
		o.total += usable * wholeDevice
		o.held += (usable - t.count(in, p, a).free) * wholeDevice
		if p.Shareable() != nil && match.Usable.Intersects(p.Shareable()) {
			o.held += shared(t.state, p, match)
			wanted = 0 // a share takes part of a device only
		}
		if a.All {
			wanted += usable
		}
	}
	o.held += wanted * wholeDevice
}

// shared is what holders have of the devices that match and have room for another share, in thousandths of a device.
// The capacity of which the largest part is taken counts.
func shared(s *poolstate.State, p *inventory.NodePool, match *inventory.PoolMatch) int {
	if !s.HasShares() {
		return 0
	}
	gone := s.TakenFor(false)
	sum := 0
	for i := p.Shareable().Next(0); i >= 0; i = p.Shareable().Next(i + 1) {
		if !match.Usable.Has(i) || gone.Has(i) || !s.IsShared(i) || s.LacksRoom(match, i) {
			continue
		}
		taken := 0.0
		for k, capacity := range p.Capacity(i).Amounts {
			if total := capacity.Float(); total > 0 {
				taken = max(taken, 1-s.RoomOf(p, i)[k].Float()/total)
			}
		}
		sum += int(math.Round(min(1, taken) * wholeDevice))
	}
	return sum
}

// size is how large the devices are that a pod's requests would take of a node. SmallestFit chooses among the devices of a node; where
// each node has one kind of them, it takes this to choose among nodes.
//
// It is found from what is free, not from what was chosen, so that it costs next to nothing and is the same before the choice.
type size struct {
	sum     int64
	unknown bool
}

// add counts the devices that the alternative would take, the smallest that are free for it. What it takes of a shared device is
// the same everywhere, so it is the device's own size that matters.
func (s *size) add(seen *glance, in *Input, a *compiled.Alternative) {
	least, most := 0, 0 // among pools with enough devices, and among those without
	for p, t := range seen.pools(in) {
		free := t.count(in, p, a).free
		if free == 0 {
			continue
		}
		each, same := p.SameSize()
		if !same {
			each = nthSmallest(t.state, in, p, a, min(free, max(1, a.Count)))
		}
		switch {
		case each == 0:
			s.unknown = true
		case free < a.Count:
			most = max(most, each)
		case least == 0 || each < least:
			least = each
		}
	}
	if least == 0 {
		least = most
	}
	s.sum += int64(least)
}

// total is 0 if the size of some device is not known.
func (s *size) total() int64 {
	if s.unknown {
		return 0
	}
	return s.sum
}

// nthSmallest is the size of the n-th of the free devices, the smallest first. There are at least n.
func nthSmallest(s *poolstate.State, in *Input, p *inventory.NodePool, a *compiled.Alternative, n int) int {
	match, taken := in.evaluator.Match(a, p), s.TakenFor(a.Admin)
	var buffer [64]int // as many as most nodes have
	sizes := buffer[:0]
	for i := match.Usable.Next(0); i >= 0; i = match.Usable.Next(i + 1) {
		if !taken.Has(i) && !(p.Shareable().Has(i) && s.LacksRoom(match, i)) {
			sizes = append(sizes, p.Size(i))
		}
	}
	slices.Sort(sizes)
	return sizes[n-1]
}
