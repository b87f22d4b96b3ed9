// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"math/bits"
	"slices"

	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/flow"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// open is a request that still wants devices, in a relaxed form: it may take any device that one of its
// alternatives may take, and wants as few as the most modest of them.
type open struct {
	request    *compiled.Request
	candidates bitset.Set
	wanted     int
	admin      bool
	// choices are the alternatives if there are several that may do.
	choices []choice
}

// choice is one alternative of an open request.
type choice struct {
	candidates bitset.Set
	wanted     int
}

// pruning cuts off what cannot become an answer, by necessary conditions that are cheap to check.
type pruning struct {
	*state
	bounds bounds

	flow        flow.Flow // scratch
	opens       []open
	choices     []choice
	seekers     []flow.Seeker
	constraints []*compiled.Constraint
}

// open begins in a new state.
func (pr *pruning) open() {
	pr.bounds.open()
	pr.opens, pr.choices = pr.opens[:0], pr.choices[:0]
}

// close forgets everything but the memory.
func (pr *pruning) close() {
	clear(pr.opens[:cap(pr.opens)])
	clear(pr.choices[:cap(pr.choices)])
	clear(pr.seekers[:cap(pr.seekers)])
	clear(pr.constraints[:cap(pr.constraints)])
}

// promising tells whether what is picked so far may lead to an answer. It checks necessary conditions only;
// false is certain, true is not. The i-th request of the order has k devices already and takes further ones only
// from the position from on; i is -1 before the first request.
//
//   - Every open request must find enough devices that are not taken and that the constraints admit.
//   - A matchAttribute constraint must have one value with enough devices for all requests under it; a
//     distinctAttribute constraint enough different values.
//   - All open requests together must find enough devices without taking any twice (Hall's condition, decided
//     by a flow over groups of devices that are open to the same requests).
//   - What is left of counters and of capacity must do for all open requests together, each taking as little as
//     it can (bounds.go), and partitions must be packed into what they are parts of (pack.go).
//   - With each value that a matchAttribute constraint may get, all this must be so for the devices of that value.
//
// The last two are looked at only once a request has all its devices, for they cost most.
func (pr *pruning) promising(i, k, from int) bool {
	mark := pr.mark()
	defer pr.takeBack(mark)
	requests, ok := pr.openRequests(i, k, from)
	if !ok || !pr.isEnough(requests) {
		return false
	}
	isWhole := len(requests) == 0 || i < 0 || requests[0].request != pr.reqs.Requests[pr.order[i]]
	if len(requests) < 2 || !isWhole {
		return true
	}
	if pr.classes != nil && pr.ledger.consumers != nil && !pr.packable(requests) {
		return false
	}
	for _, claim := range pr.reqs.Claims {
		budget := maxValues
		constraints := pr.unbound(pr.constraints[:0], claim.Constraints, requests)
		pr.constraints = constraints[:0]
		if !pr.assignable(i+1, requests, constraints, nil, &budget) {
			return false
		}
	}
	return true
}

// mark is how much of the search's own memory is in use.
type mark struct {
	arena          []uint64
	opens, choices int
}

func (pr *pruning) mark() mark { return mark{pr.arena, len(pr.opens), len(pr.choices)} }

// takeBack gives back the sets, open requests and choices that were made since the mark.
func (pr *pruning) takeBack(m mark) {
	if &m.arena[:1][0] == &pr.arena[:1][0] {
		pr.arena = pr.arena[:len(m.arena)]
	}
	pr.opens, pr.choices = pr.opens[:m.opens], pr.choices[:m.choices]
}

