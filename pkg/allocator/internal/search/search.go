// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package search finds the devices of one node that satisfy all requests of a pod, or that there are none.
//
// Each part of a search has its own fields and sees only those above it: the offer of the node, the ledger of what devices share, the
// groupings by attributes, the order of devices, the state of the search, classes of devices that
// are alike, pruning, and the search itself.
package search

import (
	"sync"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/allocator/internal/answers"
	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/evaluation"
	"stowage.dev/stowage/pkg/allocator/internal/poolstate"
	"stowage.dev/stowage/pkg/inventory"
)

// Input is what a search depends on, besides the node.
type Input struct {
	evaluation.Evaluator
	Requests *compiled.Requests
	Answers  *answers.Table // what was found on nodes that look alike
	Policy   Policy
	Variant  Variant
}

// Variant is how a search differs from what is best, as tests want it. The zero value is the usual one.
type Variant struct {
	// ShareAll makes nodes share also what is found at once.
	ShareAll bool
	// Hurried ends the short attempt after one step.
	Hurried bool
}

// Search finds the first way to satisfy all requests on one node, in upstream's order: requests in order,
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
type Search struct {
	state
	pruning  pruning
	prints   fingerprinter
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

// request satisfies the i-th request of the order and all later ones.
func (s *Search) request(i int) bool {
	if i == len(s.order) {
		return true
	}
	place, found, known := s.recall(i)
	if known {
		return found
	}
	found = s.choose(i)
	s.note(place, found)
	return found
}

// choose tries the alternatives of the i-th request of the order.
func (s *Search) choose(i int) bool {
	request := s.reqs.Requests[s.order[i]]
	twin := s.classes == nil && request.Twin && i > 0 && s.order[i-1] == request.Index-1 && !s.groupings.orderMatters(request.Alternatives[0])
	for _, a := range request.Alternatives {
		l := &s.lanes[a.Lane]
		if l.hopeless || l.wanted > resourceapi.AllocationResultsMaxSize-s.used[request.Claim] {
			continue
		}
		s.chosen[request.Index] = a.Position
		from := 0
		if twin { // devices that are not shareable are taken
			from = s.deviceOrder.at(s.picks[len(s.picks)-a.Count].Device)
		}
		if found := a.All && s.takeAll(i, a, l) || !a.All && s.take(i, a, l, 0, from); found || s.stopped() {
			return found
		}
	}
	return false
}

// take picks devices for the alternative, from the k-th on, from the given position in the order of devices on, then goes
// on to the next request.
func (s *Search) take(i int, a *compiled.Alternative, l *lane, k, from int) bool {
	if k >= l.wanted {
		return s.request(i + 1)
	}
	if !s.step() {
		return false
	}
	taken, alike := s.takenFor(a), s.classes.alike(i, a, k, from)
	tried, left := 0, 0
	for device := s.deviceOrder.next(l, taken, from); device >= 0; device = s.deviceOrder.next(l, taken, s.deviceOrder.at(device)+1) {
		if l.errors.Has(device) {
			return s.fail(a, device)
		}
		if tried++; tried%triesPerLook == 0 && s.isOver() {
			return false
		}
		if alike.excluded.Has(device) {
			continue
		}
		at := s.deviceOrder.at(device)
		if left--; tried == 1 || !s.deviceOrder.ranked { // of those that are ranked, none is excluded
			left = s.deviceOrder.countFrom(l, taken, alike.forAll, at)
		}
		if left < l.wanted-k {
			return false
		}
		if s.pick(a, device) {
			if (!s.careful || s.pruning.promising(i, k+1, at+1)) && s.take(i, a, l, k+1, at+1) {
				return true
			}
			if s.stopped() {
				return false
			}
			if s.stuck = !s.careful; s.stuck {
				return false
			}
			s.unpick(a)
			s.classes.exclude(&alike, device, l, taken)
		} else if s.stopped() {
			return false
		}
	}
	return false
}

// takeAll picks all candidates, then goes on to the next request.
func (s *Search) takeAll(i int, a *compiled.Alternative, l *lane) bool {
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

// recall returns a name for how things are to the requests from the i-th of the order on, and whether these can be satisfied, if
// that is known. In the thorough attempt it is made known for more than one request.
func (s *Search) recall(i int) (place string, possible, known bool) {
	if s.classes == nil {
		return "", false, false
	}
	place = s.classes.describe(i)
	possible, known = s.classes.known[place]
	if !known && !s.deciding && len(s.order)-i > 1 {
		possible, known = s.decide(i), s.Err == nil
		if known {
			s.classes.remember(place, possible)
		}
	}
	return place, possible, known && (s.deciding || !possible)
}

// note remembers what the search came to.
func (s *Search) note(place string, found bool) {
	if s.classes != nil && (found && s.deciding || !found && !s.stopped()) {
		s.classes.remember(place, found)
	}
}

// decide tells whether the requests from the i-th of the order on can be satisfied as things are. It is true, too, if that
// depends on a device that cannot be judged, or on the order of devices.
func (s *Search) decide(i int) bool {
	for _, r := range s.order[i:] {
		for _, a := range s.reqs.Requests[r].Alternatives {
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
		s.unpick(s.reqs.Lanes[s.picks[len(s.picks)-1].Lane])
	}
	if s.SelectorError != nil {
		// The first answer may be found before the search comes to that device.
		s.SelectorError = nil
		return true
	}
	return possible && s.Err == nil
}

// Together says how many free devices can be had together under a matchAttribute constraint, and how many are wanted under it, when
// nothing else is asked for.
func (s *Search) Together(c *compiled.Constraint) (best, wanted int) {
	union := s.newSet()
	for _, r := range s.reqs.Claims[c.Claim].Requests {
		least := -1
		for _, a := range r.Alternatives {
			if c.AppliesTo(a) {
				union.Or(s.lanes[a.Lane].candidates)
				if n := s.lanes[a.Lane].wanted; least < 0 || n < least {
					least = n
				}
			}
		}
		wanted += max(0, least)
	}
	for _, of := range s.groupings.of(c).groups {
		best = max(best, union.AndCount(of.Devices))
	}
	return best, wanted
}

// Interrupted is why CEL could not say everything that was asked before its time was over.
func (s *Search) Interrupted() error { return s.in.Interrupted }

// Steps is how many devices were given to requests in all attempts.
func (s *Search) Steps() int { return s.steps }

// Picks are the devices picked for a claim, in the order of its requests.
func (s *Search) Picks(claim int) []Pick {
	before := 0
	for _, n := range s.used[:claim] {
		before += n
	}
	return s.picks[before : before+s.used[claim]]
}

// Choice is the alternative that the request gets.
func (s *Search) Choice(r *compiled.Request) *compiled.Alternative {
	return r.Alternatives[s.chosen[r.Index]]
}

// triesPerLook is how many devices are tried for one place before the clock is looked at: a pool may have 16,384 of which none goes.
const triesPerLook = 64

// step counts one step, and tells whether the attempt may take it.
func (s *Search) step() bool {
	s.steps++
	if s.steps%16 == 0 && s.isOver() {
		return false
	}
	if s.limit > 0 && s.steps > s.limit {
		s.stuck = true
		return false
	}
	return true
}

// searches are kept, with their memory, to be used again. Their parts know each other, which stays so.
var searches = sync.Pool{New: func() any {
	s := new(Search)
	s.ledger.offer, s.groupings.offer = &s.offer, &s.offer
	s.deviceOrder.offer, s.deviceOrder.ledger = &s.offer, &s.ledger
	s.pruning.state = &s.state
	s.pruning.bounds.offer, s.pruning.bounds.ledger = &s.offer, &s.ledger
	s.prints.offer, s.prints.ledger, s.prints.groupings = &s.offer, &s.ledger, &s.groupings
	return s
}}

// New begins a search for the devices of one node, with what holders leave of each pool.
func New(in Input, devices *inventory.NodeDevices, stateOf func(*inventory.NodePool) *poolstate.State) *Search {
	s := searches.Get().(*Search)
	s.state.open(in, devices, stateOf)
	s.pruning.open()
	s.begun, s.steps, s.careful, s.limit, s.deciding = false, 0, false, 0, false
	return s
}

// Release gives the memory to the next search.
func (s *Search) Release() {
	if s.begun {
		s.in.Attempt.End()
	}
	s.pruning.close()
	s.state.close()
	searches.Put(s)
}
