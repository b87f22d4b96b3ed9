// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// Policy says which of several valid allocations is chosen.
type Policy int

const (
	// FirstFit takes the first devices in the order of pools, slices and devices, exactly as upstream's
	// allocator does.
	FirstFit Policy = iota
	// SmallestFit takes the smallest devices that fit: those with the least capacity, of shared ones those with the least
	// left, then those that take the least of shared counters and leave the least of them. It does not take any that
	// FirstFit could not take, and it takes the first of those that are equal.
	SmallestFit
)

// deviceOrder is the order in which a search tries the devices of a node. Its zero value is the order of their
// numbers, which is upstream's. Which answer is the first one follows from it; whether there is one does not.
//
// It is where policies differ: what a device is worth to others, such as the links of its neighbours or the placements
// that it leaves, belongs into worth.
type deviceOrder struct {
	*offer
	ledger *ledger

	ranked   bool    // false if the position of a device is its number
	position []int32 // by device
	devices  []int32 // by position
	worth    []worth // by device
	// sizes has the capacities with these names of each device, by device; scratch.
	names []resourceapi.QualifiedName
	sizes []float64
	most  []float64 // the largest of each
	sets  []bitset.Set
}

// worth is what taking a device costs others, the most important measure first.
type worth struct {
	// unjudged is 1 for a device on which a selector failed, to which the search should not come without need.
	unjudged int
	// unready is 1 for a device with binding conditions, for which its pod would wait.
	unready int
	// size is the device's share of the largest one, by the capacities that all devices compared with it have; of a
	// device that several may share, what is left of those.
	size float64
	// portion is what it takes of the shared counters that it needs; left is what is left of those.
	portion, left float64
}

func (w worth) compare(o worth) int {
	return cmp.Or(cmp.Compare(w.unjudged, o.unjudged), cmp.Compare(w.unready, o.unready), cmp.Compare(w.size, o.size),
		cmp.Compare(w.portion, o.portion), cmp.Compare(w.left, o.left))
}

// rank puts the devices into the order of the policy.
func (o *deviceOrder) rank() {
	o.ranked = true
	n := o.words * 64
	o.position = slices.Grow(o.position[:0], n)[:n]
	o.worth = slices.Grow(o.worth[:0], n)[:n]
	clear(o.worth)
	o.devices = o.devices[:0]
	for device := range n {
		o.devices = append(o.devices, int32(device))
	}
	for i := range o.lanes {
		for device := o.lanes[i].errors.Next(0); device >= 0; device = o.lanes[i].errors.Next(device + 1) {
			o.worth[device].unjudged = 1
		}
	}
	for _, set := range o.comparable() {
		o.weigh(set)
	}
	slices.SortStableFunc(o.devices, func(a, b int32) int { return o.worth[a].compare(o.worth[b]) })
	for at, device := range o.devices {
		o.position[device] = int32(at)
	}
}

// at is the position of a device.
func (o *deviceOrder) at(device int) int {
	if !o.ranked {
		return device
	}
	return int(o.position[device])
}

// from takes those devices out of the set that come before the position.
func (o *deviceOrder) from(set bitset.Set, position int) {
	if o.ranked {
		for device := set.Next(0); device >= 0; device = set.Next(device + 1) {
			if o.at(device) < position {
				set.Remove(device)
			}
		}
		return
	}
	clear(set[:min(position/64, len(set))])
	if w := position / 64; w < len(set) {
		set[w] &= ^uint64(0) << (uint(position) & 63)
	}
}

// comparable are the sets of devices that have to be compared: those that one request may take, and those of requests
// that may take the same device.
func (o *deviceOrder) comparable() []bitset.Set {
	sets := o.sets[:0]
	for i := range o.lanes {
		together := o.newSet()
		copy(together, o.lanes[i].candidates)
		sets = slices.DeleteFunc(sets, func(set bitset.Set) bool {
			if !set.Intersects(together) {
				return false
			}
			together.Or(set)
			return true
		})
		sets = append(sets, together)
	}
	o.sets = sets
	return sets
}

