package allocator

import (
	"cmp"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// deviceOrder is the order in which a search tries the devices of a node. Its zero value is the order of their
// numbers, which is upstream's. Which answer is the first one follows from it; whether there is one does not.
//
// It is where policies differ: what a device is worth to others, such as the links of its neighbours or the placements
// that it leaves, belongs into worth.
type deviceOrder struct {
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
	return cmp.Or(cmp.Compare(w.unjudged, o.unjudged), cmp.Compare(w.unready, o.unready), cmp.Compare(w.size, o.size), cmp.Compare(w.portion, o.portion), cmp.Compare(w.left, o.left))
}

// preferSteps bounds the look for an answer in the order of a policy. Many looks end after fewer steps than shortPrefer,
// so that it does not pay to share what they find.
const preferSteps, shortPrefer = 512, 32

// prefer looks for the first answer in the order of the policy, after one was found in the order of FirstFit. If it
// finds none in so many steps that one stays: a policy never costs a pod its node. It returns false if more steps may
// change that.
func (s *search) prefer(steps int) (settled bool) {
	s.firstFit.set(s)
	s.begin(s.order)
	s.classes, s.careful, s.stuck, s.limit = nil, true, false, s.steps+steps
	s.orderDevices()
	if s.request(0) {
		return true
	}
	settled = !s.stuck
	s.err, s.selectorError, s.stuck = nil, nil, false
	s.firstFit.restore(s)
	return settled
}

// solution is what a search found.
type solution struct {
	picks        []pick
	chosen, used []int
}

func (f *solution) set(s *search) {
	f.picks, f.chosen, f.used = append(f.picks[:0], s.picks...), append(f.chosen[:0], s.chosen...), append(f.used[:0], s.used...)
}

func (f *solution) restore(s *search) {
	s.picks, s.chosen, s.used = append(s.picks[:0], f.picks...), append(s.chosen[:0], f.chosen...), append(s.used[:0], f.used...)
}

// orderDevices puts the devices into the order of the policy.
func (s *search) orderDevices() {
	o := &s.deviceOrder
	o.ranked = true
	n := s.words * 64
	o.position = slices.Grow(o.position[:0], n)[:n]
	o.worth = slices.Grow(o.worth[:0], n)[:n]
	clear(o.worth)
	o.devices = o.devices[:0]
	for device := range n {
		o.devices = append(o.devices, int32(device))
	}
	for i := range s.lanes {
		for device := s.lanes[i].errors.Next(0); device >= 0; device = s.lanes[i].errors.Next(device + 1) {
			o.worth[device].unjudged = 1
		}
	}
	for _, set := range s.comparable() {
		s.weigh(set)
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
	for w := range min(position/64, len(set)) {
		set[w] = 0
	}
	if w := position / 64; w < len(set) {
		set[w] &= ^uint64(0) << (uint(position) & 63)
	}
}

// comparable are the sets of devices that have to be compared: those that one request may take, and those of requests
// that may take the same device.
func (s *search) comparable() []bitset.Set {
	sets := s.deviceOrder.sets[:0]
	for i := range s.lanes {
		together := s.newSet()
		copy(together, s.lanes[i].candidates)
		sets = slices.DeleteFunc(sets, func(set bitset.Set) bool {
			if !set.Intersects(together) {
				return false
			}
			together.Or(set)
			return true
		})
		sets = append(sets, together)
	}
	s.deviceOrder.sets = sets
	return sets
}

// weigh finds what these devices are worth.
func (s *search) weigh(devices bitset.Set) {
	o := &s.deviceOrder
	s.findCommonCapacities(devices)
	n := len(o.names)
	o.most = append(o.most[:0], make([]float64, n)...)
	o.sizes = slices.Grow(o.sizes[:0], n*len(o.worth))[:n*len(o.worth)]
	for device := devices.Next(0); device >= 0; device = devices.Next(device + 1) {
		for k, name := range o.names {
			size := s.capacityOf(device, name)
			o.sizes[device*n+k], o.most[k] = size, max(o.most[k], size)
		}
	}
	for device := devices.Next(0); device >= 0; device = devices.Next(device + 1) {
		w := &o.worth[device]
		if p := s.poolOf(device); len(s.pools[p].Device(device-s.starts[p]).BindingConditions) > 0 {
			w.unready = 1
		}
		for k, most := range o.most {
			if most > 0 {
				w.size += o.sizes[device*n+k] / most
			}
		}
		if s.ledger.isShared(device) {
			continue // takes nothing more of counters
		}
		for _, use := range s.usesOf(device) {
			if total := s.pools[s.poolOf(device)].Pool.Counters.All[use.Counter].Total.Float(); total > 0 {
				w.portion += use.Amount.Float() / total
				w.left += s.ledger.countersOf(device)[use.Counter].Float() / total
			}
		}
	}
}

// findCommonCapacities finds the names of the capacities that all these devices have, in order. Only by those can they
// be compared.
func (s *search) findCommonCapacities(devices bitset.Set) {
	names, first := s.deviceOrder.names[:0], true
	for device := devices.Next(0); device >= 0; device = devices.Next(device + 1) {
		p := s.poolOf(device)
		capacity := s.pools[p].Device(device - s.starts[p]).Capacity
		if first {
			for name := range capacity {
				names = append(names, name)
			}
			first = false
			continue
		}
		names = slices.DeleteFunc(names, func(name resourceapi.QualifiedName) bool {
			_, has := capacity[name]
			return !has
		})
	}
	slices.Sort(names) // sums of fractions depend on their order
	s.deviceOrder.names = names
}

// capacityOf is how much the device has of a capacity, or, if it can be shared, how much is left.
func (s *search) capacityOf(device int, name resourceapi.QualifiedName) float64 {
	p := s.poolOf(device)
	i := device - s.starts[p]
	if s.ledger.shareable.Has(device) {
		k, _ := slices.BinarySearch(s.pools[p].Capacity(i).Names, name)
		return s.ledger.roomOf(device)[k].Float()
	}
	return amount.Of(s.pools[p].Device(i).Capacity[name].Value).Float()
}
