package allocator

import (
	"encoding/binary"
	"math"
	"slices"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
)

// packing asks how many devices of each kind the parts of a node can give at the same time, where devices of a part
// share counters, as the partitions of a GPU do: that 9 partitions of one size and 4 of another fit into the sum of all
// GPUs does not mean that they can be cut from them. For each part all that it can give together is found, once for all
// parts that are alike; then the requests are distributed over the parts.
type packing struct {
	// need is what is wanted by kind: a kind is what open requests want that may take exactly the same devices.
	need load
	// loads are, by part, the most that it can give: none of these is at least another in all kinds.
	loads [][]load
	// weights are ways to add up the kinds: each device as one, as the part of the counters that it takes at least, and
	// as the part of the most that one part can give of its kind.
	weights [3][maxKinds]int
	// rest has, by part, the most of each kind, and the most by each weight, that it and those after it can give.
	rest   []load
	totals [][3]int
	failed map[packed]struct{}
	budget int
}

// load is a number of devices by kind.
type load [maxKinds]uint8

// packed says that a part and those after it cannot give so much.
type packed struct {
	part int
	need load
}

const (
	// maxKinds is how many kinds of devices are told apart. Nothing is said about further ones.
	maxKinds = 8
	// maxPacking bounds the steps of one question, and maxLoads those for what one part can give.
	maxPacking, maxLoads = 1500, 1500
)

// packable tells whether the parts of the node can give the open requests what they want, each at least in number and
// regardless of constraints. It is true if that is not known. If some of the requests cannot be given all, all cannot.
func (pr *pruning) packable(requests []open) bool {
	p := &packing{failed: make(map[packed]struct{}), budget: maxPacking}
	var kinds []*open
	for i := range requests {
		o := &requests[i]
		// What does not add to what is wanted of the parts is left out.
		if o.wanted <= 0 || o.admin || o.candidates.Intersects(pr.ledger.shareable) || !o.candidates.Intersects(pr.ledger.consumers) {
			continue
		}
		n := slices.IndexFunc(kinds, func(other *open) bool { return slices.Equal(other.candidates, o.candidates) })
		if n < 0 {
			if n = len(kinds); n == maxKinds {
				continue
			}
			kinds = append(kinds, o)
			p.weights[0][n] = 1
			p.weights[1][n] = pr.leastPart(o)
		}
		p.need[n] += uint8(o.wanted) // at most 32 for each claim
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
			loads = loadsOf(pr.classes.gives, pr.ledger.countersOf(unit[0]))
			pr.classes.loads[string(key)] = loads
		}
		if loads == nil {
			return true
		}
		p.loads = append(p.loads, loads)
	}
	p.sum()
	return p.fits(0, p.need)
}

// weightUnit is the weight of all of one counter.
const weightUnit = 1 << 20

// leastPart is what any of the devices takes at least of the counters, as the sum of its parts of each.
func (pr *pruning) leastPart(o *open) int {
	least := math.MaxInt
	for device := o.candidates.Next(0); device >= 0; device = o.candidates.Next(device + 1) {
		counters, part := pr.pools[pr.poolOf(device)].Pool.Counters, 0
		for _, use := range pr.usesOf(device) {
			part += int(weightUnit * min(1, use.Amount.Over(counters.All[use.Counter].Total)))
		}
		least = min(least, part)
	}
	return least
}

// gives is a device and the kinds that it is of.
type gives struct {
	kinds uint8
	uses  []inventory.Use
}

// appendGives lists those of the devices that some kind has, and describes them in a way that is the same for parts that
// can give the same.
func (pr *pruning) appendGives(key []byte, list []gives, devices []int, kinds []*open) ([]byte, []gives) {
	counters := pr.classes.numbers[:0]
	for _, device := range devices {
		g := gives{uses: pr.usesOf(device)}
		for k, o := range kinds {
			if o.candidates.Has(device) {
				g.kinds |= 1 << k
			}
		}
		if g.kinds == 0 {
			continue
		}
		key = append(key, g.kinds)
		left := pr.ledger.countersOf(device)
		for _, u := range g.uses {
			n := slices.Index(counters, u.Counter)
			if n < 0 {
				n = len(counters)
				counters = append(counters, u.Counter)
			}
			key = binary.AppendUvarint(key, uint64(n)+1)
			key = left[u.Counter].Append(u.Amount.Append(key))
		}
		key = append(key, 0)
		list = append(list, g)
	}
	pr.classes.numbers = counters
	return key, list
}

// loadsOf finds what devices can be had together, nil if there are too many ways.
func loadsOf(list []gives, left []amount.Amount) (loads []load) {
	left = slices.Clone(left)
	seen := make(map[load]struct{})
	steps := 0
	var have load
	var add func(from int) bool
	add = func(from int) bool {
		if steps++; steps > maxLoads {
			return false
		}
		more := false
		for i := from; i < len(list); i++ {
			if affords(left, list[i].uses) {
				more = true
				for _, u := range list[i].uses {
					left[u.Counter] = left[u.Counter].Sub(u.Amount)
				}
				ok := true
				for k := range maxKinds {
					if list[i].kinds&(1<<k) != 0 && ok {
						have[k]++
						ok = add(i + 1)
						have[k]--
					}
				}
				for _, u := range list[i].uses {
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

func (l load) covers(other load) bool {
	for k := range l {
		if l[k] < other[k] {
			return false
		}
	}
	return true
}

func (l load) weigh(weights *[maxKinds]int) (sum int) {
	for k, n := range l {
		sum += int(n) * weights[k]
	}
	return sum
}

// sum adds up what parts can give at most.
func (p *packing) sum() {
	var most load
	for _, loads := range p.loads {
		for _, l := range loads {
			for k := range l {
				most[k] = max(most[k], l[k])
			}
		}
	}
	for k, n := range most {
		p.weights[2][k] = weightUnit / max(1, int(n))
	}
	p.rest, p.totals = make([]load, len(p.loads)+1), make([][3]int, len(p.loads)+1)
	for i := len(p.loads) - 1; i >= 0; i-- {
		var most load
		var totals [3]int
		for _, l := range p.loads[i] {
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
func (p *packing) fits(part int, need load) bool {
	if need == (load{}) {
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
	for _, l := range p.loads[part] {
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