// openRequests returns the open requests. Not ok means that one has too few devices to choose from.
func (pr *pruning) openRequests(i, k, from int) (requests []open, ok bool) {
	first := len(pr.opens)
	if i >= 0 {
		r := pr.reqs.Requests[pr.order[i]]
		a := r.Alternatives[pr.chosen[r.Index]]
		if wanted := pr.lanes[a.Lane].wanted - k; wanted > 0 && !a.All {
			o := open{request: a.Request, candidates: pr.available(a), wanted: wanted, admin: a.Admin}
			pr.deviceOrder.from(o.candidates, from)
			if pr.classes != nil && k > 0 && !pr.groupings.orderMatters(a) {
				o.candidates.AndNot(pr.classes.excluded[len(pr.picks)-1])
			}
			pr.opens = append(pr.opens, o)
		}
	}
	for _, r := range pr.order[i+1:] {
		later := pr.reqs.Requests[r]
		o := open{request: later, wanted: -1}
		firstChoice := len(pr.choices)
		for _, a := range later.Alternatives {
			if pr.lanes[a.Lane].hopeless {
				continue
			}
			next := choice{candidates: pr.available(a), wanted: pr.lanes[a.Lane].wanted}
			if next.candidates.Count() < next.wanted {
				continue
			}
			if o.wanted < 0 {
				o.candidates, o.wanted = next.candidates, next.wanted
			} else {
				if len(pr.choices) == firstChoice {
					first := choice{candidates: pr.newSet(), wanted: o.wanted}
					copy(first.candidates, o.candidates)
					pr.choices = append(pr.choices, first)
				}
				pr.choices = append(pr.choices, next)
				o.candidates.Or(next.candidates)
				o.wanted = min(o.wanted, next.wanted)
			}
			o.admin = o.admin || a.Admin
		}
		if o.wanted < 0 {
			return nil, false
		}
		if len(pr.choices) > firstChoice {
			o.choices = slices.Clip(pr.choices[firstChoice:])
		}
		pr.opens = append(pr.opens, o)
	}
	requests = slices.Clip(pr.opens[first:])
	for i := range requests {
		if requests[i].candidates.Count() < requests[i].wanted {
			return nil, false
		}
	}
	return requests, true
}

// isFlow tells whether the open requests find their devices exactly if the constraints can have values with which a flow finds
// them: if nothing is shared, no request has a choice, and no values must differ.
func (pr *pruning) isFlow(requests []open) bool {
	for i := range requests {
		o := &requests[i]
		if len(o.request.Alternatives) > 1 || o.request.Alternatives[0].All || o.admin ||
			o.candidates.Intersects(pr.ledger.consumers) || o.candidates.Intersects(pr.ledger.shareable) ||
			o.candidates.Intersects(pr.lanes[o.request.Alternatives[0].Lane].errors) ||
			slices.ContainsFunc(o.request.Alternatives[0].Constraints, func(c *compiled.Constraint) bool { return c.Distinct }) {
			return false
		}
	}
	return len(requests) <= 64
}

// maxValues bounds for how many values of the constraints of one claim it is asked what would follow.
const maxValues = 32

// unbound appends the matchAttribute constraints that have no value yet and that more than one device will be under.
func (pr *pruning) unbound(to, all []*compiled.Constraint, requests []open) []*compiled.Constraint {
	for _, c := range all {
		if !c.Distinct && len(pr.bound[c.Index].values) == 0 && wantedUnder(c, requests) > 1 {
			to = append(to, c)
		}
	}
	return to
}

// wantedUnder counts the devices that the open requests will certainly take under the constraint.
func wantedUnder(c *compiled.Constraint, requests []open) (total int) {
	for i := range requests {
		if o := &requests[i]; bindsAll(c, o) {
			total += o.wanted
		}
	}
	return total
}

// assignable tells whether the constraints may have values, all together, with which the open requests, those from the
// i-th of the order on, find enough devices. It is true if that is not known after as many values as the budget has. Of values
// that nothing can tell apart one is tried, unless they are of a part in which a constraint has a value already.
func (pr *pruning) assignable(i int, requests []open, constraints []*compiled.Constraint, parts []int32, budget *int) bool {
	if len(constraints) == 0 {
		return true
	}
	c, rest := constraints[0], constraints[1:]
	g := pr.groupings.of(c)
	// The search has to come to a device for which the attribute cannot be derived to know that.
	if wanted := wantedUnder(c, requests); wanted == 0 || (wanted == 1 && !g.unknown.Empty()) || !g.errors.Empty() {
		return pr.assignable(i, requests, rest, parts, budget)
	}
	type likeness struct{ content, value int32 }
	var tried []likeness
	mark := pr.mark()
	for _, of := range g.groups {
		group := of.Devices
		pr.takeBack(mark)
		narrowed, ok := pr.narrow(requests, c, group)
		if !ok {
			continue
		}
		used := parts
		if pr.classes != nil {
			device := group.Next(0)
			for pr.classes.of[device] < 0 || pr.classes.values[c.Index][device] == 0 {
				device = group.Next(device + 1)
			}
			n := pr.classes.of[device]
			if !slices.Contains(parts, n) {
				like := likeness{pr.classes.content(pr.classes.view(i), n), pr.classes.values[c.Index][device]}
				if slices.Contains(tried, like) {
					continue
				}
				tried = append(tried, like)
			}
			used = append(slices.Clip(parts), n)
		}
		if *budget--; *budget < 0 {
			return true
		}
		if pr.isEnough(narrowed) && (len(rest) > 0 || pr.classes == nil || pr.ledger.consumers == nil || pr.packable(narrowed)) &&
			pr.assignable(i, narrowed, rest, used, budget) {
			return true
		}
	}
	return false
}

