// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// affordable tells whether what is left of counters and capacity may do for all open requests.
func (b *bounds) affordable(requests []open) bool {
	if b.ledger.consumers != nil && (!b.countersSuffice(requests) || !b.partsSuffice(requests)) {
		return false
	}
	return b.ledger.shareable == nil || b.roomSuffices(requests)
}

// named is an amount of a counter or a capacity, by the number that its name has in the search.
type named struct {
	name   int
	amount amount.Amount
}

// bounds is the memory for these questions.
type bounds struct {
	*offer
	ledger *ledger

	counterNames []string // by number
	namesOf      []int    // by counter of the ledger: the number of its name
	capacities   []resourceapi.QualifiedName

	left          []amount.Amount // by the number of a counter's name
	least, device []named
	possible      []int
	needs         []need
	heads, next   []int // chains of devices: the first by part, and the one after, by device; -1 if there is none
	parts         []int
	uses          []inventory.Use
}

// open forgets the names of another node.
func (b *bounds) open() { b.namesOf, b.capacities = b.namesOf[:0], b.capacities[:0] }

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

// lower makes least the least of both, of what is in both; or the first one's, before which there is none.
func lower(least, other []named, first bool) []named {
	if first {
		return append(least, other...)
	}
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
func (b *bounds) nameCounters() {
	if len(b.namesOf) > 0 {
		return
	}
	b.counterNames = b.counterNames[:0]
	for p, pool := range b.pools {
		for range b.states[p].Counters {
			b.namesOf = append(b.namesOf, numberOf(&b.counterNames, pool.Pool.Counters.All[len(b.namesOf)-b.ledger.firstCounter[p]].Name))
		}
	}
}

// countersSuffice compares, for all counters of one name together, what is left with the least that each open
// request can do with.
func (b *bounds) countersSuffice(requests []open) bool {
	b.nameCounters()
	left := slices.Grow(b.left[:0], len(b.counterNames))[:len(b.counterNames)]
	b.left = left
	clear(left)
	for counter, rest := range b.ledger.counters {
		if name := b.namesOf[counter]; !rest.IsNegative() {
			left[name] = left[name].Add(rest)
		}
	}
	for i := range requests {
		for _, least := range b.leastFor(&requests[i], b.leastUsesOf) {
			for range requests[i].wanted {
				if left[least.name].Less(least.amount) {
					return false
				}
				left[least.name] = left[least.name].Sub(least.amount)
			}
		}
	}
	return true
}

// leastFor is the least that the request needs of each counter, or of each capacity: of says what an alternative needs, and whether it has
// devices at all. If one needs nothing, so does the request. The list is true until the next call.
func (b *bounds) leastFor(o *open, of func(*compiled.Alternative) ([]named, bool)) []named {
	if len(o.request.Alternatives) == 1 {
		least, _ := of(o.request.Alternatives[0])
		return least
	}
	least, first := b.least[:0], true
	for _, a := range o.request.Alternatives {
		if other, counts := of(a); counts {
			if len(other) == 0 {
				return nil
			}
			least, first = lower(least, other, first), false
			b.least = least
		}
	}
	return least
}

// leastUsesOf is what any device that the alternative may take before anything is picked uses of counters at least, and whether it
// may take any.
func (b *bounds) leastUsesOf(a *compiled.Alternative) (uses []named, any bool) {
	l := &b.lanes[a.Lane]
	if l.knowsUses || l.hopeless {
		return l.leastUses, !l.hopeless
	}
	l.knowsUses = true
	l.leastUses = l.leastUses[:0]
	first := true
	for device := l.candidates.Next(0); device >= 0; device = l.candidates.Next(device + 1) {
		if !b.ledger.consumers.Has(device) || b.ledger.shareable.Has(device) {
			l.leastUses = l.leastUses[:0] // a share may cost nothing
			break
		}
		names := b.namesOf[b.ledger.firstCounter[b.poolOf(device)]:]
		uses := b.device[:0]
		for _, use := range b.usesOf(device) {
			uses = addNamed(uses, names[use.Counter], use.Amount)
		}
		b.device = uses
		l.leastUses, first = lower(l.leastUses, uses, first), false
	}
	return l.leastUses, true
}

// partsSuffice tells whether the parts of the node, each by its own counters, may give as many devices as each open
// request wants, and as all want together. Devices of different parts have nothing to do with each other's counters.
func (b *bounds) partsSuffice(requests []open) bool {
	union, wanted := b.newSet(), 0
	for i := range requests {
		o := &requests[i]
		if o.admin {
			continue // may take a device that another request has
		}
		if o.wanted > b.mostFrom(o.candidates, 1, o.wanted) {
			return false
		}
		union.Or(o.candidates)
		wanted += o.wanted
	}
	return wanted <= b.mostFrom(union, len(requests), wanted)
}

// mostFrom is how many of the devices can be taken at most, at least if that is less than enough; each of the
// shareable ones by each of so many requests.
func (b *bounds) mostFrom(devices bitset.Set, requests, enough int) int {
	b.heads = slices.Grow(b.heads[:0], len(b.ledger.counters))[:len(b.ledger.counters)]
	for i := range b.heads {
		b.heads[i] = -1
	}
	b.next = slices.Grow(b.next[:0], 64*b.words)[:64*b.words]
	b.parts = b.parts[:0]
	most := 0
	for device := devices.Next(0); device >= 0; device = devices.Next(device + 1) {
		switch uses := b.usesOf(device); {
		case b.ledger.shareable.Has(device):
			most += requests
		case len(uses) == 0:
			most++
		default:
			p := b.poolOf(device)
			part := b.ledger.firstCounter[p] + b.pools[p].Pool.Counters.PartOf(uses[0])
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
		most += b.mostOfPart(b.heads[part])
	}
	return most
}

// mostOfPart is how many devices of one part, a chain that begins with the given one, can be taken at most, looking at one
// counter at a time.
func (b *bounds) mostOfPart(first int) int {
	uses, devices := b.uses[:0], 0
	for device := first; device >= 0; device = b.next[device] {
		uses = append(uses, b.usesOf(device)...)
		devices++
	}
	b.uses = uses
	slices.SortFunc(uses, func(a, b inventory.Use) int {
		return cmp.Or(cmp.Compare(a.Counter, b.Counter), a.Amount.Compare(b.Amount))
	})
	most := devices
	left := b.ledger.countersOf(first)
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
func (b *bounds) roomSuffices(requests []open) bool {
	needs := b.needs[:0]
	union, needed, total := b.newSet(), 0, 0
	for i := range requests {
		o := &requests[i]
		shares := o.wanted - o.candidates.AndNotCount(b.ledger.shareable)
		if shares <= 0 {
			continue
		}
		needed++
		total += shares
		union.Or(o.candidates)
		for _, least := range b.leastFor(o, b.leastTakesOf) {
			needs = append(needs, need{least.name, least.amount, shares})
		}
	}
	b.needs = needs
	if total == 0 {
		return true
	}
	union.And(b.ledger.shareable)
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
		if !b.fits(b.capacities[needs[0].name], needs[:n], union) {
			return false
		}
		needs = needs[n:]
	}
	return true
}

// fits tells whether the devices have room for what is needed of one capacity, the largest first: in sum, and, for each
// size, as many times as that size or more is needed.
func (b *bounds) fits(name resourceapi.QualifiedName, needs []need, devices bitset.Set) bool {
	// How many shares at most of those needs up to this one, which is the least of them.
	possible := slices.Grow(b.possible[:0], len(needs))[:len(needs)]
	b.possible = possible
	clear(possible)
	var room amount.Amount
	for device := devices.Next(0); device >= 0; device = devices.Next(device + 1) {
		p := b.poolOf(device)
		k, ok := slices.BinarySearch(b.pools[p].Capacity(device-b.starts[p]).Names, name)
		if !ok {
			return true // takes nothing of it
		}
		left := b.ledger.roomOf(device)[k]
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

// leastTakesOf is what any share that the alternative may take takes at least, and whether it may take any.
func (b *bounds) leastTakesOf(a *compiled.Alternative) (takes []named, any bool) {
	l := &b.lanes[a.Lane]
	if l.knowsTakes {
		return l.leastTakes, l.mayShare
	}
	l.knowsTakes, l.leastTakes = true, l.leastTakes[:0]
	for device := l.candidates.Next(0); device >= 0; device = l.candidates.Next(device + 1) {
		if !b.ledger.shareable.Has(device) {
			continue
		}
		p := b.poolOf(device)
		own := b.device[:0]
		for k, name := range b.pools[p].Capacity(device - b.starts[p]).Names {
			own = append(own, named{numberOf(&b.capacities, name), b.takes(a, device)[k]})
		}
		b.device = own
		l.leastTakes, l.mayShare = lower(l.leastTakes, own, !l.mayShare), true
	}
	return l.leastTakes, l.mayShare
}
