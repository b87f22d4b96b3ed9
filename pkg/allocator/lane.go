package allocator

import (
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory/bitset"
)

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
func (s *search) prepare(a *alternative) bool {
	if a.all && len(s.problems) > 0 {
		return false // how many all are is not known, nor what is among them
	}
	l := lane{candidates: s.newSet(), wanted: a.count}
	blocked := false
	for i, p := range s.pools {
		match := s.in.match(a, p)
		if s.err = s.in.interrupted; s.err != nil {
			return false
		}
		s.matches = append(s.matches, match)
		base := s.starts[i] / 64
		if match.Errors != nil {
			if a.all {
				return s.fail(a, s.starts[i]+match.Errors.Next(0))
			}
			if l.errors == nil {
				l.errors = s.newSet()
			}
			copy(l.errors[base:], match.Errors)
		}
		state := s.ledger.states[i]
		own := l.candidates[base : base+bitset.Words(p.Len())]
		if a.all {
			copy(own, match.Match)
			blocked = blocked || match.Tainted != nil || own.Intersects(state.takenFor(a)) || state.crowded(p, match, own, nil) > 0
			continue
		}
		copy(own, match.Usable)
		taken := state.takenFor(a)
		own.AndNot(taken)
		if l.errors != nil && !a.admin {
			l.errors[base:].AndNot(state.held)
		}
		if state.room != nil {
			for device := p.Shareable().Next(0); device >= 0; device = p.Shareable().Next(device + 1) {
				if own.Has(device) && state.lacksRoom(p, match, device) {
					own.Remove(device)
				}
			}
		}
	}
	n := l.candidates.Count()
	if a.all {
		l.wanted = n
		l.hopeless = blocked || n == 0
	} else {
		l.hopeless = n < a.count && l.errors.Empty()
	}
	if n := len(s.lanes); n < cap(s.lanes) { // the memory of an earlier search
		former := &s.lanes[:n+1][n]
		l.leastUses, l.leastTakes = former.leastUses[:0], former.leastTakes[:0]
	}
	s.lanes = append(s.lanes, l)
	return true
}

// enough tells whether each request has an alternative that the node has devices for, and each claim's
// allocation has room for them.
func (s *search) enough() bool {
	for _, c := range s.reqs.claims {
		least := 0
		for _, r := range c.requests {
			alive := false
			smallest := resourceapi.AllocationResultsMaxSize + 1
			for _, a := range r.alternatives {
				alive = alive || !s.lanes[a.lane].hopeless
				smallest = min(smallest, s.lanes[a.lane].wanted)
			}
			if !alive {
				return false
			}
			least += smallest
		}
		if least > resourceapi.AllocationResultsMaxSize {
			s.tooMany = true
			return false
		}
	}
	return true
}
