// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"context"
	"slices"

	"stowage.dev/stowage/pkg/inventory"
)

// Run searches. It returns false if there is no answer, or none was found before something ended the search.
func (s *Search) Run() bool {
	found, known := s.easily()
	return s.finish(found, known)
}

// RunShared is Run, but that what takes long is done once for all nodes that are alike. It only says which alternatives
// are chosen.
func (s *Search) RunShared() bool {
	found, known := s.easily()
	switch {
	case found && s.in.Variant.ShareAll:
	case known && (!found || s.in.Policy == FirstFit || len(s.reqs.Lanes) == len(s.reqs.Requests)):
		return found
	case known && s.prefer(shortPrefer):
		return true
	}
	return s.finishOnce(found, known)
}

// easily does what takes little time. Not known means that it did not suffice for an answer.
func (s *Search) easily() (found, known bool) {
	if s.in.Ctx.Err() != nil {
		s.Err = context.Cause(s.in.Ctx)
		return false, true
	}
	for _, a := range s.reqs.Lanes {
		if !s.prepare(a) {
			return false, true
		}
	}
	if !s.enough() {
		return false, true
	}
	if (len(s.reqs.Requests) > 1 || len(s.bound) > 0 || s.ledger.consumers != nil) && !s.pruning.promising(-1, 0, 0) {
		return false, true
	}
	found = s.request(0)
	return found, found || !s.stuck
}

// finish does the rest.
func (s *Search) finish(found, known bool) bool {
	if !known {
		found = s.carefully()
	}
	if found && s.in.Policy != FirstFit {
		s.prefer(preferSteps)
	}
	return found
}

// carefully makes the two attempts that take picks back.
func (s *Search) carefully() bool {
	s.begin(s.order)
	s.careful, s.stuck, s.limit = true, false, s.steps+shortAttempt
	if s.in.Variant.Hurried {
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
func (s *Search) isPeculiar() bool {
	if len(s.ledger.groups) > 0 {
		return true
	}
	for _, claim := range s.reqs.Claims {
		for _, c := range claim.Constraints {
			if c.Derivations != nil ||
				slices.ContainsFunc(s.pools, func(p *inventory.NodePool) bool { return p.Attribute(c.Attribute).HasLists() }) {
				return true
			}
		}
	}
	return false
}

// thorough searches with all shortcuts, after the attempts before got stuck. It begins with the claims: if one cannot be
// satisfied even when it is alone, there is no need to vary what comes before.
func (s *Search) thorough() bool {
	s.stuck, s.limit = false, 0
	whole := s.order
	s.begin(whole)
	s.classify()
	if len(s.reqs.Claims) > 1 {
		rest := whole // all requests, claim by claim
		for _, claim := range s.reqs.Claims {
			n := len(claim.Requests)
			s.begin(rest[:n])
			if !s.decide(0) {
				if s.Err == nil {
					s.begin(whole)
				}
				return false
			}
			rest = rest[n:]
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
func (s *Search) prefer(steps int) (settled bool) {
	s.firstFit.set(&s.solution)
	s.begin(s.order)
	s.classes, s.careful, s.stuck, s.limit = nil, true, false, s.steps+steps
	s.deviceOrder.rank()
	if s.request(0) {
		return true
	}
	settled = !s.stuck
	s.Err, s.SelectorError, s.stuck = nil, nil, false
	s.solution.set(&s.firstFit)
	return settled
}

// finishOnce finishes the search, unless that was done for a node that looks like this one: then it takes over what was found
// there. While another one of the same attempt is at it, it waits. Who judges the node beside that attempt may have less time.
func (s *Search) finishOnce(found, known bool) bool {
	print := s.prints.fingerprint()
	if s.Err != nil {
		return false // what was seen of the node is not all
	}
	a, mine := s.in.Answers.Take(print, s.in.Attempt)
	switch {
	case a == nil:
		return s.finish(found, known)
	case mine:
		defer a.Settle()
		found = s.finish(found, known)
		if s.SelectorError == nil && (s.Err == nil || s.in.Attempt != nil && s.in.Ctx.Err() == nil) {
			a.Share(found, slices.Clone(s.chosen), s.Err)
		}
		return found
	}
	if !a.Await(s.in.Ctx, s.in.Attempt) {
		return s.finish(found, known)
	}
	s.Err = a.Err
	if a.Fits {
		s.chosen = append(s.chosen[:0], a.Chosen...)
	}
	return a.Fits
}

// isOver tells whether the time for this node is over, and notes why.
func (s *Search) isOver() bool {
	if s.in.Ctx.Err() != nil {
		s.Err = context.Cause(s.in.Ctx)
		return true
	}
	if s.in.Attempt == nil {
		return false
	}
	if !s.begun {
		s.begun, s.end = true, s.in.Attempt.Begin()
	}
	if s.in.Attempt.IsOver(s.end) {
		s.Err = context.DeadlineExceeded
	}
	return s.Err != nil
}
