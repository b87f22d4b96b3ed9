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
//  3. Everything else is searched for, see search.
//  4. What fits is turned into allocations, what does not into counts.
func decide(ctx context.Context, in *Input, keep bool) Result {
	devices := in.Inventory.ForNode(in.Node)
	if plain := in.Requests.plain; plain != nil && !keep {
		switch plain.countOnly(devices, in) {
		case yes:
			var o occupancy
			o.add(devices, in, plain)
			return Result{Score: in.score(plain.preference(), o)}
		case no:
			return Result{Failure: newFailure(*in, devices, nil)}
		}
	}
	s := newSearch(ctx, *in, devices)
	defer s.release()
	if !s.run() {
		return Result{Failure: newFailure(*in, devices, s)}
	}
	s.prefer()
	result := Result{Score: s.score(devices)}
	if keep {
		result.Allocations = s.allocations()
	}
	return result
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
func (a *alternative) countOnly(devices *inventory.NodeDevices, in *Input) answer {
	if a.all {
		return a.countAll(devices, in)
	}
	free, independent := 0, true
	for i := range devices.Pools {
		var c count
		if t := tallyIn(devices, i, in.Usage); a.admin {
			c = t.state.count(devices.Pools[i], a)
		} else {
			c = t.count(devices, i, a)
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
	total := 0
	for _, p := range devices.Pools {
		match := a.matcher.On(p)
		if match.Errors != nil || match.Match.Intersects(p.Consumers()) {
			return unknown
		}
		if match.Tainted != nil || stateOf(p, in.Usage).free(p, match, a) < match.Match.Count() {
			return no
		}
		total += match.Match.Count()
	}
	if total == 0 || total > resourceapi.AllocationResultsMaxSize {
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
