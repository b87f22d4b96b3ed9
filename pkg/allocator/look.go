package allocator

import (
	"crypto/sha256"
	"encoding/binary"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// fingerprint stands for all of a node that a search looks at. Two nodes with the same one have the same answer: it is
// a cryptographic hash.
type fingerprint [sha256.Size]byte

// look is the memory for a fingerprint.
type look struct {
	text   []byte
	values map[inventory.AttributeValue]int
	names  []resourceapi.QualifiedName
}

// fingerprint describes the node, after it was prepared for the search: not what its devices are, but what the requests
// see of them. So nodes are alike although each device has an address and a serial number of its own, and although they
// are called otherwise. Values of attributes are numbered as they come, because nothing but their equality counts.
//
// Whatever a search reads of its pools and their states has to be in it, in a form that can be read in one way only.
func (s *search) fingerprint() fingerprint {
	b := append(s.look.text[:0], byte(s.in.Policy))
	b = binary.AppendUvarint(b, uint64(len(s.pools)))
	for _, p := range s.pools {
		b = binary.AppendUvarint(b, uint64(p.Len()))
	}
	interesting := s.newSet()
	for i := range s.lanes {
		l := &s.lanes[i]
		b = appendFlag(binary.AppendVarint(b, int64(l.wanted)), l.hopeless)
		b = s.appendSet(s.appendSet(b, l.candidates), l.errors)
		interesting.Or(l.candidates)
		interesting.Or(l.errors)
	}
	for i := range s.reqs.claims {
		for _, c := range s.reqs.claims[i].constraints {
			b = s.appendValues(b, c)
		}
	}
	b = s.appendCounters(b)
	for device := interesting.Next(0); device >= 0; device = interesting.Next(device + 1) {
		if s.ledger.consumers.Has(device) {
			b = s.appendUses(b, device)
		}
		if s.ledger.shareable.Has(device) {
			b = s.appendRoom(b, device)
		}
		if s.in.Policy != FirstFit {
			b = s.appendCapacity(b, device)
		}
	}
	s.look.text = b
	return sha256.Sum256(b)
}

func appendFlag(b []byte, is bool) []byte {
	if is {
		return append(b, 1)
	}
	return append(b, 0)
}

func appendText(b []byte, text string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(text))), text...)
}

// appendSet appends a set of devices of the search, which may be nil.
func (s *search) appendSet(b []byte, set bitset.Set) []byte {
	b = appendFlag(b, set != nil)
	for _, word := range set {
		b = binary.LittleEndian.AppendUint64(b, word)
	}
	return b
}

// appendValues appends which devices have a value in common of the attribute that the constraint looks at, their own one
// and as alternatives derive it.
func (s *search) appendValues(b []byte, c *constraint) []byte {
	if s.look.values == nil {
		s.look.values = make(map[inventory.AttributeValue]int)
	}
	clear(s.look.values)
	for from := -1; from < len(c.derivations); from++ {
		for p, pool := range s.pools {
			var derivation *inventory.Derivation
			if from >= 0 {
				derivation = c.derivations[from]
			}
			column := s.column(c, derivation, p)
			for i := range pool.Len() {
				values := column.Values(i)
				b = appendFlag(b, column.Errors().Has(i))
				b = binary.AppendUvarint(b, uint64(len(values)))
				for _, value := range values {
					if value.Kind == inventory.UnknownKind {
						b = append(b, 0)
						continue
					}
					n, ok := s.look.values[value]
					if !ok {
						n = len(s.look.values) + 1
						s.look.values[value] = n
					}
					b = binary.AppendUvarint(b, uint64(n))
				}
			}
		}
	}
	return b
}

// appendCounters appends the counters of all pools: how much there is and is left of each, and which have to do with each
// other. Counters of one name are added up, so names count, too.
func (s *search) appendCounters(b []byte) []byte {
	l := &s.ledger
	b = appendFlag(appendFlag(b, l.consumers != nil), l.shareable != nil)
	if l.consumers == nil {
		return b
	}
	b = s.appendSet(b, l.consumers)
	for p, pool := range s.pools {
		b = appendFlag(b, pool.Consumers() != nil)
		if pool.Consumers() == nil {
			continue
		}
		counters, state := pool.Pool.Counters, l.states[p]
		b = binary.AppendUvarint(b, uint64(len(counters.All)))
		for i := range counters.All {
			b = appendText(b, counters.All[i].Name)
			b = state.counters[i].Append(counters.All[i].Total.Append(b))
			b = binary.AppendUvarint(b, uint64(counters.PartOf(inventory.Use{Counter: i})))
		}
		b = binary.AppendUvarint(b, uint64(len(state.groups)))
		for _, group := range state.groups {
			b = appendTexts(appendFlag(appendFlag(b, group.used), group.bare), group.common)
		}
	}
	return b
}

func appendTexts(b []byte, texts []string) []byte {
	b = binary.AppendUvarint(b, uint64(len(texts)))
	for _, text := range texts {
		b = appendText(b, text)
	}
	return b
}

// appendUses appends what the device takes of counters, and which groups it is in.
func (s *search) appendUses(b []byte, device int) []byte {
	uses := s.usesOf(device)
	b = binary.AppendUvarint(b, uint64(len(uses)))
	for _, use := range uses {
		b = use.Amount.Append(binary.AppendUvarint(b, uint64(use.Counter)))
	}
	memberships := s.membershipsOf(device)
	b = binary.AppendUvarint(b, uint64(len(memberships)))
	for _, m := range memberships {
		b = appendTexts(binary.AppendUvarint(b, uint64(m.Set)), m.Groups)
	}
	return b
}

// appendRoom appends what is left of the device, which can be shared, and what each alternative takes of that.
func (s *search) appendRoom(b []byte, device int) []byte {
	p := s.poolOf(device)
	b = appendFlag(append(b, 's'), s.states[p].isShared(device-s.starts[p]))
	names := s.pools[p].Capacity(device - s.starts[p]).Names
	b = binary.AppendUvarint(b, uint64(len(names)))
	for k, left := range s.states[p].roomOf(s.pools[p], device-s.starts[p]) {
		b = left.Append(appendText(b, string(names[k])))
	}
	for _, a := range s.reqs.lanes {
		if s.lanes[a.lane].candidates.Has(device) {
			for _, takes := range s.takes(a, device) {
				b = takes.Append(b)
			}
		}
	}
	return b
}

// appendCapacity appends how large the device is, which policies look at.
func (s *search) appendCapacity(b []byte, device int) []byte {
	p := s.poolOf(device)
	capacity := s.pools[p].Device(device - s.starts[p]).Capacity
	names := s.look.names[:0]
	for name := range capacity {
		names = append(names, name)
	}
	slices.Sort(names)
	s.look.names = names
	b = binary.AppendUvarint(b, uint64(len(names)))
	for _, name := range names {
		b = amount.Of(capacity[name].Value).Append(appendText(b, string(name)))
	}
	return b
}
