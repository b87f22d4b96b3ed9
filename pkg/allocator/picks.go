package allocator

import (
	"math/bits"
	"sort"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// pick is one device given to one alternative.
type pick struct {
	lane   int
	device int
}

// binding is the state of one constraint: the values of the devices picked so far.
type binding struct {
	values []inventory.AttributeValue
}

// takenFor are the devices that the alternative cannot have because of earlier picks: those of the whole pod,
// or with admin access those of the claim.
func (s *search) takenFor(a *alternative) bitset.Set {
	if a.admin {
		return s.takenBy[a.request.claim]
	}
	return s.taken
}

// next is the first device numbered at least from that is a candidate, or would be if it could be judged.
func (s *search) next(l *lane, taken bitset.Set, from int) int {
	for w := from / 64; w < s.words; w++ {
		word := l.candidates[w]
		if l.errors != nil {
			word |= l.errors[w]
		}
		word &^= taken[w]
		if w == from/64 {
			word &= ^uint64(0) << (uint(from) & 63)
		}
		if word != 0 {
			return w*64 + bits.TrailingZeros64(word)
		}
	}
	return -1
}

// countFrom counts what next would come to, without those excluded.
func (s *search) countFrom(l *lane, taken, excluded bitset.Set, from int) int {
	n := 0
	for w := from / 64; w < s.words; w++ {
		word := l.candidates[w]
		if l.errors != nil {
			word |= l.errors[w]
		}
		word &^= taken[w]
		if excluded != nil {
			word &^= excluded[w]
		}
		if w == from/64 {
			word &= ^uint64(0) << (uint(from) & 63)
		}
		n += bits.OnesCount64(word)
	}
	return n
}

// pick gives the device to the alternative unless a constraint forbids it or too little is left of what it shares.
func (s *search) pick(a *alternative, device int) bool {
	if !s.charge(a, device) {
		return false
	}
	for i, c := range a.constraints {
		if !s.bind(c, device) {
			for _, c := range a.constraints[:i] {
				s.unbind(c)
			}
			s.refund(a, device)
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
	s.refund(a, device)
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

// bind adds the device's value to the constraint's, if that is permitted.
func (s *search) bind(c *constraint, device int) bool {
	value := s.value(c, device)
	if value.Kind == inventory.NoAttribute {
		return false
	}
	b := &s.bound[c.index]
	if !admits(c, b.values, value) {
		return false
	}
	b.values = append(b.values, value)
	return true
}

func (s *search) unbind(c *constraint) {
	b := &s.bound[c.index]
	b.values = b.values[:len(b.values)-1]
}

// admits tells whether a device with the value may join those with the values that are there. A value of an
// unknown kind may only come first.
func admits(c *constraint, have []inventory.AttributeValue, value inventory.AttributeValue) bool {
	if len(have) == 0 {
		return true
	}
	if value.Kind == inventory.UnknownKind {
		return false
	}
	if !c.distinct {
		return have[0] == value
	}
	for _, other := range have {
		if other == value {
			return false
		}
	}
	return true
}

// value is the device's value of the constraint's attribute.
func (s *search) value(c *constraint, device int) inventory.AttributeValue {
	p := s.poolOf(device)
	return s.pools[p].Attribute(c.attribute).Value(device - s.starts[p])
}

// poolOf is the index of the pool that the device is in.
func (s *search) poolOf(device int) int {
	if len(s.starts) == 1 {
		return 0
	}
	return sort.SearchInts(s.starts, device+1) - 1
}
