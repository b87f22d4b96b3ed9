package allocator

import (
	"context"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory"
)

// decide judges one node:
//
//  1. Find what the node can reach.
//  2. A single request without constraints is decided by counting.
//  3. What was found before for equal requests, and devices held as they are, is true again.
//  4. Everything else is searched for, see search; what takes long once for all nodes that are alike, see answers.
//  5. What fits is turned into allocations, what does not into counts.
func decide(ctx context.Context, in *Input, keep bool) Result {
	seen := glanceAt(in)
	counted := unknown
	if plain := in.Requests.plain; plain != nil && !keep {
		counted = plain.countOnly(seen, in)
		if counted == yes {
			var v value
			v.add(seen, in, plain)
			if in.interrupted == nil {
				return v.result(in)
			}
		}
		if in.interrupted != nil {
			return Result{Failure: newUndecided(seen.devices, in.interrupted)}
		}
	}
	if !keep {
		if known, ok := seen.verdict(in); ok {
			return known
		}
	}
	if counted == no {
		return seen.remember(in, Result{Failure: newFailure(in, seen.devices, nil)})
	}
	s := newSearch(ctx, *in, seen.devices)
	defer s.release()
	found := false
	if keep {
		found = s.run()
	} else {
		found = s.runShared()
	}
	if !found {
		result := Result{Failure: newFailure(&s.in, seen.devices, &s.state)}
		if keep {
			return result
		}
		return seen.remember(in, result)
	}
	result := s.value(seen).result(in)
	switch {
	case s.in.interrupted != nil:
		return Result{Failure: newUndecided(seen.devices, s.in.interrupted)}
	case keep:
		result.Allocations = s.allocations()
		return result
	}
	return seen.remember(in, result)
}

type answer int

const (
	unknown answer = iota // counting does not tell
	yes
	no
)

// countOnly decides a request that is alone by counting. A device on which a selector failed matters only if the
// search would come to it, so such a pool is left to the search. So are several devices that may consume the same
// counters: each may be had, and not all of them.
func (a *alternative) countOnly(seen *glance, in *Input) answer {
	if a.all {
		return a.countAll(seen.devices, in)
	}
	free, independent := 0, true
	for p, t := range seen.pools(in) {
		var c count
		if a.admin {
			c = countOf(t.state, in, p, a)
		} else {
			c = t.count(in, p, a)
		}
		if c.errors {
			return unknown
		}
		free += c.free
		independent = independent && !c.dependent
		if free >= a.count && (independent || a.count == 1) {
			return yes
		}
	}
	switch {
	case free < a.count:
		return no
	case independent || a.count == 0:
		return yes
	}
	return unknown
}

func (a *alternative) countAll(devices *inventory.NodeDevices, in *Input) answer {
	if len(devices.Problems) > 0 {
		return no
	}
	total, missing := 0, false
	for _, p := range devices.Pools {
		match := in.match(a, p)
		if match.Errors != nil || match.Match.Intersects(p.Consumers()) {
			return unknown
		}
		missing = missing || match.Tainted != nil || in.stateOf(p).Free(p, match, a.admin) < match.Match.Count()
		total += match.Match.Count()
	}
	if missing || total == 0 || total > resourceapi.AllocationResultsMaxSize {
		return no
	}
	return yes
}

// preference is the score of choosing this alternative (KEP-4816).
func (a *alternative) preference() int64 {
	if !a.request.prioritized {
		return 0
	}
	return int64(resourceapi.FirstAvailableDeviceRequestMaxSize - a.position)
}
