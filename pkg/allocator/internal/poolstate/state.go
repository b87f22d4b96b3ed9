// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package poolstate says what holders leave of one pool of devices.
package poolstate

import (
	"stowage.dev/stowage/pkg/allocator/internal/counters"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
	"stowage.dev/stowage/pkg/usage"
)

// State is what holders leave of one NodePool in one state of usage. Immutable.
type State struct {
	in *usage.Pool
	// Held are the devices that have a holder; of the shareable ones only those that somebody has for itself alone.
	Held bitset.Set
	// Foreign are those of Held of which another namespace has shares, see Owner; nil if there are none.
	Foreign bitset.Set
	// Short are the devices that need more of a shared counter than is left, or are incompatible; not those that are
	// shared already, for which nothing more is taken of counters (KEP-5075). Also those that are not supported.
	Short bitset.Set
	// Incompatible are the devices whose compatibility groups do not allow them to be in use beside those that are.
	Incompatible bitset.Set
	// taken are Held and Short together.
	taken bitset.Set
	// Counters is what is left of the pool's counters; nil if it has none.
	Counters []amount.Amount
	// Groups are the states of the pool's counter sets; nil if no device has compatibility groups.
	Groups []counters.GroupState
	// room is what is left of the capacity of the shareable devices that have holders, by device; nil if none has.
	room [][]amount.Amount
}

// New returns the state of the pool.
func New(p *inventory.NodePool, in *usage.Pool) *State {
	s := &State{in: in}
	for name, device := range in.All() {
		i := p.Index(name)
		switch {
		case i < 0:
		case p.Shareable().Has(i):
			s.share(p, i, device.Holders())
		default:
			s.Held = addTo(s.Held, i, p.Len())
		}
	}
	s.taken = s.Held
	s.Short = p.Unsupported()
	if p.Consumers() != nil {
		s.countCounters(p)
	}
	if s.Short != nil {
		s.taken = s.Short.Clone()
		s.taken.Or(s.Held)
	}
	return s
}

// countCounters finds what is left of counters, and for which devices it is not enough.
func (s *State) countCounters(p *inventory.NodePool) {
	var overdrawn map[string]bool
	s.Counters, overdrawn = countersLeft(p.Pool, s.in)
	s.Groups = counters.GroupsLeft(p, s.in)
	s.Short = s.Short.Clone() // the inventory's
	for i := p.Consumers().Next(0); i >= 0; i = p.Consumers().Next(i + 1) {
		if s.IsShared(i) {
			continue
		}
		incompatible := s.Groups != nil && !counters.GroupsAdmit(s.Groups, p.Memberships(i))
		if incompatible {
			s.Incompatible = addTo(s.Incompatible, i, p.Len())
		}
		if incompatible || len(overdrawn) > 0 && (overdrawn[""] || overdrawn[p.NodeOf(i)]) || !counters.Affords(s.Counters, p.Uses(i)) {
			s.Short = addTo(s.Short, i, p.Len())
		}
	}
}

// addTo adds i to a set of n, made when needed.
func addTo(set bitset.Set, i, n int) bitset.Set {
	if set == nil {
		set = bitset.New(n)
	}
	set.Add(i)
	return set
}

// share subtracts what the holders of shareable device i have. One without a share has all of it, and does not make it a
// shared device.
func (s *State) share(p *inventory.NodePool, i int, holders []usage.Holder) {
	capacity := p.Capacity(i)
	left := append(make([]amount.Amount, 0, len(capacity.Amounts)), capacity.Amounts...)
	shared := false
	for h := range holders {
		if holders[h].ShareID == nil {
			s.Held = addTo(s.Held, i, p.Len())
			continue
		}
		shared = true
		for k, name := range capacity.Names {
			if consumed, ok := holders[h].ConsumedCapacity[name]; ok {
				left[k] = left[k].Sub(amount.Of(consumed))
			}
		}
	}
	if !shared {
		return
	}
	if s.room == nil {
		s.room = make([][]amount.Amount, p.Len())
	}
	s.room[i] = left
}

// IsShared tells whether the shareable device i has a holder of a share.
func (s *State) IsShared(i int) bool { return s.room != nil && s.room[i] != nil }

// RoomOf is what is left of the capacity of shareable device i. Read only.
func (s *State) RoomOf(p *inventory.NodePool, i int) []amount.Amount {
	if s.IsShared(i) {
		return s.room[i]
	}
	return p.Capacity(i).Amounts
}

// countersState is what is left of the counters of one pool in one state of usage, kept on the Pool.
type countersState struct {
	in        *usage.Pool
	left      []amount.Amount
	overdrawn map[string]bool
}

// countersLeft subtracts what held devices take of the pool's counters, whichever nodes they are for. Overdrawn
// tells of which nodes' counters, or under "" of the pool's, more is taken than there is of one: then nobody knows
// what else is wrong, and, as upstream does, no device that could need them is given away.
func countersLeft(p *inventory.Pool, in *usage.Pool) (left []amount.Amount, overdrawn map[string]bool) {
	if known, ok := p.Attached.Load().(*countersState); ok && known.in == in {
		return known.left, known.overdrawn
	}
	state := &countersState{in: in, left: make([]amount.Amount, len(p.Counters.All))}
	for i := range p.Counters.All {
		state.left[i] = p.Counters.All[i].Total
	}
	for name := range in.All() {
		for _, use := range p.Counters.Uses(name) {
			state.left[use.Counter] = state.left[use.Counter].Sub(use.Amount)
		}
	}
	for i, left := range state.left {
		if left.IsNegative() {
			if state.overdrawn == nil {
				state.overdrawn = make(map[string]bool)
			}
			state.overdrawn[p.Counters.All[i].Node] = true
		}
	}
	p.Attached.Store(state)
	return state.left, state.overdrawn
}

// TakenFor are the devices that holders keep from a request. With admin access it does not matter who holds
// them. Shareable ones may not have the room even so.
func (s *State) TakenFor(admin bool) bitset.Set {
	if admin {
		return s.Short
	}
	return s.taken
}

// IsOf tells whether it is the state in that usage of the pool.
func (s *State) IsOf(in *usage.Pool) bool { return s.in == in }

// HasShares tells whether any device has a holder of a share.
func (s *State) HasShares() bool { return s.room != nil }

// LacksRoom tells whether device i, which matches, is shareable and has holders that leave less than the request takes.
func (s *State) LacksRoom(match *inventory.PoolMatch, i int) bool {
	return s.IsShared(i) && !counters.Covers(s.room[i], match.Takes(i))
}

// DropCrowded takes the devices that lack room out of the set, all of whose devices match, and counts them.
func (s *State) DropCrowded(p *inventory.NodePool, match *inventory.PoolMatch, set bitset.Set) (n int) {
	if s.room == nil {
		return 0
	}
	for i := p.Shareable().Next(0); i >= 0; i = p.Shareable().Next(i + 1) {
		if set.Has(i) && s.LacksRoom(match, i) {
			set.Remove(i)
			n++
		}
	}
	return n
}

// Free counts the devices of the pool that a request could have, each alone.
func (s *State) Free(p *inventory.NodePool, match *inventory.PoolMatch, admin bool) int {
	taken := s.TakenFor(admin)
	n := match.Usable.AndNotCount(taken)
	if s.room == nil {
		return n
	}
	for i := p.Shareable().Next(0); i >= 0; i = p.Shareable().Next(i + 1) {
		if match.Usable.Has(i) && !taken.Has(i) && s.LacksRoom(match, i) {
			n--
		}
	}
	return n
}
