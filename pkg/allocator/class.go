package allocator

import (
	"encoding/binary"

	"stowage.dev/stowage/pkg/inventory"
)

// beCareful switches the shortcuts on, after the greedy descent has failed once.
//
// Devices are put into classes: two devices are in one class if every alternative and every constraint sees
// them alike. If giving a device to a place leads nowhere, giving that place a later device of the same class
// leads nowhere either: exchanging the two in any answer would give an answer that comes earlier. With admin
// access that does not hold, because a device that an earlier claim took may be picked again.
func (s *search) beCareful() {
	if s.careful {
		return
	}
	s.careful = true
	if s.reqs.admin {
		return
	}
	s.classes = make([]int32, s.words*64)
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
				for _, c := range claim.constraints {
					value := s.value(c, device)
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
			s.classes[device] = class
		}
	}
}
