package allocator

import (
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// open is a request that still wants devices, in a relaxed form: it may take any device that one of its
// alternatives may take, and wants as few as the most modest of them.
type open struct {
	request    *request
	candidates bitset.Set
	wanted     int
	admin      bool
}

// promising tells whether what is picked so far may lead to an answer. It checks necessary conditions only;
// false is certain, true is not. The i-th request of the order has k devices already and takes further ones only
// from the number from on; i is -1 before the first request.
//
//   - Every open request must find enough devices that are not taken and that the constraints admit.
//   - A matchAttribute constraint must have one value with enough devices for all requests under it; a
//     distinctAttribute constraint enough different values.
//   - All open requests together must find enough devices without taking any twice (Hall's condition, decided
//     by a flow over groups of devices that are open to the same requests).
//   - What is left of counters and of capacity must do for all open requests together, each taking as little as
//     it can (bounds.go).
func (s *search) promising(i, k, from int) bool {
	mark := len(s.arena)
	arena := s.arena
	defer func() {
		// Sets made here are not needed any more.
		if &arena[:1][0] == &s.arena[:1][0] {
			s.arena = s.arena[:mark]
		}
	}()
	var requests []open
	if i >= 0 {
		r := s.reqs.requests[s.order[i]]
		a := r.alternatives[s.chosen[r.index]]
		if wanted := s.lanes[a.lane].wanted - k; wanted > 0 && !a.all {
			o := open{request: a.request, candidates: s.available(a), wanted: wanted, admin: a.admin}
			for w := range min(from/64, s.words) {
				o.candidates[w] = 0
			}
			if from/64 < s.words {
				o.candidates[from/64] &= ^uint64(0) << (uint(from) & 63)
			}
			requests = append(requests, o)
		}
	}
	for _, r := range s.order[i+1:] {
		later := s.reqs.requests[r]
		o := open{request: later, wanted: -1}
		for _, a := range later.alternatives {
			if s.lanes[a.lane].hopeless {
				continue
			}
			candidates := s.available(a)
			if wanted := s.lanes[a.lane].wanted; candidates.Count() >= wanted {
				if o.wanted < 0 {
					o.candidates, o.wanted = candidates, wanted
				} else {
					o.candidates.Or(candidates)
					o.wanted = min(o.wanted, wanted)
				}
				o.admin = o.admin || a.admin
			}
		}
		if o.wanted < 0 {
			return false
		}
		requests = append(requests, o)
	}
	for i := range requests {
		if requests[i].candidates.Count() < requests[i].wanted {
			return false
		}
	}
	for _, claim := range s.reqs.claims {
		for _, c := range claim.constraints {
			if !s.satisfiable(c, requests) {
				return false
			}
		}
	}
	return s.matchable(requests) && s.affordable(requests)
}

// available are the devices that the alternative could take next, were it its turn. Devices that cannot be
// judged count: the search has to come to them to know.
func (s *search) available(a *alternative) bitset.Set {
	l := &s.lanes[a.lane]
	set := s.newSet()
	copy(set, l.candidates)
	set.Or(l.errors)
	set.AndNot(s.takenFor(a))
	s.dropUnaffordable(a, l, set)
	for _, c := range a.constraints {
		have := s.bound[c.index].values
		if len(have) == 0 {
			set.And(s.grouping(c).has)
			continue
		}
		g := s.grouping(c)
		if c.distinct {
			for _, value := range have {
				if i, ok := g.index[value]; ok {
					set.AndNot(g.sets[i])
				}
			}
			set.AndNot(g.unknown)
			set.And(g.has)
		} else if i, ok := g.index[have[0]]; ok {
			set.And(g.sets[i])
		} else {
			clear(set)
		}
	}
	return set
}

// grouping has the devices of the node by their value of one constraint's attribute.
type grouping struct {
	index   map[inventory.AttributeValue]int // value → index in sets
	sets    []bitset.Set
	unknown bitset.Set // devices whose value is of an unknown kind
	has     bitset.Set // devices that have the attribute
}

func (s *search) grouping(c *constraint) *grouping {
	if g := s.groups[c.index]; g != nil {
		return g
	}
	g := &grouping{
		index:   make(map[inventory.AttributeValue]int),
		unknown: make(bitset.Set, s.words),
		has:     make(bitset.Set, s.words),
	}
	for p, pool := range s.pools {
		column := pool.Attribute(c.attribute)
		for i := range pool.Len() {
			device := s.starts[p] + i
			value := column.Value(i)
			switch value.Kind {
			case inventory.NoAttribute:
				continue
			case inventory.UnknownKind:
				g.unknown.Add(device)
			default:
				n, ok := g.index[value]
				if !ok {
					n = len(g.sets)
					g.index[value] = n
					g.sets = append(g.sets, make(bitset.Set, s.words))
				}
				g.sets[n].Add(device)
			}
			g.has.Add(device)
		}
	}
	s.groups[c.index] = g
	return g
}

// satisfiable tells whether the open requests may satisfy the constraint. A request that could choose an
// alternative to which the constraint does not apply is left out.
func (s *search) satisfiable(c *constraint, requests []open) bool {
	total := 0
	for i := range requests {
		if o := &requests[i]; bindsAll(c, o) {
			total += o.wanted
		}
	}
	if total == 0 || (total == 1 && len(s.bound[c.index].values) == 0) {
		return true
	}
	g := s.grouping(c)
	if c.distinct {
		return s.enoughValues(c, g, requests, total)
	}
	for _, group := range g.sets {
		if s.groupSuffices(c, group, requests, total) {
			return true
		}
	}
	// A single device of unknown kind is a group of its own.
	return total == 1 && !g.unknown.Empty()
}

// groupSuffices tells whether the devices of one value are enough for all open requests under the constraint.
func (s *search) groupSuffices(c *constraint, group bitset.Set, requests []open, total int) bool {
	if s.ledger.shareable == nil && group.Count() < total {
		return false
	}
	union := 0
	for w := range group {
		var word, shareable uint64
		if s.ledger.shareable != nil {
			shareable = s.ledger.shareable[w]
		}
		for i := range requests {
			if bindsAll(c, &requests[i]) {
				word |= requests[i].candidates[w]
				// Each request may have a share.
				union += onesCount(requests[i].candidates[w] & group[w] & shareable)
			}
		}
		union += onesCount(word & group[w] &^ shareable)
	}
	if union < total {
		return false
	}
	for i := range requests {
		if o := &requests[i]; bindsAll(c, o) && !s.fitsGroup(c, o, group) {
			return false
		}
	}
	return true
}

// fitsGroup tells whether the request may find its devices in the group of one value, given each other
// constraint that applies to it, one at a time.
func (s *search) fitsGroup(c *constraint, o *open, group bitset.Set) bool {
	if o.candidates.AndCount(group) < o.wanted {
		return false
	}
	for _, other := range s.reqs.claims[c.claim].constraints {
		if other == c || o.wanted < 2 || !bindsAll(other, o) {
			continue
		}
		best, values := 0, 0
		g := s.grouping(other)
		for _, second := range g.sets {
			n := 0
			for w := range second {
				n += onesCount(o.candidates[w] & group[w] & second[w])
			}
			best = max(best, n)
			if n > 0 {
				values++
			}
		}
		if !g.unknown.Empty() {
			best, values = max(best, 1), values+1
		}
		if (other.distinct && values < o.wanted) || (!other.distinct && best < o.wanted) {
			return false
		}
	}
	return true
}

// enoughValues tells whether each open request under the constraint, and all together, find as many different
// values as they want devices.
func (s *search) enoughValues(c *constraint, g *grouping, requests []open, total int) bool {
	together := 0
	for _, group := range g.sets {
		for i := range requests {
			if bindsAll(c, &requests[i]) && requests[i].candidates.Intersects(group) {
				together++
				break
			}
		}
	}
	// A device of unknown kind may come first.
	spare := 0
	if !g.unknown.Empty() {
		spare = 1
	}
	if together+spare < total {
		return false
	}
	for i := range requests {
		o := &requests[i]
		if !bindsAll(c, o) {
			continue
		}
		n := spare
		for _, group := range g.sets {
			if o.candidates.Intersects(group) {
				n++
			}
		}
		if n < o.wanted {
			return false
		}
	}
	return true
}

// bindsAll tells whether the constraint applies to the request whichever alternative it chooses.
func bindsAll(c *constraint, o *open) bool {
	if o.request.claim != c.claim {
		return false
	}
	for _, a := range o.request.alternatives {
		if !c.appliesTo(a) {
			return false
		}
	}
	return true
}
