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
	*offer
	ledger    *ledger
	groupings *groupings

	text   []byte
	values map[inventory.AttributeValue]int
	names  []resourceapi.QualifiedName
}

// fingerprint describes the node, after it was prepared for the search: not what its devices are, but what the requests
// see of them. So nodes are alike although each device has an address and a serial number of its own, and although they
// are called otherwise. Values of attributes are numbered as they come, because nothing but their equality counts.
//
// Whatever a search reads of its pools and their states has to be in it, in a form that can be read in one way only.
func (l *look) fingerprint() fingerprint {
	b := append(l.text[:0], byte(l.in.Policy))
	b = binary.AppendUvarint(b, uint64(len(l.pools)))
	for _, p := range l.pools {
		b = binary.AppendUvarint(b, uint64(p.Len()))
	}
	interesting := l.newSet()
	for i := range l.lanes {
		lane := &l.lanes[i]
		b = appendFlag(binary.AppendVarint(b, int64(lane.wanted)), lane.hopeless)
		b = l.appendSet(l.appendSet(b, lane.candidates), lane.errors)
		interesting.Or(lane.candidates)
		interesting.Or(lane.errors)
	}
	for i := range l.reqs.claims {
		for _, c := range l.reqs.claims[i].constraints {
			b = l.appendValues(b, c)
		}
	}
	b = l.appendCounters(b)
	for device := interesting.Next(0); device >= 0; device = interesting.Next(device + 1) {
		if l.ledger.consumers.Has(device) {
			b = l.appendUses(b, device)
		}
		if l.ledger.shareable.Has(device) {
			b = l.appendRoom(b, device)
		}
		if l.in.Policy != FirstFit {
			b = l.appendCapacity(b, device)
		}
	}
	l.text = b
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
func (l *look) appendSet(b []byte, set bitset.Set) []byte {
	b = appendFlag(b, set != nil)
	for _, word := range set {
		b = binary.LittleEndian.AppendUint64(b, word)
	}
	return b
}

// appendValues appends which devices have a value in common of the attribute that the constraint looks at, their own one
// and as alternatives derive it.
func (l *look) appendValues(b []byte, c *constraint) []byte {
	if l.values == nil {
		l.values = make(map[inventory.AttributeValue]int)
	}
	clear(l.values)
	for from := -1; from < len(c.derivations); from++ {
		for p, pool := range l.pools {
			var derivation *inventory.Derivation
			if from >= 0 {
				derivation = c.derivations[from]
			}
			column := l.groupings.column(c, derivation, p)
			for i := range pool.Len() {
				values := column.Values(i)
				b = appendFlag(b, column.Errors().Has(i))
				b = binary.AppendUvarint(b, uint64(len(values)))
				for _, value := range values {
					if value.Kind == inventory.UnknownKind {
						b = append(b, 0)
						continue
					}
					n, ok := l.values[value]
					if !ok {
						n = len(l.values) + 1
						l.values[value] = n
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
func (l *look) appendCounters(b []byte) []byte {
	b = appendFlag(appendFlag(b, l.ledger.consumers != nil), l.ledger.shareable != nil)
	if l.ledger.consumers == nil {
		return b
	}
	b = l.appendSet(b, l.ledger.consumers)
	for p, pool := range l.pools {
		b = appendFlag(b, pool.Consumers() != nil)
		if pool.Consumers() == nil {
			continue
		}
		counters, state := pool.Pool.Counters, l.states[p]
		b = binary.AppendUvarint(b, uint64(len(counters.All)))
		for i := range counters.All {
			b = appendText(b, counters.All[i].Name)
			b = state.Counters[i].Append(counters.All[i].Total.Append(b))
			b = binary.AppendUvarint(b, uint64(counters.PartOf(inventory.Use{Counter: i})))
		}
		b = binary.AppendUvarint(b, uint64(len(state.Groups)))
		for _, group := range state.Groups {
			b = appendTexts(appendFlag(appendFlag(b, group.Used), group.Bare), group.Common)
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
func (l *look) appendUses(b []byte, device int) []byte {
	uses := l.usesOf(device)
	b = binary.AppendUvarint(b, uint64(len(uses)))
	for _, use := range uses {
		b = use.Amount.Append(binary.AppendUvarint(b, uint64(use.Counter)))
	}
	memberships := l.membershipsOf(device)
	b = binary.AppendUvarint(b, uint64(len(memberships)))
	for _, m := range memberships {
		b = appendTexts(binary.AppendUvarint(b, uint64(m.Set)), m.Groups)
	}
	return b
}

// appendRoom appends what is left of the device, which can be shared, and what each alternative takes of that.
func (l *look) appendRoom(b []byte, device int) []byte {
	p := l.poolOf(device)
	b = appendFlag(append(b, 's'), l.states[p].IsShared(device-l.starts[p]))
	names := l.pools[p].Capacity(device - l.starts[p]).Names
	b = binary.AppendUvarint(b, uint64(len(names)))
	for k, left := range l.states[p].RoomOf(l.pools[p], device-l.starts[p]) {
		b = left.Append(appendText(b, string(names[k])))
	}
	for _, a := range l.reqs.lanes {
		if l.lanes[a.lane].candidates.Has(device) {
			for _, takes := range l.takes(a, device) {
				b = takes.Append(b)
			}
		}
	}
	return b
}

// appendCapacity appends how large the device is, which policies look at.
func (l *look) appendCapacity(b []byte, device int) []byte {
	p := l.poolOf(device)
	capacity := l.pools[p].Device(device - l.starts[p]).Capacity
	names := l.names[:0]
	for name := range capacity {
		names = append(names, name)
	}
	slices.Sort(names)
	l.names = names
	b = binary.AppendUvarint(b, uint64(len(names)))
	for _, name := range names {
		b = amount.Of(capacity[name].Value).Append(appendText(b, string(name)))
	}
	return b
}
