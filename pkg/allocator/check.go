// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/search"
	"stowage.dev/stowage/pkg/inventory"
)

// decide judges one node:
//
//  1. Find what the node can reach.
//  2. A single request without constraints is decided by counting.
//  3. What was found before for equal requests, and devices held as they are, is true again.
//  4. Everything else is searched for, see search; what takes long once for all nodes that are alike, see answers.
//  5. What fits is turned into allocations, what does not into counts.
func decide(in *Input, keep bool) Result {
	seen := glanceAt(in)
	var fits, counted bool
	if plain := in.Requests.compiled.Plain; plain != nil && !keep {
		fits, counted = countOnly(plain, seen, in)
		if fits {
			var v value
			v.add(seen, in, plain)
			if in.evaluator.Interrupted == nil {
				return v.result(in)
			}
		}
		if in.evaluator.Interrupted != nil {
			return Result{Failure: newUndecided(seen.devices, in.evaluator.Interrupted)}
		}
	}
	if !keep {
		if known, ok := seen.verdict(in); ok {
			return known
		}
	}
	if counted { // and does not fit
		return seen.remember(in, Result{Failure: newFailure(in, seen.devices, nil)})
	}
	s := search.New(in.search(), seen.devices, in.stateOf)
	defer s.Release()
	found := false
	if keep {
		found = s.Run()
	} else {
		found = s.RunShared()
	}
	in.evaluator.Interrupted = s.Interrupted()
	if !found {
		result := Result{Failure: newFailure(in, seen.devices, s)}
		if keep {
			return result
		}
		return seen.remember(in, result)
	}
	var v value
	for _, r := range in.Requests.compiled.Requests {
		v.add(seen, in, s.Choice(r))
	}
	result := v.result(in)
	switch {
	case in.evaluator.Interrupted != nil:
		return Result{Failure: newUndecided(seen.devices, in.evaluator.Interrupted)}
	case keep:
		result.Allocations = allocations(in, s)
		return result
	}
	return seen.remember(in, result)
}

// search is what a search of a node depends on.
func (in *Input) search() search.Input {
	return search.Input{
		Evaluator: in.evaluator, Requests: in.Requests.compiled, Answers: &in.Requests.answers,
		Policy: in.Policy, Variant: in.variant,
	}
}

// countOnly decides a request that is alone by counting. A device on which a selector failed matters only if the
// search would come to it, so such a pool is left to the search. So are several devices that may consume the same
// counters: each may be had, and not all of them. Then it is not known whether the node fits.
func countOnly(a *compiled.Alternative, seen *glance, in *Input) (fits, known bool) {
	if a.All {
		return countAll(a, seen.devices, in)
	}
	free, independent := 0, true
	for p, t := range seen.pools(in) {
		var c count
		if a.Admin {
			c = countOf(t.state, in, p, a)
		} else {
			c = t.count(in, p, a)
		}
		if c.errors {
			return false, false
		}
		free += c.free
		independent = independent && !c.dependent
		if free >= a.Count && (independent || a.Count == 1) {
			return true, true
		}
	}
	if a.Count == 0 {
		return true, true
	}
	return false, free < a.Count
}

func countAll(a *compiled.Alternative, devices *inventory.NodeDevices, in *Input) (fits, known bool) {
	if len(devices.Problems) > 0 {
		return false, true
	}
	total, missing := 0, false
	for _, p := range devices.Pools {
		match := in.evaluator.Match(a, p)
		if match.Errors != nil || match.Match.Intersects(p.Consumers()) {
			return false, false
		}
		missing = missing || in.stateOf(p).Free(p, match, a.Admin) < match.Match.Count()
		total += match.Match.Count()
	}
	return !missing && total > 0 && total <= resourceapi.AllocationResultsMaxSize, true
}
