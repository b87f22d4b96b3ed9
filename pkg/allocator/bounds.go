package allocator

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// dropUnaffordable takes those devices out of set, which the alternative could take otherwise, for which too little
// is left. What is left only shrinks, so they are out of the question until a pick is taken back.
func (s *search) dropUnaffordable(a *alternative, l *lane, set bitset.Set) {
	if s.ledger.consumers == nil && s.ledger.shareable == nil {
		return
	}
	for device := set.Next(0); device >= 0; device = set.Next(device + 1) {
		if !s.ledger.isPlain(device) && l.candidates.Has(device) && !s.ledger.canCharge(a, device) {
			set.Remove(device)
		}
	}
}

// affordable tells whether what is left of counters and capacity may do for all open requests.
func (s *search) affordable(requests []open) bool {
	if s.ledger.consumers != nil && (!s.countersSuffice(requests) || !s.partsSuffice(requests)) {
		return false
	}
	return s.ledger.shareable == nil || s.roomSuffices(requests)
}

// named is an amount of a counter or a capacity, by the number that its name has in the search.
type named struct {
	name   int
	amount amount.Amount
}

// bounds is the memory for these questions.
type bounds struct {
	counterNames []string // by number
	namesOf      []int    // by counter of the ledger: the number of its name
	capacities   []resourceapi.QualifiedName

	left, least, device []named
	possible            []int
	needs               []need
	heads, next         []int // chains of devices: the first by part, and the one after, by device; -1 if there is none
	parts               []int
	uses                []inventory.Use
}

// numberOf is the number of the name, which it gets when it is first asked for.
func numberOf[T comparable](names *[]T, name T) int {
	n := slices.Index(*names, name)
	if n < 0 {
		n = len(*names)
		*names = append(*names, name)
	}
	return n
}

// find returns the amount with the name, nil if there is none.
func find(list []named, name int) *named {
	for i := range list {
		if list[i].name == name {
			return &list[i]
		}
	}
	return nil
}

// addNamed adds so much to the amount with the name.
func addNamed(list []named, name int, more amount.Amount) []named {
	if known := find(list, name); known != nil {
		known.amount = known.amount.Add(more)
		return list
	}
	return append(list, named{name, more})
}

// lower makes least the least of both, of what is in both.
func lower(least, other []named) []named {
	kept := least[:0]
	for _, n := range least {
		if o := find(other, n.name); o != nil {
			if o.amount.Less(n.amount) {
				n.amount = o.amount
			}
			kept = append(kept, n)
		}
	}
	return kept
}

// nameCounters numbers the names of all counters.
func (s *search) nameCounters() {
	b := &s.sums
	if len(b.namesOf) > 0 {
		return
	}
	b.counterNames = b.counterNames[:0]
	for p, pool := range s.pools {
		for range s.states[p].counters {
			b.namesOf = append(b.namesOf, numberOf(&b.counterNames, pool.Pool.Counters.All[len(b.namesOf)-s.ledger.firstCounter[p]].Name))
		}
	}
}

// countersSuffice compares, for all counters of one name together, what is left with the least that each open
// request can do with.
func (s *search) countersSuffice(requests []open) bool {
	s.nameCounters()
	b := &s.sums
	left := b.left[:0]
	for name := range b.counterNames {
		left = append(left, named{name: name})
	}
	b.left = left
	for counter, rest := range s.ledger.counters {
		if !rest.IsNegative() {
			of := &left[b.namesOf[counter]].amount
			*of = of.Add(rest)
		}
	}
	for i := range requests {
		for _, least := range s.leastUses(&requests[i]) {
			of := &left[least.name].amount
			for range requests[i].wanted {
				if of.Less(least.amount) {
					return false
				}
				*of = of.Sub(least.amount)
			}
		}
	}
	return true
}

// leastUses is what any device that the request may take uses at least, by the counters' name. It is true until the next
// call.
func (s *search) leastUses(o *open) []named {
	if len(o.request.alternatives) == 1 {
		return s.leastUsesOf(o.request.alternatives[0])
	}
	least, first := s.sums.least[:0], true
	for _, a := range o.request.alternatives {
		if s.lanes[a.lane].hopeless {
			continue
		}
		uses := s.leastUsesOf(a)
		if len(uses) == 0 {
			return nil
		}
		if first {
			least, first = append(least, uses...), false
			s.sums.least = least
		} else {
			least = lower(least, uses)
		}
	}
	return least
}

