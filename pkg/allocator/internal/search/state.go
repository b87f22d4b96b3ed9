// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"slices"

	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/evaluation"
	"stowage.dev/stowage/pkg/allocator/internal/poolstate"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// Pick is one device given to one alternative.
type Pick struct {
	Lane   int
	Device int
}

// binding is the state of one constraint: the values that the picks so far leave it with, pick by pick. For
// matchAttribute these are the values that all devices up to then have in common, of which there is at least one; for
// distinctAttribute the values of that device.
type binding struct {
	values []inventory.AttributeValue
	ends   []int // by pick: where its values end
}

// reset forgets all picks.
func (b *binding) reset() { b.values, b.ends = b.values[:0], b.ends[:0] }

// common are the values that all devices under a matchAttribute have.
func (b *binding) common() []inventory.AttributeValue { return b.values[b.start():] }

// start is where the values of the last pick begin.
func (b *binding) start() int {
	if n := len(b.ends); n > 1 {
		return b.ends[n-2]
	}
	return 0
}

// state is where a search stands: what is to be satisfied, and what is picked for that.
type state struct {
	offer
	ledger      ledger
	groupings   groupings
	deviceOrder deviceOrder

	// order has the requests to satisfy, as indexes into reqs.Requests.
	order []int
	// taken are the devices picked so far, without the shareable ones; takenBy those by claim, kept only if there
	// is admin access, which may pick a device again that another claim of the pod has.
	taken   bitset.Set
	takenBy []bitset.Set
	bound   []binding // by Constraint.Index
	solution

	classes *classes // nil but in the thorough attempt
}

// solution is what is picked.
type solution struct {
	picks  []Pick
	used   []int // devices picked, by claim
	chosen []int // position of the alternative, by request
}

// set makes it a copy of the other one, in its own memory.
func (s *solution) set(o *solution) {
	s.picks, s.used, s.chosen = append(s.picks[:0], o.picks...), append(s.used[:0], o.used...), append(s.chosen[:0], o.chosen...)
}

// open begins with nothing picked and all requests to satisfy.
func (s *state) open(in Input, devices *inventory.NodeDevices, stateOf func(*inventory.NodePool) *poolstate.State) {
	s.offer.open(in, devices, stateOf)
	s.ledger.open()
	s.groupings.open()
	s.deviceOrder.ranked = false
	s.order, s.takenBy, s.bound, s.picks, s.used, s.chosen = s.order[:0], s.takenBy[:0], s.bound[:0], s.picks[:0], s.used[:0], s.chosen[:0]
	s.taken = s.newSet()
	for _, c := range s.reqs.Claims {
		s.used = append(s.used, 0)
		if s.reqs.Admin {
			s.takenBy = append(s.takenBy, s.newSet())
		}
		for _, constraint := range c.Constraints {
			if n := constraint.Index; n < cap(s.bound) {
				s.bound = s.bound[:n+1]
				s.bound[n].reset()
			} else {
				s.bound = append(s.bound, binding{})
			}
		}
	}
	for i := range s.reqs.Requests {
		s.chosen = append(s.chosen, 0)
		s.order = append(s.order, i)
	}
}

// close forgets everything but the memory.
func (s *state) close() {
	s.groupings.close()
	s.ledger.close()
	s.offer.close()
	s.classes = nil
}

// begin takes all picks back and sets which requests are to be satisfied.
func (s *state) begin(order []int) {
	s.order = order
	s.ledger.reset()
	clear(s.taken)
	for i := range s.takenBy {
		clear(s.takenBy[i])
	}
	for i := range s.bound {
		s.bound[i].reset()
	}
	for _, pick := range s.picks {
		s.classes.picked(pick.Device, -1)
	}
	s.picks = s.picks[:0]
	clear(s.used)
}

// wantedBy is how many devices the i-th request of the order got.
func (s *state) wantedBy(i int) int {
	if i < 0 {
		return 0
	}
	r := s.reqs.Requests[s.order[i]]
	return s.lanes[r.Alternatives[s.chosen[r.Index]].Lane].wanted
}

// takenFor are the devices that the alternative cannot have because of earlier picks: those of the whole pod,
// or with admin access those of the claim.
func (s *state) takenFor(a *compiled.Alternative) bitset.Set {
	if a.Admin {
		return s.takenBy[a.Request.Claim]
	}
	return s.taken
}

// pick gives the device to the alternative unless a constraint forbids it or too little is left of what it shares.
func (s *state) pick(a *compiled.Alternative, device int) bool {
	if !s.ledger.charge(a, device) {
		return false
	}
	for i, c := range a.Constraints {
		if !s.bind(c, a, device) {
			for _, c := range a.Constraints[:i] {
				s.unbind(c)
			}
			s.ledger.refund(a, device)
			return false
		}
	}
	if !s.ledger.shareable.Has(device) {
		s.taken.Add(device)
		if len(s.takenBy) > 0 {
			s.takenBy[a.Request.Claim].Add(device)
		}
	}
	s.used[a.Request.Claim]++
	s.picks = append(s.picks, Pick{Lane: a.Lane, Device: device})
	s.classes.picked(device, 1)
	return true
}

// unpick takes back the last pick, which was for the alternative.
func (s *state) unpick(a *compiled.Alternative) {
	device := s.picks[len(s.picks)-1].Device
	s.picks = s.picks[:len(s.picks)-1]
	s.classes.picked(device, -1)
	s.used[a.Request.Claim]--
	s.ledger.refund(a, device)
	stillTaken := false
	if len(s.takenBy) > 0 {
		s.takenBy[a.Request.Claim].Remove(device)
		for _, by := range s.takenBy {
			stillTaken = stillTaken || by.Has(device)
		}
	}
	if !stillTaken {
		s.taken.Remove(device)
	}
	for _, c := range a.Constraints {
		s.unbind(c)
	}
}

// bind adds the device to those under the constraint, if that is permitted. A device for which the attribute cannot be
// derived ends the search, as one on which a selector fails does.
func (s *state) bind(c *compiled.Constraint, a *compiled.Alternative, device int) bool {
	p := s.poolOf(device)
	column := s.groupings.column(c, a.Derivation(c), p)
	if column.Errors().Has(device - s.starts[p]) {
		s.SelectorError = evaluation.DerivationError(s.reqs, a, c, s.pools[p], device-s.starts[p], column)
		return false
	}
	values := column.Values(device - s.starts[p])
	b := &s.bound[c.Index]
	switch {
	case len(values) == 0:
		return false
	case len(b.ends) == 0:
		b.values = append(b.values, values...)
	case values[0].Kind == inventory.UnknownKind:
		return false // may only come first
	case c.Distinct:
		if slices.ContainsFunc(values, func(value inventory.AttributeValue) bool { return slices.Contains(b.values, value) }) {
			return false
		}
		b.values = append(b.values, values...)
	default:
		common, n := b.common(), len(b.values)
		for _, value := range values {
			if slices.Contains(common, value) {
				b.values = append(b.values, value)
			}
		}
		if len(b.values) == n {
			return false
		}
	}
	b.ends = append(b.ends, len(b.values))
	return true
}

// unbind takes back the last device under the constraint.
func (s *state) unbind(c *compiled.Constraint) {
	b := &s.bound[c.Index]
	b.values, b.ends = b.values[:b.start()], b.ends[:len(b.ends)-1]
}
