package allocator

import (
	"encoding/binary"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// classes partitions the devices of a node: two devices are in one class if every alternative and every
// constraint sees them alike. It serves two shortcuts:
//
//   - If giving a device to a place leads nowhere, giving that place a later device of the same class is not
//     the way to the first answer: exchanging the two would give an answer that comes earlier.
//   - If the rest of the requests could not be satisfied once, they cannot be after picks that differ only in
//     which devices of a class were taken, not in how many.
type classes struct {
	of    []int32 // by device
	count int

	// matters has, by position in the order, the classes that the requests from there on may take.
	matters []bitset.Set
	// buried has the states in which the rest of the requests cannot be satisfied.
	buried map[string]struct{}
	taken  []int  // by class; scratch
	key    []byte // scratch
}

// maxBuried bounds the memory of one search.
const maxBuried = 1 << 16

// classify makes the classes. With admin access there are none, because a device that an earlier claim took may
// then be picked again, which makes it different from one that was not taken.
func (s *search) classify() {
	if s.reqs.admin {
		return
	}
	c := &classes{of: make([]int32, s.words*64)}
	known := make(map[string]int32)
	values := make(map[inventory.AttributeValue]uint64)
	next := uint64(0)
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
					n, ok := values[value]
					if !ok || value.Kind == inventory.UnknownKind {
						next++
						n = next
						values[value] = n
					}
					key = binary.AppendUvarint(key, n)
				}
			}
			class, ok := known[string(key)]
			if !ok {
				class = int32(len(known))
				known[string(key)] = class
			}
			c.of[device] = class
		}
	}
	c.count = len(known)
	c.taken = make([]int, c.count)
	s.classes = c
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
		c.taken[c.of[pick.device]]++
	}
	claim := s.reqs.requests[s.order[i]].claim
	c.key = append(c.key[:0], byte(i), byte(i>>8), byte(s.used[claim]))
	for class := c.matters[i].Next(0); class >= 0; class = c.matters[i].Next(class + 1) {
		c.key = binary.AppendUvarint(c.key, uint64(c.taken[class]))
	}
	// Only constraints of this claim can still matter: later claims have not begun. All devices of one class
	// have the same values, so the classes picked under a constraint stand for its values.
	for _, constraint := range s.reqs.claims[claim].constraints {
		clear(c.taken)
		for _, pick := range s.picks {
			a := s.reqs.lanes[pick.lane]
			if a.request.claim == claim && constraint.appliesTo(a) {
				c.taken[c.of[pick.device]] = 1
				if !constraint.distinct {
					break // the first stands for all
				}
			}
		}
		for _, n := range c.taken {
			c.key = append(c.key, byte(n))
		}
	}
	_, dead = c.buried[string(c.key)]
	return string(c.key), dead
}

// bury notes that the state leads nowhere.
func (c *classes) bury(state string) {
	if len(c.buried) < maxBuried {
		c.buried[state] = struct{}{}
	}
}