// leastUsesOf is what any device that the alternative may take before anything is picked uses at least.
func (s *search) leastUsesOf(a *alternative) []named {
	l := &s.lanes[a.lane]
	if l.knowsUses {
		return l.leastUses
	}
	l.knowsUses = true
	l.leastUses = l.leastUses[:0]
	first := true
	for device := l.candidates.Next(0); device >= 0; device = l.candidates.Next(device + 1) {
		if !s.ledger.consumers.Has(device) || s.ledger.shareable.Has(device) {
			l.leastUses = l.leastUses[:0] // a share may cost nothing
			return nil
		}
		names := s.sums.namesOf[s.ledger.firstCounter[s.poolOf(device)]:]
		uses := s.sums.device[:0]
		for _, use := range s.usesOf(device) {
			uses = addNamed(uses, names[use.Counter], use.Amount)
		}
		s.sums.device = uses
		if first {
			l.leastUses, first = append(l.leastUses, uses...), false
		} else {
			l.leastUses = lower(l.leastUses, uses)
		}
	}
	return l.leastUses
}

// partsSuffice tells whether the parts of the node, each by its own counters, may give as many devices as each open
// request wants, and as all want together. Devices of different parts have nothing to do with each other's counters.
func (s *search) partsSuffice(requests []open) bool {
	union, wanted := s.newSet(), 0
	for i := range requests {
		o := &requests[i]
		if o.admin {
			continue // may take a device that another request has
		}
		if o.wanted > s.mostFrom(o.candidates, 1, o.wanted) {
			return false
		}
		union.Or(o.candidates)
		wanted += o.wanted
	}
	return wanted <= s.mostFrom(union, len(requests), wanted)
}

// mostFrom is how many of the devices can be taken at most, at least if that is less than enough; each of the
// shareable ones by each of so many requests.
func (s *search) mostFrom(devices bitset.Set, requests, enough int) int {
	b := &s.sums
	b.heads = slices.Grow(b.heads[:0], len(s.ledger.counters))[:len(s.ledger.counters)]
	for i := range b.heads {
		b.heads[i] = -1
	}
	b.next = slices.Grow(b.next[:0], 64*s.words)[:64*s.words]
	b.parts = b.parts[:0]
	most := 0
	for device := devices.Next(0); device >= 0; device = devices.Next(device + 1) {
		switch uses := s.usesOf(device); {
		case s.ledger.shareable.Has(device):
			most += requests
		case len(uses) == 0:
			most++
		default:
			p := s.poolOf(device)
			part := s.ledger.firstCounter[p] + s.pools[p].Pool.Counters.PartOf(uses[0])
			if b.heads[part] < 0 {
				b.parts = append(b.parts, part)
			}
			b.next[device] = b.heads[part]
			b.heads[part] = device
		}
		// One of each part can be taken, as any candidate can.
		if most+len(b.parts) >= enough {
			return enough
		}
	}
	for _, part := range b.parts {
		most += s.mostOfPart(b.heads[part])
	}
	return most
}

// mostOfPart is how many devices of one part, a chain that begins with the given one, can be taken at most, looking at one
// counter at a time.
func (s *search) mostOfPart(first int) int {
	uses, devices := s.sums.uses[:0], 0
	for device := first; device >= 0; device = s.sums.next[device] {
		uses = append(uses, s.usesOf(device)...)
		devices++
	}
	s.sums.uses = uses
	slices.SortFunc(uses, func(a, b inventory.Use) int {
		return cmp.Or(cmp.Compare(a.Counter, b.Counter), a.Amount.Compare(b.Amount))
	})
	most := devices
	left := s.ledger.countersOf(first)
	for len(uses) > 0 {
		counter, users, served := uses[0].Counter, 0, 0
		for rest := left[counter]; users < len(uses) && uses[users].Counter == counter; users++ {
			if served == users && !rest.Less(uses[users].Amount) {
				rest = rest.Sub(uses[users].Amount)
				served++
			}
		}
		most = min(most, devices-users+served)
		uses = uses[users:]
	}
	return most
}

// need is what a request takes at least of one capacity of a device, as often as it needs shares.
type need struct {
	name   int
	least  amount.Amount
	shares int
}

