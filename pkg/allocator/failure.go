// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"cmp"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/poolstate"
	"stowage.dev/stowage/pkg/allocator/internal/search"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// Failure is why a node was refused, with the counts that the decision was made from.
type Failure struct {
	Reason explain.Reason
	// Requests has the counts, one entry per request alternative and pool, in the order of the claims,
	// requests, alternatives and pools. Empty for ReasonUndecided.
	Requests []RequestCounts
	// Constraints has, for ReasonConstraints, how far each matchAttribute constraint can be satisfied.
	Constraints []ConstraintCounts
	// Pools are the unusable pools of the node.
	Pools []*inventory.PoolProblem
	// SelectorError is, for ReasonSelectorError, the first device on which a CEL selector failed.
	SelectorError *SelectorError
	// Err is why the search ended early, for ReasonUndecided.
	Err error
}

// Resolvable tells whether the release of devices by their present holders could make the node usable.
func (f *Failure) Resolvable() bool {
	switch f.Reason {
	case explain.ReasonHeld:
		return true
	case explain.ReasonConstraints:
		for i := range f.Requests {
			if c := &f.Requests[i]; c.Held+c.Exhausted+c.Incompatible > 0 {
				return true
			}
		}
	case explain.ReasonUndecided, explain.ReasonSelectorError, explain.ReasonPool, explain.ReasonNoMatch, explain.ReasonUnsupported,
		explain.ReasonTainted, explain.ReasonTooMany:
	}
	return false
}

// String is the reason with what is known about this node, for logs.
func (f *Failure) String() string {
	if detail := f.detail(); detail != "" {
		return string(f.Reason) + ": " + detail
	}
	return string(f.Reason)
}

// detail is what the reason does not say.
func (f *Failure) detail() string {
	switch {
	case f.SelectorError != nil:
		return f.SelectorError.Error()
	case f.Err != nil:
		return f.Err.Error()
	case f.Reason == explain.ReasonPool && len(f.Pools) > 0:
		return f.Pools[0].String()
	}
	return ""
}

// RequestCounts says how the devices of one pool of the node look to one request alternative. Every device
// that the node may use is counted in exactly one of FilteredByClass, FilteredBy, Failing, TooSmall and Matching (and in
// none if it has binding conditions and that feature is off).
type RequestCounts struct {
	// Claim, Request and Alternative are positions: of the claim among those compiled, of the request in
	// the claim, of the alternative in the request (0 if it has none).
	Claim, Request, Alternative int
	// Pool is what was looked at; nodes that see the same devices of a pool have the same pointer.
	Pool *inventory.NodePool
	// Wanted is how many devices the request needs on this node, in all pools together; 0 for all.
	Wanted int
	// Devices is the number of devices of the pool that the node may use.
	Devices int
	// FilteredByClass were rejected by a selector of the class.
	FilteredByClass int
	// FilteredBy[k] were rejected by the request's own selector k, being the first to reject them.
	FilteredBy []int
	explain.DeviceCounts
}

// ConstraintCounts says how many free devices of the node can be had together under a matchAttribute constraint.
type ConstraintCounts struct {
	// Claim and Constraint are positions, as in RequestCounts.
	Claim, Constraint int
	Attribute         resourceapi.FullyQualifiedName
	// Best is the largest number of free devices with one value; Wanted is how many are needed.
	Best, Wanted int
}

// newFailure says why the node was refused. s is where the search that failed ended, nil if counting was enough.
func newFailure(in *Input, devices *inventory.NodeDevices, s *search.Search) *Failure {
	if s != nil && s.Err != nil {
		return newUndecided(devices, s.Err)
	}
	f := &Failure{Pools: devices.Problems}
	f.Requests = make([]RequestCounts, 0, len(in.Requests.compiled.Lanes)*len(devices.Pools))
	worst := fits
	var broken *SelectorError
	for _, r := range in.Requests.compiled.Requests {
		best := noMatch
		for _, a := range r.Alternatives {
			best = max(best, f.count(in, devices, a))
		}
		if best == noMatch && broken == nil {
			broken = firstError(in, devices, r)
		}
		worst = min(worst, best)
	}
	switch {
	case s != nil && s.SelectorError != nil:
		f.Reason, f.SelectorError = explain.ReasonSelectorError, s.SelectorError
	case s != nil && s.TooMany:
		f.Reason = explain.ReasonTooMany
	case len(devices.Problems) > 0 && in.Requests.compiled.AnyAll():
		f.Reason = explain.ReasonPool
	case worst == fits:
		f.Reason = explain.ReasonConstraints
		f.countConstraints(in, s)
	case worst == noMatch && broken != nil:
		f.Reason, f.SelectorError = explain.ReasonSelectorError, broken
	case worst == noMatch && len(devices.Problems) > 0:
		f.Reason = explain.ReasonPool
	default:
		f.Reason = worst.reason()
	}
	if in.evaluator.Interrupted != nil {
		return newUndecided(devices, in.evaluator.Interrupted)
	}
	return f
}

