package allocator

import (
	"encoding/binary"
	"slices"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// classes partitions the devices of a node: two devices are in one class if every alternative and every
// constraint sees them alike, and taking either leaves the same to others. It serves two shortcuts:
//
//   - If giving a device to a place leads nowhere, giving that place a later device of the same class is not
//     the way to the first answer: exchanging the two would give an answer that comes earlier.
//   - If the rest of the requests could not be satisfied once, they cannot be after picks that differ only in
//     which devices of a class were taken, not in how many.
//
// Devices that share counters are exchanged only together: they form a part (part.go), and what is said above of a
// device is said of a part in its present state. A device that shares nothing with others is a part of its own.
type classes struct {
	of    []int32 // by device: its class while nothing of its part is picked
	count int

	parts *parts // nil if no device shares counters or allows multiple allocations

	// matters has, by position in the order, the classes that the requests from there on may take.
	matters []bitset.Set
	// buried has the states in which the rest of the requests cannot be satisfied.
	buried map[string]struct{}
	values map[inventory.AttributeValue]int // attribute value → number
	taken  []int                            // by class; scratch
	key    []byte                           // scratch
	bound  []int                            // scratch
}

// maxBuried bounds the memory of one search.
const maxBuried = 1 << 16

// classify makes the classes. With admin access there are none, because a device that an earlier claim took may
// then be picked again, which makes it different from one that was not taken.
func (s *search) classify() {
	if s.reqs.admin {
		return
	}
	c := &classes{of: make([]int32, s.words*64), values: make(map[inventory.AttributeValue]int)}
	if s.ledger.consumers != nil || s.ledger.shareable != nil {
		c.parts = newParts(s)
	}
	known := make(map[string]int32)
	unknown := 0
	var key []byte
	for p, pool := range s.pools {
		for i := range pool.Len() {
			device := s.starts[p] + i
			key = key[:0]
			for l := range s.lanes {
				var b byte
				if s.lanes[l].candidates.Has(device) {
					b |= 1
				}
				if s.lanes[l].errors.Has(device) {
					b |= 2
				}
				key = append(key, b)
			}
			for _, claim := range s.reqs.claims {
				for _, constraint := range claim.constraints {
					value := s.value(constraint, device)
					if value.Kind == inventory.UnknownKind {
						unknown++
						key = binary.AppendVarint(key, -int64(unknown)) // like no other
						continue
					}
					key = binary.AppendVarint(key, int64(c.number(value)))
				}
			}
			c.of[device] = intern(known, key)
		}
	}
	if c.parts != nil {
		c.parts.refine(s, c.of)
		for _, class := range c.of {
			c.count = max(c.count, int(class)+1)
		}
	} else {
		c.count = len(known)
	}
	c.taken = make([]int, c.count)
	s.classes = c
}

func intern(known map[string]int32, key []byte) int32 {
	n, ok := known[string(key)]
	if !ok {
		n = int32(len(known))
		known[string(key)] = n
	}
	return n
}

// number tells attribute values apart. All of unknown kind have one number.
func (c *classes) number(value inventory.AttributeValue) int {
	if value.Kind == inventory.UnknownKind {
		value = inventory.AttributeValue{Kind: inventory.UnknownKind}
	}
	n, ok := c.values[value]
	if !ok {
		n = len(c.values)
		c.values[value] = n
	}
	return n
}

// begin prepares for a search in the order that s has now.
func (c *classes) begin(s *search) {
	c.buried = make(map[string]struct{})
	c.matters = make([]bitset.Set, len(s.order)+1)
	c.matters[len(s.order)] = bitset.New(c.count)
	for i := len(s.order) - 1; i >= 0; i-- {
		c.matters[i] = c.matters[i+1].Clone()
		for _, a := range s.reqs.requests[s.order[i]].alternatives {
			candidates := s.lanes[a.lane].candidates
			for device := candidates.Next(0); device >= 0; device = candidates.Next(device + 1) {
				c.matters[i].Add(int(c.of[device]))
			}
		}
	}
}

// dead tells whether the requests from the i-th on are known to be impossible in the present state, and returns
// the state for bury.
func (c *classes) dead(s *search, i int) (state string, dead bool) {
	clear(c.taken)
	for _, pick := range s.picks {
		if c.parts == nil || c.parts.isSimple(pick.device) {
			c.taken[c.of[pick.device]]++
		}
	}
	claim := s.reqs.requests[s.order[i]].claim
	c.key = append(c.key[:0], byte(i), byte(i>>8), byte(s.used[claim]))
	for class := c.matters[i].Next(0); class >= 0; class = c.matters[i].Next(class + 1) {
		c.key = binary.AppendUvarint(c.key, uint64(c.taken[class]))
	}
	if c.parts != nil {
		c.key = c.parts.appendStates(s, c.key, func(device int) bool { return c.matters[i].Has(int(c.of[device])) })
	}
	// Only constraints of this claim can still matter: later claims have not begun.
	for _, constraint := range s.reqs.claims[claim].constraints {
		c.bound = c.bound[:0]
		for _, value := range s.bound[constraint.index].values {
			c.bound = append(c.bound, c.number(value))
			if !constraint.distinct {
				break // the first stands for all
			}
		}
		slices.Sort(c.bound)
		c.key = binary.AppendUvarint(c.key, uint64(len(c.bound)))
		for _, n := range c.bound {
			c.key = binary.AppendUvarint(c.key, uint64(n))
		}
	}
	_, dead = c.buried[string(c.key)]
	return string(c.key), dead
}

// at is the class of a device as things are, for a request that takes devices numbered at least from.
func (c *classes) at(s *search, device, from int) int32 {
	if c.parts == nil || c.parts.isSimple(device) {
		return c.of[device]
	}
	return c.parts.class(s, device, from)
}

// bury notes that the state leads nowhere.
func (c *classes) bury(state string) {
	if len(c.buried) < maxBuried {
		c.buried[state] = struct{}{}
	}
}
