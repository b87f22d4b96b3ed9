// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"iter"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/evaluation"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// FindLimits tells whether the requests can be satisfied at all: by one of the nodes, if nobody held anything. If not, it notes in the
// explanation what they exceed. Devices that are tainted, not supported, or cannot be judged count as if they could be had, and where a
// pool is incomplete or invalid nothing is said: what is told is certain as long as no devices are added. It looks at nodes until one would
// do, or ctx ends; in.Node and in.Usage are not used.
func FindLimits(ctx context.Context, in Input, e *explain.Explanation, nodes iter.Seq[*v1.Node]) {
	if len(e.Requests) != len(in.Requests.compiled.Lanes) {
		return
	}
	in.evaluator = evaluation.Evaluator{Ctx: ctx, Attempt: in.Attempt}
	l := newLimits(in.Requests.compiled)
	for node := range nodes {
		devices := in.Inventory.ForNode(node)
		if len(devices.Problems) > 0 || ctx.Err() != nil {
			return
		}
		l.look(&in, devices)
		if in.evaluator.Interrupted != nil {
			return
		}
		if l.areMet() {
			break
		}
	}
	if !l.areMet() {
		l.note(e)
		return
	}
	e.NeverTogether = isNeverTogether(ctx, in, e, nodes)
}

// isNeverTogether decides each node as if nobody held anything and nothing was tainted. It is false if that is not known.
func isNeverTogether(ctx context.Context, in Input, e *explain.Explanation, nodes iter.Seq[*v1.Node]) bool {
	uncertain := func(r explain.Request) bool { return r.Unsupported+r.Failing > 0 }
	if slices.ContainsFunc(e.Requests, uncertain) {
		return false
	}
	if slices.ContainsFunc(e.Requests, func(r explain.Request) bool { return r.Tainted > 0 }) {
		features := in.Requests.compiled.Features
		features.DeviceTaints = false
		requests, err := CompileWithin(ctx, in.Requests.compiled.Objects, in.Inventory, features)
		if err != nil {
			return false
		}
		in.Requests = requests
	}
	in.Policy, in.Scoring, in.Usage = FirstFit, NoScoring, usage.NewIndex().View()
	seen := false
	for node := range nodes {
		in.Node = node
		result := Check(ctx, in)
		if ctx.Err() != nil || result.Fits() || result.Failure.Reason == explain.ReasonUndecided ||
			result.Failure.Reason == explain.ReasonSelectorError {
			return false
		}
		seen = true
	}
	return seen
}

// limits are the most that one node has.
type limits struct {
	reqs  *compiled.Requests
	lanes []laneLimit
	// rivals are requests that ask for the same devices.
	rivals []rivals
}

// laneLimit is about one alternative.
type laneLimit struct {
	// most is how many of its devices the node with the most has; shareable tells that requests may share some.
	most      int
	shareable bool
	// largest are the greatest capacities of devices that pass all selectors, by name.
	largest map[resourceapi.QualifiedName]resource.Quantity
}

// rivals are requests without alternatives that take devices from each other.
type rivals struct {
	lanes []*compiled.Alternative
	asked int
}

func newLimits(reqs *compiled.Requests) *limits {
	l := &limits{reqs: reqs, lanes: make([]laneLimit, len(reqs.Lanes))}
	for i := range l.lanes {
		l.lanes[i].largest = make(map[resourceapi.QualifiedName]resource.Quantity)
	}
	for _, r := range reqs.Requests {
		a := r.Alternatives[0]
		if len(r.Alternatives) > 1 || a.All || a.Admin || a.Count == 0 {
			continue
		}
		at := slices.IndexFunc(l.rivals, func(o rivals) bool { return o.lanes[0].Matcher == a.Matcher })
		if at < 0 {
			at = len(l.rivals)
			l.rivals = append(l.rivals, rivals{})
		}
		l.rivals[at].lanes = append(l.rivals[at].lanes, a)
		l.rivals[at].asked += a.Count
	}
	return l
}

// look counts the devices of one node.
func (l *limits) look(in *Input, devices *inventory.NodeDevices) {
	for i, a := range l.reqs.Lanes {
		lane, n := &l.lanes[i], 0
		for _, p := range devices.Pools {
			match := in.evaluator.Match(a, p)
			n += match.Match.Count() + match.Errors.Count()
			lane.shareable = lane.shareable || match.Match.Intersects(p.Shareable())
			lane.lookAtCapacity(a, p, match)
		}
		lane.most = max(lane.most, n)
	}
}

func (l *laneLimit) lookAtCapacity(a *compiled.Alternative, p *inventory.NodePool, match *inventory.PoolMatch) {
	if a.Capacity == nil {
		return
	}
	for i := range p.Len() {
		if !match.Match.Has(i) && !match.Small.Has(i) {
			continue
		}
		for name := range a.Capacity.Requests {
			if has, ok := p.Device(i).Capacity[name]; ok && has.Value.Cmp(l.largest[name]) > 0 {
				l.largest[name] = has.Value
			}
		}
	}
}

// areMet tells whether every request alone, and those that are rivals together, find enough on some node.
func (l *limits) areMet() bool {
	for _, r := range l.reqs.Requests {
		if !slices.ContainsFunc(r.Alternatives, l.isMet) {
			return false
		}
	}
	return !slices.ContainsFunc(l.rivals, func(r rivals) bool { return !l.suffices(r) })
}

func (l *limits) isMet(a *compiled.Alternative) bool {
	wanted := a.Count
	if a.All {
		wanted = 1
	}
	return l.lanes[a.Lane].most >= wanted
}

// suffices tells whether there is enough for rivals, which ask for the same devices.
func (l *limits) suffices(r rivals) bool {
	lane := &l.lanes[r.lanes[0].Lane]
	return lane.shareable || lane.most >= r.asked
}

// note writes down what is exceeded.
func (l *limits) note(e *explain.Explanation) {
	for _, r := range l.rivals {
		if !l.suffices(r) {
			lane := r.lanes[0].Lane
			e.Requests[lane].Limit = &explain.Limit{Asked: r.asked, Devices: l.lanes[lane].most, Others: len(r.lanes) - 1}
		}
	}
	for i, a := range l.reqs.Lanes {
		if !l.isMet(a) {
			e.Requests[i].Limit = l.lanes[i].limit(a)
		}
	}
}

func (l *laneLimit) limit(a *compiled.Alternative) *explain.Limit {
	limit := &explain.Limit{Asked: a.Count, Devices: l.most}
	if l.most > 0 || a.Capacity == nil {
		return limit
	}
	for name, asked := range a.Capacity.Requests {
		if largest := l.largest[name]; asked.Cmp(largest) > 0 && (limit.Capacity == "" || name < limit.Capacity) {
			limit.Capacity, limit.AskedCapacity, limit.LargestCapacity = name, asked.String(), largest.String()
		}
	}
	return limit
}
