// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/allocator/internal/answers"
	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// fingerprinter describes nodes, see [answers.Fingerprint].
type fingerprinter struct {
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
func (f *fingerprinter) fingerprint() answers.Fingerprint {
	b := append(f.text[:0], byte(f.in.Policy))
	b = binary.AppendUvarint(b, uint64(len(f.pools)))
	for _, p := range f.pools {
		b = binary.AppendUvarint(b, uint64(p.Len()))
	}
	interesting := f.newSet()
	for i := range f.lanes {
		lane := &f.lanes[i]
		b = appendFlag(binary.AppendVarint(b, int64(lane.wanted)), lane.hopeless)
		b = f.appendSet(f.appendSet(b, lane.candidates), lane.errors)
		interesting.Or(lane.candidates)
		interesting.Or(lane.errors)
	}
	for i := range f.reqs.Claims {
		for _, c := range f.reqs.Claims[i].Constraints {
			b = f.appendValues(b, c)
		}
	}
	b = f.appendCounters(b)
	for device := interesting.Next(0); device >= 0; device = interesting.Next(device + 1) {
		if f.ledger.consumers.Has(device) {
			b = f.appendUses(b, device)
		}
		if f.ledger.shareable.Has(device) {
			b = f.appendRoom(b, device)
		}
		if f.in.Policy != FirstFit {
			b = f.appendCapacity(b, device)
		}
	}
	f.text = b
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
func (f *fingerprinter) appendSet(b []byte, set bitset.Set) []byte {
	b = appendFlag(b, set != nil)
	for _, word := range set {
		b = binary.LittleEndian.AppendUint64(b, word)
	}
	return b
}

// appendValues appends which devices have a value in common of the attribute that the constraint looks at, their own one
// and as alternatives derive it.
func (f *fingerprinter) appendValues(b []byte, c *compiled.Constraint) []byte {
	if f.values == nil {
		f.values = make(map[inventory.AttributeValue]int)
	}
	clear(f.values)
	for from := -1; from < len(c.Derivations); from++ {
		for p, pool := range f.pools {
			var derivation *inventory.Derivation
			if from >= 0 {
				derivation = c.Derivations[from]
			}
			column := f.groupings.column(c, derivation, p)
			for i := range pool.Len() {
				values := column.Values(i)
				b = appendFlag(b, column.Errors().Has(i))
				b = binary.AppendUvarint(b, uint64(len(values)))
				for _, value := range values {
					if value.Kind == inventory.UnknownKind {
						b = append(b, 0)
						continue
					}
					n, ok := f.values[value]
					if !ok {
						n = len(f.values) + 1
						f.values[value] = n
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
func (f *fingerprinter) appendCounters(b []byte) []byte {
	b = appendFlag(appendFlag(b, f.ledger.consumers != nil), f.ledger.shareable != nil)
	if f.ledger.consumers == nil {
		return b
	}
	b = f.appendSet(b, f.ledger.consumers)
	for p, pool := range f.pools {
		b = appendFlag(b, pool.Consumers() != nil)
		if pool.Consumers() == nil {
			continue
		}
		counters, state := pool.Pool.Counters, f.states[p]
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
func (f *fingerprinter) appendUses(b []byte, device int) []byte {
	uses := f.usesOf(device)
	b = binary.AppendUvarint(b, uint64(len(uses)))
	for _, use := range uses {
		b = use.Amount.Append(binary.AppendUvarint(b, uint64(use.Counter)))
	}
	memberships := f.membershipsOf(device)
	b = binary.AppendUvarint(b, uint64(len(memberships)))
	for _, m := range memberships {
		b = appendTexts(binary.AppendUvarint(b, uint64(m.Set)), m.Groups)
	}
	return b
}

// appendRoom appends what is left of the device, which can be shared, and what each alternative takes of that.
func (f *fingerprinter) appendRoom(b []byte, device int) []byte {
	p := f.poolOf(device)
	b = appendFlag(append(b, 's'), f.states[p].IsShared(device-f.starts[p]))
	names := f.pools[p].Capacity(device - f.starts[p]).Names
	b = binary.AppendUvarint(b, uint64(len(names)))
	for k, left := range f.states[p].RoomOf(f.pools[p], device-f.starts[p]) {
		b = left.Append(appendText(b, string(names[k])))
	}
	for _, a := range f.reqs.Lanes {
		if f.lanes[a.Lane].candidates.Has(device) {
			for _, takes := range f.takes(a, device) {
				b = takes.Append(b)
			}
		}
	}
	return b
}

// appendCapacity appends how large the device is, which policies look at.
func (f *fingerprinter) appendCapacity(b []byte, device int) []byte {
	p := f.poolOf(device)
	capacity := f.pools[p].Device(device - f.starts[p]).Capacity
	names := slices.AppendSeq(f.names[:0], maps.Keys(capacity))
	slices.Sort(names)
	f.names = names
	b = binary.AppendUvarint(b, uint64(len(names)))
	for _, name := range names {
		b = amount.Of(capacity[name].Value).Append(appendText(b, string(name)))
	}
	return b
}
