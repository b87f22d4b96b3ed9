package allocator

import (
	"context"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/allocator/internal/poolstate"
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

// SelectorError is a CEL selector, or the CEL expression of a derived attribute, that failed at run time on one device,
// or a required capacity that cannot be compared with the device's.
type SelectorError struct {
	// Namespace, Claim and Request name what asked.
	Namespace, Claim, Request string
	// Class is the DeviceClass if the selector is the class's; empty if it is the request's own.
	Class string
	// Attribute is the attribute that the expression derives; empty if it is a selector.
	Attribute resourceapi.FullyQualifiedName
	// Expression is the selector; empty if it is the required capacity.
	Expression string
	// Driver, Pool and Device name the device.
	Driver, Pool, Device string
	// Err is what CEL said.
	Err error
}

func (e *SelectorError) Error() string {
	explanation := e.explanation()
	return explanation.String()
}

func (e *SelectorError) explanation() explain.SelectorError {
	return explain.SelectorError{
		Namespace: e.Namespace, Claim: e.Claim, Request: e.Request, DeviceClass: e.Class, Attribute: e.Attribute, Expression: e.Expression,
		Driver: e.Driver, Pool: e.Pool, Device: e.Device, Message: fmt.Sprint(e.Err),
	}
}

func (e *SelectorError) Unwrap() error { return e.Err }

func selectorError(in *Input, a *alternative, p *inventory.NodePool, device int) *SelectorError {
	object := in.Requests.objects[a.request.claim]
	var expression string
	var ofClass bool
	var err error
	in.evaluate(func(ctx context.Context) error {
		var interrupted error
		expression, ofClass, err, interrupted = a.matcher.Error(ctx, p, device)
		return interrupted
	})
	e := &SelectorError{
		Namespace: object.Namespace, Claim: object.Name, Request: a.resultName(), Expression: expression,
		Driver: p.ID().Driver, Pool: p.ID().Pool, Device: p.Device(device).Name, Err: err,
	}
	if ofClass {
		e.Class = a.class.Object.Name
	}
	return e
}

// newFailure says why the node was refused. s is where the search that failed ended, nil if counting was enough.
func newFailure(in *Input, devices *inventory.NodeDevices, s *state) *Failure {
	if s != nil && s.err != nil {
		return newUndecided(devices, s.err)
	}
	f := &Failure{Pools: devices.Problems}
	f.Requests = make([]RequestCounts, 0, len(in.Requests.lanes)*len(devices.Pools))
	worst := fits
	var broken *SelectorError
	for _, r := range in.Requests.requests {
		best := noMatch
		for _, a := range r.alternatives {
			best = max(best, f.count(in, devices, a))
		}
		if best == noMatch && broken == nil {
			broken = firstError(in, devices, r)
		}
		worst = min(worst, best)
	}
	switch {
	case s != nil && s.selectorError != nil:
		f.Reason, f.SelectorError = explain.ReasonSelectorError, s.selectorError
	case s != nil && s.tooMany:
		f.Reason = explain.ReasonTooMany
	case len(devices.Problems) > 0 && in.Requests.anyAll():
		f.Reason = explain.ReasonPool
	case worst == fits:
		f.Reason = explain.ReasonConstraints
		f.countConstraints(s)
	case worst == noMatch && broken != nil:
		f.Reason, f.SelectorError = explain.ReasonSelectorError, broken
	default:
		f.Reason = worst.reason()
		if worst == noMatch && len(devices.Problems) > 0 {
			f.Reason = explain.ReasonPool
		}
	}
	if in.interrupted != nil {
		return newUndecided(devices, in.interrupted)
	}
	return f
}

// newUndecided says that the search ended early.
func newUndecided(devices *inventory.NodeDevices, err error) *Failure {
	return &Failure{Reason: explain.ReasonUndecided, Pools: devices.Problems, Err: err}
}

// firstError returns the first device on which a selector of the request failed, if the request would get enough
// devices were those on which one failed to match.
func firstError(in *Input, devices *inventory.NodeDevices, r *request) *SelectorError {
	for _, a := range r.alternatives {
		possible := 0
		var first *SelectorError
		for _, p := range devices.Pools {
			match := in.match(a, p)
			possible += match.Match.Count() + match.Errors.Count()
			if first == nil && match.Errors != nil {
				first = selectorError(in, a, p, match.Errors.Next(0))
			}
		}
		if first != nil && possible >= a.count {
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
	return [...]explain.Reason{explain.ReasonNoMatch, explain.ReasonUnsupported, explain.ReasonTainted, explain.ReasonHeld, explain.ReasonTooMany, explain.ReasonConstraints}[l]
}

// count adds the counts for one alternative and says how far it gets.
func (f *Failure) count(in *Input, devices *inventory.NodeDevices, a *alternative) level {
	matching, supported, untainted, free := 0, 0, 0, 0
	for _, p := range devices.Pools {
		match := in.match(a, p)
		c := RequestCounts{
			Claim: a.request.claim, Request: a.request.position, Alternative: a.position, Pool: p, Wanted: a.count,
			Devices:      p.Visible(),
			DeviceCounts: explain.DeviceCounts{Failing: match.Errors.Count(), Matching: match.Match.Count(), TooSmall: match.Small.Count()},
		}
		if c.Matching+c.Failing+c.TooSmall < c.Devices {
			in.evaluate(func(ctx context.Context) (err error) {
				c.FilteredByClass, c.FilteredBy, err = a.matcher.Rejections(ctx, p)
				return err
			})
		}
		c.sortMatching(p, match, in.stateOf(p), a)
		matching += c.Matching
		supported += c.Matching - c.Unsupported
		untainted += c.Matching - c.Unsupported - c.Tainted
		free += c.Free
		f.Requests = append(f.Requests, c)
	}
	wanted := a.count
	if a.all {
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
func (c *RequestCounts) sortMatching(p *inventory.NodePool, match *inventory.PoolMatch, state *poolstate.State, a *alternative) {
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
			c.Taints[a.matcher.RefusedTaint(p.Device(i)).Key]++
		}
	}
	c.Tainted = take(match.Tainted)
	if !a.admin {
		c.Foreign = rest.AndCount(state.Foreign)
		c.Held = take(state.Held)
	}
	c.Incompatible = take(state.Incompatible)
	if state.HasShares() {
		for i := p.Shareable().Next(0); i >= 0; i = p.Shareable().Next(i + 1) {
			if rest.Has(i) && state.LacksRoom(p, match, i) {
				rest.Remove(i)
				c.Full++
			}
		}
	}
	c.Exhausted = c.Full + take(state.Short)
	c.Free = rest.Count()
}

// countConstraints says how far each matchAttribute constraint gets when nothing else is asked for.
func (f *Failure) countConstraints(s *state) {
	if s == nil {
		return
	}
	for i := range s.reqs.claims {
		for _, c := range s.reqs.claims[i].constraints {
			if c.distinct {
				continue
			}
			counts := ConstraintCounts{Claim: i, Constraint: c.position, Attribute: c.attribute}
			union := s.newSet()
			for _, r := range s.reqs.claims[i].requests {
				least := -1
				for _, a := range r.alternatives {
					if c.appliesTo(a) {
						union.Or(s.lanes[a.lane].candidates)
						if wanted := s.lanes[a.lane].wanted; least < 0 || wanted < least {
							least = wanted
						}
					}
				}
				counts.Wanted += max(0, least)
			}
			for _, of := range s.groupings.of(c).groups {
				group := of.Devices
				counts.Best = max(counts.Best, union.AndCount(group))
			}
			f.Constraints = append(f.Constraints, counts)
		}
	}
}