// weigh finds what these devices are worth.
func (o *deviceOrder) weigh(devices bitset.Set) {
	o.findCommonCapacities(devices)
	n := len(o.names)
	o.most = append(o.most[:0], make([]float64, n)...)
	o.sizes = slices.Grow(o.sizes[:0], n*len(o.worth))[:n*len(o.worth)]
	for device := devices.Next(0); device >= 0; device = devices.Next(device + 1) {
		for k, name := range o.names {
			size := o.capacityOf(device, name)
			o.sizes[device*n+k], o.most[k] = size, max(o.most[k], size)
		}
	}
	for device := devices.Next(0); device >= 0; device = devices.Next(device + 1) {
		w := &o.worth[device]
		if p := o.poolOf(device); len(o.pools[p].Device(device-o.starts[p]).BindingConditions) > 0 {
			w.unready = 1
		}
		for k, most := range o.most {
			if most > 0 {
				w.size += o.sizes[device*n+k] / most
			}
		}
		if o.ledger.isShared(device) {
			continue // takes nothing more of counters
		}
		for _, use := range o.usesOf(device) {
			if total := o.pools[o.poolOf(device)].Pool.Counters.All[use.Counter].Total.Float(); total > 0 {
				w.portion += use.Amount.Float() / total
				w.left += o.ledger.countersOf(device)[use.Counter].Float() / total
			}
		}
	}
}

// findCommonCapacities finds the names of the capacities that all these devices have, in order. Only by those can they
// be compared.
func (o *deviceOrder) findCommonCapacities(devices bitset.Set) {
	names, first := o.names[:0], true
	for device := devices.Next(0); device >= 0; device = devices.Next(device + 1) {
		p := o.poolOf(device)
		capacity := o.pools[p].Device(device - o.starts[p]).Capacity
		if first {
			names, first = slices.AppendSeq(names, maps.Keys(capacity)), false
			continue
		}
		names = slices.DeleteFunc(names, func(name resourceapi.QualifiedName) bool {
			_, has := capacity[name]
			return !has
		})
	}
	slices.Sort(names) // sums of fractions depend on their order
	o.names = names
}

// capacityOf is how much the device has of a capacity, or, if it can be shared, how much is left.
func (o *deviceOrder) capacityOf(device int, name resourceapi.QualifiedName) float64 {
	p := o.poolOf(device)
	i := device - o.starts[p]
	if o.ledger.shareable.Has(device) {
		k, _ := slices.BinarySearch(o.pools[p].Capacity(i).Names, name)
		return o.ledger.roomOf(device)[k].Float()
	}
	return amount.Of(o.pools[p].Device(i).Capacity[name].Value).Float()
}

// next is the first device from the position on that is a candidate, or would be if it could be judged.
func (o *deviceOrder) next(l *lane, taken bitset.Set, from int) int {
	if o.ranked {
		for _, device := range o.devices[min(from, len(o.devices)):] {
			if device := int(device); (l.candidates.Has(device) || l.errors.Has(device)) && !taken.Has(device) {
				return device
			}
		}
		return -1
	}
	for w := from / 64; w < o.words; w++ {
		if word := l.word(w, taken, from); word != 0 {
			return w*64 + bits.TrailingZeros64(word)
		}
	}
	return -1
}

// word has, of the w-th 64 devices, the candidates, and what would be candidates if they could be judged, that are not taken and numbered
// at least from.
func (l *lane) word(w int, taken bitset.Set, from int) uint64 {
	word := l.candidates[w]
	if l.errors != nil {
		word |= l.errors[w]
	}
	word &^= taken[w]
	if w == from/64 {
		word &= ^uint64(0) << (uint(from) & 63)
	}
	return word
}

// countFrom counts what next would come to, without those excluded.
func (o *deviceOrder) countFrom(l *lane, taken, excluded bitset.Set, from int) int {
	n := 0
	if o.ranked {
		for device := o.next(l, taken, from); device >= 0; device = o.next(l, taken, o.at(device)+1) {
			n++
		}
		return n
	}
	for w := from / 64; w < o.words; w++ {
		word := l.word(w, taken, from)
		if excluded != nil {
			word &^= excluded[w]
		}
		n += bits.OnesCount64(word)
	}
	return n
}
