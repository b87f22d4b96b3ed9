// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package packing asks how many devices of each kind the parts of a node can give at the same time.
package packing

import (
	"slices"

	"stowage.dev/stowage/pkg/allocator/internal/counters"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
)

// Packing asks how many devices of each kind the parts of a node can give at the same time, where devices of a part
// share counters, as the partitions of a GPU do: that 9 partitions of one size and 4 of another fit into the sum of all
// GPUs does not mean that they can be cut from them. For each part all that it can give together is found, once for all
// parts that are alike; then the requests are distributed over the parts.
type Packing struct {
	// Need is what is wanted by kind: a kind is what requests want that may take exactly the same devices.
	Need Load
	// Loads are, by part, the most that it can give: none of these is at least another in all kinds.
	Loads [][]Load
	// weights are ways to add up the kinds: each device as one, as the part of the counters that it takes at least, and
	// as the part of the most that one part can give of its kind.
	weights [3][MaxKinds]int
	// rest has, by part, the most of each kind, and the most by each weight, that it and those after it can give.
	rest   []Load
	totals [][3]int
	failed map[packed]struct{}
	budget int
}

// Load is a number of devices by kind.
type Load [MaxKinds]uint8

// packed says that a part and those after it cannot give so much.
type packed struct {
	part int
	need Load
}

const (
	// MaxKinds is how many kinds of devices are told apart. Nothing is said about further ones.
	MaxKinds = 8
	// maxPacking bounds the steps of one question, and maxLoads those for what one part can give.
	maxPacking, maxLoads = 1500, 1500
)

// WeightUnit is the weight of all of one counter.
const WeightUnit = 1 << 20

// Gives is a device and the kinds that it is of.
type Gives struct {
	Kinds uint8
	Uses  []inventory.Use
}

// LoadsOf finds what devices can be had together, nil if there are too many ways.
func LoadsOf(list []Gives, left []amount.Amount) (loads []Load) {
	left = slices.Clone(left)
	seen := make(map[Load]struct{})
	steps := 0
	var have Load
	var add func(from int) bool
	add = func(from int) bool {
		if steps++; steps > maxLoads {
			return false
		}
		more := false
		for i := from; i < len(list); i++ {
			if counters.Affords(left, list[i].Uses) {
				more = true
				for _, u := range list[i].Uses {
					left[u.Counter] = left[u.Counter].Sub(u.Amount)
				}
				ok := true
				for k := range MaxKinds {
					if list[i].Kinds&(1<<k) != 0 && ok {
						have[k]++
						ok = add(i + 1)
						have[k]--
					}
				}
				for _, u := range list[i].Uses {
					left[u.Counter] = left[u.Counter].Add(u.Amount)
				}
				if !ok {
					return false
				}
			}
		}
		if !more {
			seen[have] = struct{}{}
		}
		return true
	}
	if !add(0) {
		return nil
	}
	for l := range seen {
		dominated := false
		for other := range seen {
			dominated = dominated || (other != l && other.covers(l))
		}
		if !dominated {
			loads = append(loads, l)
		}
	}
	return loads
}

func (l Load) covers(other Load) bool {
	for k := range l {
		if l[k] < other[k] {
			return false
		}
	}
	return true
}

func (l Load) weigh(weights *[MaxKinds]int) (sum int) {
	for k, n := range l {
		sum += int(n) * weights[k]
	}
	return sum
}

// New returns a packing of no parts, of which nothing is wanted.
func New() *Packing { return &Packing{failed: make(map[packed]struct{}), budget: maxPacking} }

// Weigh says that each device of the kind takes at least so much of the counters of its part, in [WeightUnit].
func (p *Packing) Weigh(kind, least int) { p.weights[0][kind], p.weights[1][kind] = 1, least }

// Fits tells whether the parts can give what is needed. It is true if that is not known after a number of steps.
func (p *Packing) Fits() bool {
	p.sum()
	return p.fits(0, p.Need)
}

// sum adds up what parts can give at most.
func (p *Packing) sum() {
	var most Load
	for _, loads := range p.Loads {
		for _, l := range loads {
			for k := range l {
				most[k] = max(most[k], l[k])
			}
		}
	}
	for k, n := range most {
		p.weights[2][k] = WeightUnit / max(1, int(n))
	}
	p.rest, p.totals = make([]Load, len(p.Loads)+1), make([][3]int, len(p.Loads)+1)
	for i := len(p.Loads) - 1; i >= 0; i-- {
		var most Load
		var totals [3]int
		for _, l := range p.Loads[i] {
			for k := range l {
				most[k] = max(most[k], l[k])
			}
			for w := range p.weights {
				totals[w] = max(totals[w], l.weigh(&p.weights[w]))
			}
		}
		for k := range most {
			p.rest[i][k] = uint8(min(255, int(p.rest[i+1][k])+int(most[k])))
		}
		for w := range totals {
			p.totals[i][w] = p.totals[i+1][w] + totals[w]
		}
	}
}

// fits tells whether the parts from one on can give so much.
func (p *Packing) fits(part int, need Load) bool {
	if need == (Load{}) {
		return true
	}
	if !p.rest[part].covers(need) {
		return false
	}
	for w := range p.weights {
		if p.totals[part][w] < need.weigh(&p.weights[w]) {
			return false
		}
	}
	key := packed{part, need}
	if _, failed := p.failed[key]; failed {
		return false
	}
	if p.budget--; p.budget < 0 {
		return true
	}
	for _, l := range p.Loads[part] {
		left := need
		for k := range l {
			left[k] -= min(left[k], l[k])
		}
		if p.fits(part+1, left) {
			return true
		}
	}
	p.failed[key] = struct{}{}
	return false
}
