package allocator

import (
	"slices"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// pick is one device given to one alternative.
type pick struct {
	lane   int
	device int
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

// takenFor are the devices that the alternative cannot have because of earlier picks: those of the whole pod,
// or with admin access those of the claim.
func (s *search) takenFor(a *alternative) bitset.Set {
	if a.admin {
		return s.takenBy[a.request.claim]
	}
	return s.taken
}

// pick gives the device to the alternative unless a constraint forbids it or too little is left of what it shares.
func (s *search) pick(a *alternative, device int) bool {
	if !s.ledger.charge(a, device) {
		return false
	}
	for i, c := range a.constraints {
		if !s.bind(c, a, device) {
			for _, c := range a.constraints[:i] {
				s.unbind(c)
			}
			s.ledger.refund(a, device)
			return false
		}
	}
	if !s.ledger.shareable.Has(device) {
		s.taken.Add(device)
		if len(s.takenBy) > 0 {
			s.takenBy[a.request.claim].Add(device)
		}
	}
	s.used[a.request.claim]++
	s.picks = append(s.picks, pick{lane: a.lane, device: device})
	if s.classes != nil {
		s.classes.picked(device, 1)
	}
	return true
}

// unpick takes back the last pick, which was for the alternative.
func (s *search) unpick(a *alternative) {
	device := s.picks[len(s.picks)-1].device
	s.picks = s.picks[:len(s.picks)-1]
	if s.classes != nil {
		s.classes.picked(device, -1)
	}
	s.used[a.request.claim]--
	s.ledger.refund(a, device)
	stillTaken := false
	if len(s.takenBy) > 0 {
		s.takenBy[a.request.claim].Remove(device)
		for _, by := range s.takenBy {
			stillTaken = stillTaken || by.Has(device)
		}
	}
	if !stillTaken {
		s.taken.Remove(device)
	}
	for _, c := range a.constraints {
		s.unbind(c)
	}
}

// bind adds the device to those under the constraint, if that is permitted. A device for which the attribute cannot be
// derived ends the search, as one on which a selector fails does.
func (s *search) bind(c *constraint, a *alternative, device int) bool {
	p := s.poolOf(device)
	column := s.groupings.column(c, a.derivation(c), p)
	if column.Errors().Has(device - s.starts[p]) {
		s.selectorError = derivationError(s.reqs, a, c, s.pools[p], device-s.starts[p], column)
		return false
	}
	values := column.Values(device - s.starts[p])
	b := &s.bound[c.index]
	switch {
	case len(values) == 0:
		return false
	case len(b.ends) == 0:
		b.values = append(b.values, values...)
	case values[0].Kind == inventory.UnknownKind:
		return false // may only come first
	case c.distinct:
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
func (s *search) unbind(c *constraint) {
	b := &s.bound[c.index]
	b.values, b.ends = b.values[:b.start()], b.ends[:len(b.ends)-1]
}
