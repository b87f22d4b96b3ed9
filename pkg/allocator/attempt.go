package allocator

import (
	"context"
	"slices"

	"stowage.dev/stowage/pkg/inventory"
)

// Attempt is one attempt to schedule a pod, with the time that it has. What its time does not suffice for on one node it
// is not spent on again on nodes that are alike. It must be comparable, and safe for concurrent use.
type Attempt interface {
	// Begin is called once for each search that does not end at once. It returns when that has to end, in a unit of its own.
	Begin() (end int64)
	// End is called when such a search has ended.
	End()
	// IsOver tells whether that moment has come.
	IsOver(end int64) bool
	// Evaluate is called around each evaluation of CEL expressions whose results are not kept from before. It returns a context that ends
	// when there is no time left for that, and what is to be called after it.
	Evaluate(ctx context.Context) (context.Context, context.CancelFunc)
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

// thorough searches with all shortcuts, after the attempts before got stuck. It begins with the claims: if one cannot be
// satisfied even when it is alone, there is no need to vary what comes before.
func (s *search) thorough() bool {
	s.stuck, s.limit = false, 0
	whole := s.order
	s.begin(whole)
	s.classify()
	var parts [][]int
	if len(s.reqs.claims) > 1 {
		for i := range s.reqs.claims {
			var part []int
			for _, r := range s.reqs.claims[i].requests {
				part = append(part, r.index)
			}
			parts = append(parts, part)
		}
	}
	for _, part := range parts {
		s.begin(part)
		if !s.decide(0) {
			if s.err == nil {
				s.begin(whole)
			}
			return false
		}
	}
	s.begin(whole)
	return s.request(0)
}

// shortAttempt is how many steps the short attempt may take: it mostly ends after few, and the preparation of the
// thorough one costs as much as some dozen.
const shortAttempt = 24

// preferSteps bounds the look for an answer in the order of a policy. Many looks end after fewer steps than shortPrefer,
// so that it does not pay to share what they find.
const preferSteps, shortPrefer = 512, 32

// prefer looks for the first answer in the order of the policy, after one was found in the order of FirstFit. If it
// finds none in so many steps that one stays: a policy never costs a pod its node. It returns false if more steps may
// change that.
func (s *search) prefer(steps int) (settled bool) {
	s.firstFit.set(&s.state)
	s.begin(s.order)
	s.classes, s.careful, s.stuck, s.limit = nil, true, false, s.steps+steps
	s.deviceOrder.rank()
	if s.request(0) {
		return true
	}
	settled = !s.stuck
	s.err, s.selectorError, s.stuck = nil, nil, false
	s.firstFit.restore(&s.state)
	return settled
}

// finishOnce finishes the search, unless that was done for a node that looks like this one: then it takes over what was found
// there. While another one of the same attempt is at it, it waits. Who judges the node beside that attempt may have less time.
func (s *search) finishOnce(found, known bool) bool {
	print := s.prints.fingerprint()
	if s.err != nil {
		return false // what was seen of the node is not all
	}
	a, mine := s.reqs.answers.Take(print, s.in.Attempt)
	switch {
	case a == nil:
		return s.finish(found, known)
	case mine:
		defer a.Settle()
		found = s.finish(found, known)
		if s.selectorError == nil && (s.err == nil || s.in.Attempt != nil && s.in.ctx.Err() == nil) {
			a.Share(found, slices.Clone(s.chosen), s.err)
		}
		return found
	}
	if !a.Await(s.in.ctx, s.in.Attempt) || !a.IsFor(s.in.Attempt) {
		return s.finish(found, known)
	}
	s.err = a.Err
	if a.Fits {
		s.chosen = append(s.chosen[:0], a.Chosen...)
	}
	return a.Fits
}

// isOver tells whether the time for this node is over, and notes why.
func (s *search) isOver() bool {
	if s.in.ctx.Err() != nil {
		s.err = context.Cause(s.in.ctx)
		return true
	}
	if s.in.Attempt == nil {
		return false
	}
	if !s.begun {
		s.begun, s.end = true, s.in.Attempt.Begin()
	}
	if s.in.Attempt.IsOver(s.end) {
		s.err = context.DeadlineExceeded
	}
	return s.err != nil
}
