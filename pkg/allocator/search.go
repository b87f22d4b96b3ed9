package allocator

import (
	"context"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// search finds the first way to satisfy all requests on one node, in upstream's order: requests in order,
// alternatives in order, devices of a request ascending. The order defines the answer, so every shortcut skips
// only what cannot contain the first answer. Other policies have another order of devices, see prefer.
//
//   - Necessary conditions that are cheap to check (pruning.go) cut off what cannot be completed.
//   - Of devices that nothing can tell apart only the first is tried (class.go).
//   - Whether the rest of the requests can be satisfied in a state is decided once, and remembered for all states that are
//     alike (class.go, decide).
//
// There are three attempts, each with what the one before does without: the greedy one never takes a pick back; the
// short one may take few steps; the thorough one has all shortcuts. Devices of all pools of the node are numbered in the
// order in which they are tried, each pool starting at a multiple of 64.
type search struct {
	state
	pruning  pruning
	look     look
	firstFit solution // scratch

	// end is when the attempt's time for this node ends, once that has begun.
	end   int64
	begun bool

	steps int
	// careful is false for the greedy attempt, which is stuck where it would have to take a pick back. So is the
	// short one after limit steps; there is none if that is 0.
	careful bool
	limit   int
	// deciding tells that any answer will do.
	deciding bool
}

// searches are kept, with their memory, to be used again.
var searches = sync.Pool{New: func() any {
	s := new(search)
	s.state.connect()
	s.pruning.state = &s.state
	s.pruning.bounds.offer, s.pruning.bounds.ledger = &s.offer, &s.ledger
	s.look.offer, s.look.ledger, s.look.groupings = &s.offer, &s.ledger, &s.groupings
	return s
}}

func newSearch(ctx context.Context, in Input, devices *inventory.NodeDevices) *search {
	s := searches.Get().(*search)
	s.state.open(ctx, in, devices)
	s.pruning.open()
	s.begun, s.steps, s.careful, s.limit, s.deciding = false, 0, false, 0, false
	return s
}

// release gives the memory to the next search.
func (s *search) release() {
	if s.begun {
		s.in.Attempt.End()
	}
	s.pruning.close()
	s.state.close()
	searches.Put(s)
}

// run searches. It returns false if there is no answer, or none was found before something ended the search.
func (s *search) run() bool {
	found, known := s.easily()
	return s.finish(found, known)
}

// runShared is run, but that what takes long is done once for all nodes that are alike. It only says which alternatives
// are chosen.
func (s *search) runShared() bool {
	found, known := s.easily()
	switch {
	case found && s.in.variant.shareAll:
	case known && (!found || s.in.Policy == FirstFit || !s.reqs.choice):
		return found
	case known && s.prefer(shortPrefer):
		return true
	}
	return s.finishOnce(found, known)
}

// easily does what takes little time. Not known means that it did not suffice for an answer.
func (s *search) easily() (found, known bool) {
	if s.in.ctx.Err() != nil {
		s.err = context.Cause(s.in.ctx)
		return false, true
	}
	for _, a := range s.reqs.lanes {
		if !s.prepare(a) {
			return false, true
		}
	}
	if !s.enough() {
		return false, true
	}
	if (len(s.reqs.requests) > 1 || len(s.bound) > 0 || s.ledger.consumers != nil) && !s.pruning.promising(-1, 0, 0) {
		return false, true
	}
	found = s.request(0)
	return found, found || !s.stuck
}

// finish does the rest.
func (s *search) finish(found, known bool) bool {
	if !known {
		found = s.carefully()
	}
	if found && s.in.Policy != FirstFit {
		s.prefer(preferSteps)
	}
	return found
}

// carefully makes the two attempts that take picks back.
func (s *search) carefully() bool {
	s.begin(s.order)
	s.careful, s.stuck, s.limit = true, false, s.steps+shortAttempt
	if s.in.variant.hurried {
		s.limit = s.steps + 1
	}
	if s.request(0) {
		return true
	}
	if !s.stuck {
		return false
	}
	if s.isPeculiar() {
		s.begin(s.order)
		s.stuck, s.limit = false, 0
		return s.request(0)
	}
	return s.thorough()
}

// isPeculiar tells whether devices differ in what the thorough attempt does not know: groups, and attributes
// that have several values or are derived. Then the necessary conditions alone have to keep the search short.
func (s *search) isPeculiar() bool {
	if len(s.ledger.groups) > 0 {
		return true
	}
	for _, claim := range s.reqs.claims {
		for _, c := range claim.constraints {
			if c.derivations != nil || slices.ContainsFunc(s.pools, func(p *inventory.NodePool) bool { return p.Attribute(c.attribute).HasLists() }) {
				return true
			}
		}
	}
	return false
}

// decide tells whether the requests from the i-th of the order on can be satisfied as things are. It is true, too, if that
// depends on a device that cannot be judged, or on the order of devices.
func (s *search) decide(i int) bool {
	for _, r := range s.order[i:] {
		for _, a := range s.reqs.requests[r].alternatives {
			if s.groupings.orderMatters(a) {
				return true
			}
		}
	}
	if possible, known := s.pruning.decideByFlow(i); known {
		return possible
	}
	picks := len(s.picks)
	s.deciding = true
	possible := s.pruning.promising(i-1, s.wantedBy(i-1), 0) && s.request(i)
	s.deciding = false
	for len(s.picks) > picks {
		s.unpick(s.reqs.lanes[s.picks[len(s.picks)-1].lane])
	}
	if s.selectorError != nil {
		// The first answer may be found before the search comes to that device.
		s.selectorError = nil
		return true
	}
	return possible && s.err == nil
}

// request satisfies the i-th request of the order and all later ones.
func (s *search) request(i int) bool {
	if i == len(s.order) {
		return true
	}
	request := s.reqs.requests[s.order[i]]
	var state string
	if s.classes != nil {
		state = s.classes.describe(i)
		possible, known := s.classes.known[state]
		if !known && !s.deciding && len(s.order)-i > 1 {
			possible, known = s.decide(i), s.err == nil
			if known {
				s.classes.remember(state, possible)
			}
		}
		if known && (s.deciding || !possible) {
			return possible
		}
	}
	twin := s.classes == nil && request.twin && i > 0 && s.order[i-1] == request.index-1 && !s.groupings.orderMatters(request.alternatives[0])
	for _, a := range request.alternatives {
		l := &s.lanes[a.lane]
		if l.hopeless || l.wanted > resourceapi.AllocationResultsMaxSize-s.used[request.claim] {
			continue
		}
		s.chosen[request.index] = a.position
		var ok bool
		if a.all {
			ok = s.takeAll(i, a, l)
		} else {
			from := 0
			if twin {
				// Devices that are not shareable are taken.
				from = s.deviceOrder.at(s.picks[len(s.picks)-a.count].device)
			}
			ok = s.take(i, a, l, 0, from)
		}
		if ok {
			if s.classes != nil && s.deciding {
				s.classes.remember(state, true)
			}
			return true
		}
		if s.stopped() {
			return false
		}
	}
	if s.classes != nil {
		s.classes.remember(state, false)
	}
	return false
}

// triesPerLook is how many devices are tried for one place before the clock is looked at: a pool may have 16,384 of which none goes.
const triesPerLook = 64

// take picks devices for the alternative, from the k-th on, from the given position in the order of devices on, then goes
// on to the next request.
func (s *search) take(i int, a *alternative, l *lane, k, from int) bool {
	if k >= l.wanted {
		return s.request(i + 1)
	}
	s.steps++
	if s.steps%16 == 0 && s.isOver() {
		return false
	}
	if s.limit > 0 && s.steps > s.limit {
		s.stuck = true
		return false
	}
	taken := s.takenFor(a)
	var v *view
	var excluded, forAll bitset.Set // what the next pick may not be, and what no further one may be
	if s.classes != nil {
		ordered := s.groupings.orderMatters(a)
		v, excluded = s.classes.view(i), s.classes.exclude(k == 0 || ordered)
		if !ordered {
			forAll = excluded
		}
	}
	tried, left := 0, 0
	for device := s.deviceOrder.next(l, taken, from); device >= 0; device = s.deviceOrder.next(l, taken, s.deviceOrder.at(device)+1) {
		if l.errors.Has(device) {
			return s.fail(a, device)
		}
		if tried++; tried%triesPerLook == 0 && s.isOver() {
			return false
		}
		if excluded.Has(device) {
			continue
		}
		at := s.deviceOrder.at(device)
		if left--; tried == 1 || !s.deviceOrder.ranked { // of those that are ranked, none is excluded
			left = s.deviceOrder.countFrom(l, taken, forAll, at)
		}
		if left < l.wanted-k {
			return false
		}
		if !s.pick(a, device) {
			if s.stopped() {
				return false
			}
			continue
		}
		if (!s.careful || s.pruning.promising(i, k+1, at+1)) && s.take(i, a, l, k+1, at+1) {
			return true
		}
		if s.stopped() {
			return false
		}
		if !s.careful {
			s.stuck = true
			return false
		}
		s.unpick(a)
		if s.classes != nil {
			class := s.classes.at(v, device, from)
			for other := s.deviceOrder.next(l, taken, device+1); other >= 0; other = s.deviceOrder.next(l, taken, other+1) {
				if !excluded.Has(other) && s.classes.at(v, other, from) == class {
					excluded.Add(other)
				}
			}
		}
	}
	return false
}

// takeAll picks all candidates, then goes on to the next request.
func (s *search) takeAll(i int, a *alternative, l *lane) bool {
	picked := 0
	taken := s.takenFor(a)
	for device := l.candidates.Next(0); device >= 0; device = l.candidates.Next(device + 1) {
		if taken.Has(device) || !s.pick(a, device) {
			break
		}
		picked++
	}
	if picked == l.wanted && (!s.careful || s.pruning.promising(i, picked, 0)) && s.request(i+1) {
		return true
	}
	if s.stopped() {
		return false
	}
	if !s.careful && picked > 0 {
		s.stuck = true
		return false
	}
	for range picked {
		s.unpick(a)
	}
	return false
}
