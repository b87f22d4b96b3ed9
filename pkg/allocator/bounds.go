package allocator

import (
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
	var least map[string]amount.Amount
	for device := o.candidates.Next(0); device >= 0; device = o.candidates.Next(device + 1) {
		if !s.ledger.consumers.Has(device) || s.ledger.shareable.Has(device) {
			return nil // a share may cost nothing
		}
		counters := s.pools[s.poolOf(device)].Pool.Counters.All
		uses := make(map[string]amount.Amount)
		for _, use := range s.usesOf(device) {
			name := counters[use.Counter].Name
			uses[name] = uses[name].Add(use.Amount)
		}
		if least == nil {
			least = uses
			continue
		}
		for name := range least {
			if use, ok := uses[name]; !ok {
				delete(least, name)
			} else if use.Less(least[name]) {
				least[name] = use
			}
		}
	}
	return least
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

// roomSuffices tells whether the shareable devices may give as many shares as the open requests need beyond the
// devices that they can have for themselves: by the number of the least shares that each device has room for, and
// by the sums of each capacity.
func (s *search) roomSuffices(requests []open) bool {
	needed := 0
	sums := make(map[resourceapi.QualifiedName]amount.Amount)
	union := s.newSet()
	for i := range requests {
		o := &requests[i]
		n := o.wanted - o.candidates.AndNotCount(s.ledger.shareable)
		if n <= 0 {
			continue
		}
		needed += n
		for name, least := range s.leastTakes(o) {
			for range n {
				sums[name] = sums[name].Add(least)
			}
		}
		union.Or(o.candidates)
	}
	if needed == 0 {
		return true
	}
	possible := 0
	for device := union.Next(0); device >= 0; device = union.Next(device + 1) {
		if s.ledger.shareable.Has(device) {
			possible += s.mostShares(requests, device)
			p := s.poolOf(device)
			room := s.roomOf(device)
			for k, name := range s.pools[p].Capacity(device - s.starts[p]).Names {
				if sum, ok := sums[name]; ok && !room[k].IsNegative() {
					sums[name] = sum.Sub(room[k])
				}
			}
		}
	}
	if possible < needed {
		return false
	}
	for _, sum := range sums {
		if (amount.Amount{}).Less(sum) {
			return false
		}
	}
	return true
}

// leastTakes is what any share that the request may take takes at least, by capacity.
func (s *search) leastTakes(o *open) map[resourceapi.QualifiedName]amount.Amount {
	var least map[resourceapi.QualifiedName]amount.Amount
	for device := o.candidates.Next(0); device >= 0; device = o.candidates.Next(device + 1) {
		if !s.ledger.shareable.Has(device) {
			continue
		}
		p := s.poolOf(device)
		names := s.pools[p].Capacity(device - s.starts[p]).Names
		for _, a := range o.request.alternatives {
			if !s.lanes[a.lane].candidates.Has(device) {
				continue
			}
			takes := s.takes(a, device)
			if least == nil {
				least = make(map[resourceapi.QualifiedName]amount.Amount)
				for k, name := range names {
					least[name] = takes[k]
				}
				continue
			}
			for name := range least {
				if k, ok := slices.BinarySearch(names, name); !ok {
					delete(least, name)
				} else if takes[k].Less(least[name]) {
					least[name] = takes[k]
				}
			}
		}
	}
	return least
}

// mostShares is how many of the open requests can have a share of the device at most.
func (s *search) mostShares(requests []open, device int) int {
	limit := 0
	var least []amount.Amount
	for i := range requests {
		if !requests[i].candidates.Has(device) {
			continue
		}
		limit++
		for _, a := range requests[i].request.alternatives {
			if !s.lanes[a.lane].candidates.Has(device) {
				continue
			}
			takes := s.takes(a, device)
			if least == nil {
				least = slices.Clone(takes)
			}
			for k := range least {
				if takes[k].Less(least[k]) {
					least[k] = takes[k]
				}
			}
		}
	}
	most := limit
	for k, room := range s.roomOf(device)[:len(least)] {
		most = min(most, room.Times(least[k], limit))
	}
	return most
}