// narrow leaves the requests under the constraint only the devices of one value. Not ok means that these are too few.
func (pr *pruning) narrow(requests []open, c *compiled.Constraint, group bitset.Set) (narrowed []open, ok bool) {
	for i := range requests {
		if o := &requests[i]; bindsAll(c, o) && o.candidates.AndCount(group) < o.wanted {
			return nil, false
		}
	}
	within := func(set bitset.Set) bitset.Set {
		out := pr.newSet()
		copy(out, set)
		out.And(group)
		return out
	}
	first := len(pr.opens)
	pr.opens = append(pr.opens, requests...)
	narrowed = slices.Clip(pr.opens[first:])
	for i := range narrowed {
		o := &narrowed[i]
		if !bindsAll(c, o) {
			continue
		}
		if o.choices == nil {
			o.candidates = within(o.candidates)
			continue
		}
		choices, firstChoice := o.choices, len(pr.choices)
		o.candidates, o.wanted, o.choices = pr.newSet(), -1, nil
		for _, next := range choices {
			if next.candidates = within(next.candidates); next.candidates.Count() >= next.wanted {
				pr.choices = append(pr.choices, next)
				o.candidates.Or(next.candidates)
				if o.wanted < 0 || next.wanted < o.wanted {
					o.wanted = next.wanted
				}
			}
		}
		if o.wanted < 0 {
			return nil, false
		}
		o.choices = slices.Clip(pr.choices[firstChoice:])
	}
	return narrowed, true
}

// isEnough tells whether there may be enough devices for all of the requests.
func (pr *pruning) isEnough(requests []open) bool {
	for _, claim := range pr.reqs.Claims {
		for _, c := range claim.Constraints {
			if !pr.satisfiable(c, requests) {
				return false
			}
		}
	}
	return pr.matchable(requests) && pr.bounds.affordable(requests)
}

// available are the devices that the alternative could take next, were it its turn. Devices that cannot be
// judged count: the search has to come to them to know.
func (pr *pruning) available(a *compiled.Alternative) bitset.Set {
	l := &pr.lanes[a.Lane]
	set := pr.newSet()
	copy(set, l.candidates)
	set.Or(l.errors)
	set.AndNot(pr.takenFor(a))
	pr.ledger.dropUnaffordable(a, l, set)
	for _, c := range a.Constraints {
		b, g := &pr.bound[c.Index], pr.groupings.seenBy(c, a)
		switch {
		case set.Intersects(g.errors):
			// The search has to come to a device for which the attribute cannot be derived to know that.
		case len(b.values) == 0:
			set.And(g.has)
		case c.Distinct:
			for _, value := range b.values {
				set.AndNot(g.devices(value))
			}
			set.AndNot(g.unknown)
			set.And(g.has)
		case len(b.common()) == 1:
			set.And(g.devices(b.common()[0]))
		default:
			matching := pr.newSet()
			for _, value := range b.common() {
				matching.Or(g.devices(value))
			}
			set.And(matching)
		}
	}
	return set
}