// newUndecided says that the search ended early.
func newUndecided(devices *inventory.NodeDevices, err error) *Failure {
	return &Failure{Reason: explain.ReasonUndecided, Pools: devices.Problems, Err: err}
}

// firstError returns the first device on which a selector of the request failed, if the request would get enough
// devices were those on which one failed to match.
func firstError(in *Input, devices *inventory.NodeDevices, r *compiled.Request) *SelectorError {
	for _, a := range r.Alternatives {
		possible := 0
		var first *SelectorError
		for _, p := range devices.Pools {
			match := in.evaluator.Match(a, p)
			possible += match.Match.Count() + match.Errors.Count()
			if first == nil && match.Errors != nil {
				first = in.evaluator.SelectorError(in.Requests.compiled, a, p, match.Errors.Next(0))
			}
		}
		if first != nil && possible >= a.Count {
			return first
		}
	}
	return nil
}

// level is how far an alternative gets on a node, from worst to best.
type level int

const (
	noMatch level = iota
	unsupported
	tainted
	heldByOthers
	tooMany
	fits
)

func (l level) reason() explain.Reason {
	return [...]explain.Reason{
		explain.ReasonNoMatch, explain.ReasonUnsupported, explain.ReasonTainted, explain.ReasonHeld,
		explain.ReasonTooMany, explain.ReasonConstraints,
	}[l]
}

// count adds the counts for one alternative and says how far it gets.
func (f *Failure) count(in *Input, devices *inventory.NodeDevices, a *compiled.Alternative) level {
	matching, supported, untainted, free := 0, 0, 0, 0
	for _, p := range devices.Pools {
		match := in.evaluator.Match(a, p)
		c := RequestCounts{
			Claim: a.Request.Claim, Request: a.Request.Position, Alternative: a.Position, Pool: p, Wanted: a.Count,
			Devices:      p.Visible(),
			DeviceCounts: explain.DeviceCounts{Failing: match.Errors.Count(), Matching: match.Match.Count(), TooSmall: match.Small.Count()},
		}
		if c.Matching+c.Failing+c.TooSmall < c.Devices {
			c.FilteredByClass, c.FilteredBy = in.evaluator.Rejections(a, p)
		}
		c.sortMatching(p, match, in.stateOf(p), a)
		matching += c.Matching
		supported += c.Matching - c.Unsupported
		untainted += c.Matching - c.Unsupported - c.Tainted
		free += c.Free
		f.Requests = append(f.Requests, c)
	}
	wanted := a.Count
	if a.All {
		wanted = max(1, matching)
	}
	switch {
	case matching < wanted:
		return noMatch
	case supported < wanted:
		return unsupported
	case untainted < wanted:
		return tainted
	case free < wanted:
		return heldByOthers
	case wanted > resourceapi.AllocationResultsMaxSize:
		return tooMany
	}
	return fits
}

// sortMatching puts each matching device under the first reason for which it cannot be had.
func (c *RequestCounts) sortMatching(p *inventory.NodePool, match *inventory.PoolMatch, state *poolstate.State, a *compiled.Alternative) {
	rest := match.Match.Clone()
	take := func(set bitset.Set) int {
		n := rest.AndCount(set)
		rest.AndNot(set)
		return n
	}
	c.NodeAllocatable = take(p.NodeAllocatable())
	c.Skipping = take(p.Skipping())
	c.Unsupported = c.NodeAllocatable + c.Skipping + take(p.Unsupported())
	for i := match.Tainted.Next(0); i >= 0; i = match.Tainted.Next(i + 1) {
		if rest.Has(i) {
			if c.Taints == nil {
				c.Taints = make(map[string]int)
			}
			c.Taints[a.Matcher.RefusedTaint(p.Device(i)).Key]++
		}
	}
	c.Tainted = take(match.Tainted)
	if !a.Admin {
		c.Foreign = rest.AndCount(state.Foreign)
		c.Held = take(state.Held)
	}
	c.Incompatible = take(state.Incompatible)
	c.Full = state.DropCrowded(p, match, rest)
	c.Exhausted = c.Full + take(state.Short)
	c.Free = rest.Count()
}

// countConstraints says how far each matchAttribute constraint gets when nothing else is asked for.
func (f *Failure) countConstraints(in *Input, s *search.Search) {
	if s == nil {
		return
	}
	for i := range in.Requests.compiled.Claims {
		for k, c := range in.Requests.compiled.Claims[i].Constraints {
			if !c.Distinct {
				best, wanted := s.Together(c)
				f.Constraints = append(f.Constraints,
					ConstraintCounts{Claim: i, Constraint: k, Attribute: c.Attribute, Best: best, Wanted: wanted})
			}
		}
	}
	in.evaluator.Interrupted = cmp.Or(in.evaluator.Interrupted, s.Interrupted()) // attributes may be derived here for the first time
}
