// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/flow"
)

// matchable tells whether the open requests can have their devices without sharing any that are not shareable.
// Requests with admin access may share across claims and are left out. Of shareable devices each request may have one
// share. With more than 64 requests the answer is yes without a look.
func (pr *pruning) matchable(all []open) bool {
	requests := pr.seekers[:0]
	for i := range all {
		o := &all[i]
		shares := o.candidates.AndCount(pr.ledger.shareable)
		if o.admin || o.wanted <= shares {
			continue
		}
		candidates := o.candidates
		if shares > 0 {
			candidates = pr.newSet()
			copy(candidates, o.candidates)
			candidates.AndNot(pr.ledger.shareable)
		}
		requests = append(requests, flow.Seeker{Candidates: candidates, Wanted: o.wanted - shares})
	}
	pr.seekers = requests
	if len(requests) < 2 || len(requests) > 64 {
		return true
	}
	// The most particular first: if each finds enough even after all before it took theirs, all do.
	slices.SortStableFunc(requests, func(a, b flow.Seeker) int { return cmp.Compare(a.Candidates.Count(), b.Candidates.Count()) })
	wanted, easy := 0, true
	for _, o := range requests {
		wanted += o.Wanted
		easy = easy && o.Candidates.Count() >= wanted
	}
	if easy {
		return true
	}
	return pr.flow.Of(requests, pr.words).Saturates()
}

// decideByFlow decides what is nothing but a choice of values and a flow, unless there are too many values.
func (pr *pruning) decideByFlow(i int) (possible, known bool) {
	mark := pr.mark()
	defer pr.takeBack(mark)
	requests, ok := pr.openRequests(i-1, pr.wantedBy(i-1), 0)
	if !ok || !pr.isFlow(requests) {
		return false, !ok
	}
	total := slices.Clone(pr.used)
	var constraints []*compiled.Constraint
	for i := range requests {
		claim := requests[i].request.Claim
		if total[claim] += requests[i].wanted; total[claim] > resourceapi.AllocationResultsMaxSize {
			return false, true
		}
	}
	for _, claim := range pr.reqs.Claims {
		constraints = pr.unbound(constraints, claim.Constraints, requests)
	}
	if !pr.isEnough(requests) {
		return false, true
	}
	budget := maxFlows
	possible = pr.assignable(i, requests, constraints, nil, &budget)
	return possible, budget >= 0
}

// maxFlows is for how many values it is asked whether a flow finds devices, before they are searched for.
const maxFlows = 500