// satisfiable tells whether the open requests may satisfy the constraint. A request that could choose an
// alternative to which the constraint does not apply is left out.
func (pr *pruning) satisfiable(c *compiled.Constraint, requests []open) bool {
	total := wantedUnder(c, requests)
	if total == 0 || (total == 1 && len(pr.bound[c.Index].values) == 0) {
		return true
	}
	g := pr.groupings.of(c)
	if !g.errors.Empty() {
		return true
	}
	if c.Distinct {
		return pr.enoughValues(c, g, requests, total)
	}
	common := pr.bound[c.Index].common()
	for _, group := range g.groups {
		if (len(common) == 0 || slices.Contains(common, group.Value)) && pr.groupSuffices(c, group.Devices, requests, total) {
			return true
		}
	}
	// A single device of unknown kind is a group of its own.
	return total == 1 && !g.unknown.Empty()
}

// groupSuffices tells whether the devices of one value are enough for all open requests under the constraint.
func (pr *pruning) groupSuffices(c *compiled.Constraint, group bitset.Set, requests []open, total int) bool {
	if pr.ledger.shareable == nil && group.Count() < total {
		return false
	}
	union := 0
	for w := range group {
		var word, shareable uint64
		if pr.ledger.shareable != nil {
			shareable = pr.ledger.shareable[w]
		}
		for i := range requests {
			if bindsAll(c, &requests[i]) {
				word |= requests[i].candidates[w]
				// Each request may have a share.
				union += bits.OnesCount64(requests[i].candidates[w] & group[w] & shareable)
			}
		}
		union += bits.OnesCount64(word & group[w] &^ shareable)
	}
	if union < total {
		return false
	}
	for i := range requests {
		if o := &requests[i]; bindsAll(c, o) && !pr.fitsGroup(c, o, group) {
			return false
		}
	}
	return true
}

// fitsGroup tells whether the request may find its devices in the group of one value, given each other
// constraint that applies to it, one at a time.
func (pr *pruning) fitsGroup(c *compiled.Constraint, o *open, group bitset.Set) bool {
	if o.candidates.AndCount(group) < o.wanted {
		return false
	}
	for _, other := range pr.reqs.Claims[c.Claim].Constraints {
		if other == c || o.wanted < 2 || !bindsAll(other, o) {
			continue
		}
		best, values := 0, 0
		g := pr.groupings.of(other)
		if !g.errors.Empty() {
			continue
		}
		for i := range g.groups {
			second, n := g.groups[i].Devices, 0
			for w := range second {
				n += bits.OnesCount64(o.candidates[w] & group[w] & second[w])
			}
			best = max(best, n)
			if n > 0 {
				values++
			}
		}
		if !g.unknown.Empty() {
			best, values = max(best, 1), values+1
		}
		if (other.Distinct && values < o.wanted) || (!other.Distinct && best < o.wanted) {
			return false
		}
	}
	return true
}

// enoughValues tells whether the open requests under the constraint find as many different values as they want devices,
// by a flow of requests to values.
func (pr *pruning) enoughValues(c *compiled.Constraint, g *grouping, requests []open, total int) bool {
	// A device of unknown kind may come first.
	spare := 0
	if !g.unknown.Empty() {
		spare = 1
	}
	f := pr.flow.Begin()
	under := pr.seekers[:0]
	for i := range requests {
		if o := &requests[i]; bindsAll(c, o) && o.wanted > 0 && len(under) < 64 {
			under = append(under, flow.Seeker{Candidates: o.candidates, Wanted: o.wanted})
			f.Want(o.wanted)
		}
	}
	pr.seekers = under
	values := 0
	for _, group := range g.groups {
		var mask uint64
		for i := range under {
			if under[i].Candidates.Intersects(group.Devices) {
				mask |= 1 << i
			}
		}
		if mask != 0 {
			f.Add(mask)
			values++
		}
	}
	if values+spare < total {
		return false
	}
	if spare > 0 {
		f.Add(1<<len(under) - 1)
	}
	return f.Saturates()
}

// bindsAll tells whether the constraint applies to the request whichever alternative it chooses.
func bindsAll(c *compiled.Constraint, o *open) bool {
	if o.request.Claim != c.Claim {
		return false
	}
	for _, a := range o.request.Alternatives {
		if !slices.Contains(a.Constraints, c) {
			return false
		}
	}
	return true
}
