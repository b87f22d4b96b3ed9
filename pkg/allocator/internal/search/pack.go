// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"encoding/binary"
	"math"
	"slices"

	"stowage.dev/stowage/pkg/allocator/internal/packing"
)

// packable tells whether the parts of the node can give the open requests what they want, each at least in number and
// regardless of constraints. It is true if that is not known. If some of the requests cannot be given all, all cannot.
func (pr *pruning) packable(requests []open) bool {
	p := packing.New()
	var kinds []*open
	for i := range requests {
		o := &requests[i]
		// What does not add to what is wanted of the parts is left out.
		if o.wanted <= 0 || o.admin || o.candidates.Intersects(pr.ledger.shareable) || !o.candidates.Intersects(pr.ledger.consumers) {
			continue
		}
		n := slices.IndexFunc(kinds, func(other *open) bool { return slices.Equal(other.candidates, o.candidates) })
		if n < 0 {
			if n = len(kinds); n == packing.MaxKinds {
				continue
			}
			kinds = append(kinds, o)
			p.Weigh(n, pr.leastPart(o))
		}
		p.Need[n] += uint8(o.wanted) // at most 32 for each claim
	}
	for _, unit := range pr.classes.units {
		var key []byte
		key, pr.classes.gives = pr.appendGives(pr.classes.buffer[:0], pr.classes.gives[:0], unit, kinds)
		pr.classes.buffer = key
		if len(pr.classes.gives) == 0 {
			continue
		}
		loads, ok := pr.classes.loads[string(key)]
		if !ok {
			loads = packing.LoadsOf(pr.classes.gives, pr.ledger.countersOf(unit[0]))
			pr.classes.loads[string(key)] = loads
		}
		if loads == nil {
			return true
		}
		p.Loads = append(p.Loads, loads)
	}
	return p.Fits()
}

// leastPart is what any of the devices takes at least of the counters, as the sum of its parts of each.
func (pr *pruning) leastPart(o *open) int {
	least := math.MaxInt
	for device := o.candidates.Next(0); device >= 0; device = o.candidates.Next(device + 1) {
		counters, part := pr.pools[pr.poolOf(device)].Pool.Counters, 0
		for _, use := range pr.usesOf(device) {
			part += int(packing.WeightUnit * min(1, use.Amount.Over(counters.All[use.Counter].Total)))
		}
		least = min(least, part)
	}
	return least
}

// appendGives lists those of the devices that some kind has, and describes them in a way that is the same for parts that
// can give the same.
func (pr *pruning) appendGives(key []byte, list []packing.Gives, devices []int, kinds []*open) ([]byte, []packing.Gives) {
	counters := pr.classes.numbers[:0]
	for _, device := range devices {
		g := packing.Gives{Uses: pr.usesOf(device)}
		for k, o := range kinds {
			if o.candidates.Has(device) {
				g.Kinds |= 1 << k
			}
		}
		if g.Kinds == 0 {
			continue
		}
		key = append(key, g.Kinds)
		left := pr.ledger.countersOf(device)
		for _, u := range g.Uses {
			key = binary.AppendUvarint(key, uint64(numberOf(&counters, u.Counter))+1)
			key = left[u.Counter].Append(u.Amount.Append(key))
		}
		key = append(key, 0)
		list = append(list, g)
	}
	pr.classes.numbers = counters
	return key, list
}