// roomSuffices tells whether the shareable devices may give as many shares as the open requests need beyond the
// devices that they can have for themselves. It looks at one capacity at a time.
func (s *search) roomSuffices(requests []open) bool {
	needs := s.sums.needs[:0]
	union, needed, total := s.newSet(), 0, 0
	for i := range requests {
		o := &requests[i]
		shares := o.wanted - o.candidates.AndNotCount(s.ledger.shareable)
		if shares <= 0 {
			continue
		}
		needed++
		total += shares
		union.Or(o.candidates)
		for _, least := range s.leastTakes(o) {
			needs = append(needs, need{least.name, least.amount, shares})
		}
	}
	s.sums.needs = needs
	if total == 0 {
		return true
	}
	union.And(s.ledger.shareable)
	if total > needed*union.Count() {
		return false // one request has one share of a device
	}
	// The largest of each capacity first.
	slices.SortFunc(needs, func(a, b need) int { return cmp.Or(cmp.Compare(a.name, b.name), b.least.Compare(a.least)) })
	for len(needs) > 0 {
		n := 1
		for n < len(needs) && needs[n].name == needs[0].name {
			n++
		}
		if !s.fits(s.sums.capacities[needs[0].name], needs[:n], union) {
			return false
		}
		needs = needs[n:]
	}
	return true
}

// fits tells whether the devices have room for what is needed of one capacity, the largest first: in sum, and, for each
// size, as many times as that size or more is needed.
func (s *search) fits(name resourceapi.QualifiedName, needs []need, devices bitset.Set) bool {
	// How many shares at most of those needs up to this one, which is the least of them.
	possible := slices.Grow(s.sums.possible[:0], len(needs))[:len(needs)]
	s.sums.possible = possible
	clear(possible)
	var room amount.Amount
	for device := devices.Next(0); device >= 0; device = devices.Next(device + 1) {
		p := s.poolOf(device)
		k, ok := slices.BinarySearch(s.pools[p].Capacity(device-s.starts[p]).Names, name)
		if !ok {
			return true // takes nothing of it
		}
		left := s.ledger.roomOf(device)[k]
		if !left.IsNegative() {
			room = room.Add(left)
		}
		for last := range needs {
			rest := left
			for i := last; i >= 0 && !rest.Less(needs[i].least); i-- {
				rest = rest.Sub(needs[i].least)
				possible[last]++
			}
		}
	}
	wanted := 0
	for i, need := range needs {
		if wanted += need.shares; wanted > possible[i] {
			return false
		}
		for range need.shares {
			if room.Less(need.least) {
				return false
			}
			room = room.Sub(need.least)
		}
	}
	return true
}

// leastTakes is what any share that the request may take takes at least, by capacity. It is true until the next call.
func (s *search) leastTakes(o *open) []named {
	if len(o.request.alternatives) == 1 {
		takes, _ := s.leastTakesOf(o.request.alternatives[0])
		return takes
	}
	least, first := s.sums.least[:0], true
	for _, a := range o.request.alternatives {
		if takes, any := s.leastTakesOf(a); !any {
			continue // no share
		} else if first {
			least, first = append(least, takes...), false
			s.sums.least = least
		} else {
			least = lower(least, takes)
		}
	}
	return least
}

// leastTakesOf is what any share that the alternative may take takes at least, and whether it may take any.
func (s *search) leastTakesOf(a *alternative) (takes []named, any bool) {
	l := &s.lanes[a.lane]
	if l.knowsTakes {
		return l.leastTakes, l.mayShare
	}
	l.knowsTakes, l.leastTakes = true, l.leastTakes[:0]
	for device := l.candidates.Next(0); device >= 0; device = l.candidates.Next(device + 1) {
		if !s.ledger.shareable.Has(device) {
			continue
		}
		p := s.poolOf(device)
		own := s.sums.device[:0]
		for k, name := range s.pools[p].Capacity(device - s.starts[p]).Names {
			own = append(own, named{numberOf(&s.sums.capacities, name), s.takes(a, device)[k]})
		}
		s.sums.device = own
		if !l.mayShare {
			l.leastTakes, l.mayShare = append(l.leastTakes, own...), true
		} else {
			l.leastTakes = lower(l.leastTakes, own)
		}
	}
	return l.leastTakes, l.mayShare
}
