package allocator

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

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
		if !s.ledger.isPlain(device) && l.candidates.Has(device) && !s.canCharge(a, device) {
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

// countersSuffice compares, for all counters of one name together, what is left with the least that each open
// request can do with.
func (s *search) countersSuffice(requests []open) bool {
	left := make(map[string]amount.Amount)
	for p, pool := range s.pools {
		if pool.Consumers() == nil {
			continue
		}
		for i, counter := range pool.Pool.Counters.All {
			if rest := s.ledger.counters[s.ledger.firstCounter[p]+i]; !rest.IsNegative() {
				left[counter.Name] = left[counter.Name].Add(rest)
			}
		}
	}
	for i := range requests {
		for name, least := range s.leastUses(&requests[i]) {
			for range requests[i].wanted {
				if left[name].Less(least) {
					return false
				}
				left[name] = left[name].Sub(least)
			}
		}
	}
	return true
}

// leastUses is what any device that the request may take uses at least, by the counters' name.
func (s *search) leastUses(o *open) map[string]amount.Amount {
	if len(o.request.alternatives) == 1 {
		return s.leastUsesOf(o.request.alternatives[0])
	}
	var least map[string]amount.Amount
	for _, a := range o.request.alternatives {
		if s.lanes[a.lane].hopeless {
			continue
		}
		uses := s.leastUsesOf(a)
		if len(uses) == 0 {
			return nil
		}
		if least == nil {
			least = maps.Clone(uses)
		} else {
			lower(least, uses)
		}
	}
	return least
}

// leastUsesOf is what any device that the alternative may take before anything is picked uses at least.
func (s *search) leastUsesOf(a *alternative) map[string]amount.Amount {
	l := &s.lanes[a.lane]
	if l.knowsUses {
		return l.leastUses
	}
	l.knowsUses = true
	for device := l.candidates.Next(0); device >= 0; device = l.candidates.Next(device + 1) {
		if !s.ledger.consumers.Has(device) || s.ledger.shareable.Has(device) {
			l.leastUses = nil // a share may cost nothing
			return nil
		}
		counters := s.pools[s.poolOf(device)].Pool.Counters.All
		uses := make(map[string]amount.Amount)
		for _, use := range s.usesOf(device) {
			name := counters[use.Counter].Name
			uses[name] = uses[name].Add(use.Amount)
		}
		if l.leastUses == nil {
			l.leastUses = uses
		} else {
			lower(l.leastUses, uses)
		}
	}
	return l.leastUses
}

// lower makes least the least of both.
func lower[K comparable](least, other map[K]amount.Amount) {
	for name := range least {
		if n, ok := other[name]; !ok {
			delete(least, name)
		} else if n.Less(least[name]) {
			least[name] = n
		}
	}
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
	most := 0
	byPart := make(map[[2]int][]int) // pool and part → devices
	for device := devices.Next(0); device >= 0; device = devices.Next(device + 1) {
		switch uses := s.usesOf(device); {
		case s.ledger.shareable.Has(device):
			most += requests
		case len(uses) == 0:
			most++
		default:
			p := s.poolOf(device)
			key := [2]int{p, s.pools[p].Pool.Counters.PartOf(uses[0])}
			byPart[key] = append(byPart[key], device)
		}
		// One of each part can be taken, as any candidate can.
		if most+len(byPart) >= enough {
			return enough
		}
	}
	for _, part := range byPart {
		most += s.mostOfPart(part)
	}
	return most
}

// mostOfPart is how many devices of one part can be taken at most, looking at one counter at a time.
func (s *search) mostOfPart(devices []int) int {
	uses := make(map[int][]amount.Amount) // counter → what devices use of it
	for _, device := range devices {
		for _, use := range s.usesOf(device) {
			uses[use.Counter] = append(uses[use.Counter], use.Amount)
		}
	}
	most := len(devices)
	left := s.countersOf(devices[0])
	for counter, amounts := range uses {
		slices.SortFunc(amounts, amount.Amount.Compare)
		rest, n := left[counter], len(devices)-len(amounts)
		for _, use := range amounts {
			if rest.Less(use) {
				break
			}
			rest = rest.Sub(use)
			n++
		}
		most = min(most, n)
	}
	return most
}

// need is what a request takes at least of one capacity of a device, as often as it needs shares.
type need struct {
	least  amount.Amount
	shares int
}

// roomSuffices tells whether the shareable devices may give as many shares as the open requests need beyond the
// devices that they can have for themselves. It looks at one capacity at a time.
func (s *search) roomSuffices(requests []open) bool {
	needs := make(map[resourceapi.QualifiedName][]need)
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
		for name, least := range s.leastTakes(o) {
			needs[name] = append(needs[name], need{least, shares})
		}
	}
	if total == 0 {
		return true
	}
	union.And(s.ledger.shareable)
	if total > needed*union.Count() {
		return false // one request has one share of a device
	}
	for name, list := range needs {
		if !s.fits(name, list, union) {
			return false
		}
	}
	return true
}

// fits tells whether the devices have room for what is needed of one capacity: in sum, and, for each size, as many times
// as that size or more is needed.
func (s *search) fits(name resourceapi.QualifiedName, needs []need, devices bitset.Set) bool {
	slices.SortFunc(needs, func(a, b need) int { return b.least.Compare(a.least) })
	possible := make([]int, len(needs)) // how many shares at most of those needs up to this one, which is the least of them
	var room amount.Amount
	for device := devices.Next(0); device >= 0; device = devices.Next(device + 1) {
		p := s.poolOf(device)
		k, ok := slices.BinarySearch(s.pools[p].Capacity(device-s.starts[p]).Names, name)
		if !ok {
			return true // takes nothing of it
		}
		left := s.roomOf(device)[k]
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

// leastTakes is what any share that the request may take takes at least, by capacity.
func (s *search) leastTakes(o *open) map[resourceapi.QualifiedName]amount.Amount {
	if len(o.request.alternatives) == 1 {
		return s.leastTakesOf(o.request.alternatives[0])
	}
	var least map[resourceapi.QualifiedName]amount.Amount
	for _, a := range o.request.alternatives {
		if takes := s.leastTakesOf(a); takes == nil {
			continue // no share
		} else if least == nil {
			least = maps.Clone(takes)
		} else {
			lower(least, takes)
		}
	}
	return least
}

// leastTakesOf is what any share that the alternative may take takes at least.
func (s *search) leastTakesOf(a *alternative) map[resourceapi.QualifiedName]amount.Amount {
	l := &s.lanes[a.lane]
	if l.knowsTakes {
		return l.leastTakes
	}
	l.knowsTakes = true
	for device := l.candidates.Next(0); device >= 0; device = l.candidates.Next(device + 1) {
		if !s.ledger.shareable.Has(device) {
			continue
		}
		p := s.poolOf(device)
		takes := make(map[resourceapi.QualifiedName]amount.Amount)
		for k, name := range s.pools[p].Capacity(device - s.starts[p]).Names {
			takes[name] = s.takes(a, device)[k]
		}
		if l.leastTakes == nil {
			l.leastTakes = takes
		} else {
			lower(l.leastTakes, takes)
		}
	}
	return l.leastTakes
}
