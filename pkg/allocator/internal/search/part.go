// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"cmp"
	"encoding/binary"
	"slices"

	"stowage.dev/stowage/pkg/allocator/internal/counters"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
)

// parts partitions the devices of a node into those that have to do with each other: the partitions of one GPU, which
// share its counters, and the devices that have the same value of an attribute that a constraint looks at. A device
// that shares nothing is a part of its own.
//
// What there is in a part is its content: for each device that can still be had what it is like, and what is left of
// what these share. Values and counters have numbers within the part, so that two parts may have the same content. Then
// one can stand for the other.
type parts struct {
	*state
	of   []int32 // by device: its part; -1 if no request may take it
	list []part
	// units are parts as they would be if there were no constraints.
	units [][]int

	values   [][]int32 // by Constraint.Index and device: the number of the value within the part, see numberValues
	unknown  [][]int32 // by Constraint.Index and device: see countUnknown; nil if no device has a value of an unknown kind
	counters [][]int32 // by device and use: the number of the counter within the part

	signs, statuses, known map[string]int32 // what a device is like, what is left of it, what there is in a part → number
	items                  []item           // scratch
	buffer                 []byte           // scratch
	needed                 []amount.Amount  // scratch
}

// part is one part, and what was last found in it.
type part struct {
	devices []int // ascending
	picks   int   // how many picks are of it
	view    *view // for which content is true; nil if for none
	content int32
}

// item is a device that can still be had: what it is like, and what is left of it.
type item struct{ sign, status int32 }

// newParts finds the parts.
func newParts(s *state) *parts {
	ps := &parts{
		state: s,
		of:    make([]int32, s.words*64),
		signs: make(map[string]int32), statuses: make(map[string]int32), known: make(map[string]int32),
	}
	// While parts are joined, of has another device of the same part, that with the lowest number at the end.
	root := func(device int) int {
		for ps.of[device] != int32(device) {
			device = int(ps.of[device])
		}
		return device
	}
	join := func(a, b int) {
		a, b = root(a), root(b)
		ps.of[max(a, b)] = int32(min(a, b))
	}
	all := s.newSet()
	for i := range s.lanes {
		all.Or(s.lanes[i].candidates)
		all.Or(s.lanes[i].errors)
	}
	for i := range ps.of {
		ps.of[i] = int32(i)
	}
	for p, pool := range s.pools {
		known := make(map[int]int) // part of the pool's counters → unit
		for i := range pool.Len() {
			uses, device := pool.Uses(i), s.starts[p]+i
			if !all.Has(device) {
				continue
			}
			unit := len(ps.units)
			if len(uses) > 0 {
				n := pool.Pool.Counters.PartOf(uses[0])
				if other, ok := known[n]; ok {
					join(device, ps.units[other][0])
					ps.units[other] = append(ps.units[other], device)
					continue
				}
				known[n] = unit
			}
			ps.units = append(ps.units, []int{device})
		}
	}
	for _, claim := range s.reqs.Claims {
		for _, c := range claim.Constraints {
			under := s.under(c)
			for _, of := range s.groupings.of(c).groups {
				group := of.Devices
				first := -1
				for device := group.Next(0); device >= 0; device = group.Next(device + 1) {
					switch {
					case !under.Has(device):
					case first < 0:
						first = device
					default:
						join(first, device)
					}
				}
			}
		}
	}
	for device := range ps.of {
		switch first := ps.of[device]; {
		case !all.Has(device):
			ps.of[device] = -1
		case int(first) == device:
			ps.of[device] = int32(len(ps.list))
			ps.list = append(ps.list, part{devices: []int{device}})
		default: // the part of a lower number is known
			n := ps.of[first]
			ps.of[device] = n
			ps.list[n].devices = append(ps.list[n].devices, device)
		}
	}
	ps.numberValues()
	ps.countUnknown()
	ps.numberCounters()
	return ps
}

// numberValues numbers the values of each constraint within each part, in the order of the devices. No value has 0, and
// each one of an unknown kind a negative number that nothing else has.
func (ps *parts) numberValues() {
	unknown := int32(0)
	for _, claim := range ps.reqs.Claims {
		for _, c := range claim.Constraints {
			under, numbers := ps.under(c), make([]int32, len(ps.of))
			for n := range ps.list {
				known := make(map[inventory.AttributeValue]int32)
				for _, device := range ps.list[n].devices {
					if !under.Has(device) {
						continue
					}
					p := ps.poolOf(device)
					values := ps.pools[p].Attribute(c.Attribute).Values(device - ps.starts[p]) // one, or none
					switch {
					case len(values) == 0:
					case values[0].Kind == inventory.UnknownKind:
						unknown--
						numbers[device] = unknown
					default:
						if known[values[0]] == 0 {
							known[values[0]] = int32(len(known)) + 1
						}
						numbers[device] = known[values[0]]
					}
				}
			}
			ps.values = append(ps.values, numbers)
		}
	}
}

// countUnknown counts, for each constraint, the devices with a value of an unknown kind that come before each device in the order of
// devices. Such a device may only be the first under the constraint, so devices before it and behind it are not alike.
func (ps *parts) countUnknown() {
	ps.unknown = make([][]int32, len(ps.values))
	for c, numbers := range ps.values {
		var positions []int
		for device, number := range numbers {
			if number < 0 {
				positions = append(positions, ps.deviceOrder.at(device))
			}
		}
		if len(positions) == 0 {
			continue
		}
		ps.unknown[c] = make([]int32, len(numbers))
		for device, n := range ps.of {
			if n < 0 {
				continue // nobody may take it
			}
			for _, position := range positions {
				if position < ps.deviceOrder.at(device) {
					ps.unknown[c][device]++
				}
			}
		}
	}
}

// numberCounters numbers the counters that devices of each part use, in the order of the devices.
func (ps *parts) numberCounters() {
	if ps.ledger.consumers == nil {
		return
	}
	type counter struct{ pool, index int }
	ps.counters = make([][]int32, len(ps.of))
	most := 0
	for n := range ps.list {
		known := make(map[counter]int32)
		for _, device := range ps.list[n].devices {
			p := ps.poolOf(device)
			for _, use := range ps.usesOf(device) {
				key := counter{p, use.Counter}
				if _, ok := known[key]; !ok {
					known[key] = int32(len(known))
				}
				ps.counters[device] = append(ps.counters[device], known[key])
			}
		}
		most = max(most, len(known))
	}
	ps.needed = make([]amount.Amount, most)
}

// sign describes a device in the eyes of the view: which alternatives may take it and how much of it, which values it has,
// and what it uses of counters. Not ok means that none may take it.
func (ps *parts) sign(v *view, device int) (sign []byte, ok bool) {
	sign = ps.buffer[:0]
	for _, lane := range v.lanes {
		l := &ps.lanes[lane]
		candidate := l.candidates.Has(device)
		if fails := l.errors.Has(device); fails {
			sign = append(sign, '!')
		} else if !candidate {
			continue
		}
		a := ps.reqs.Lanes[lane]
		sign = binary.AppendUvarint(sign, uint64(lane))
		for _, c := range a.Constraints {
			sign = binary.AppendVarint(sign, int64(ps.values[c.Index][device]))
			if before := ps.unknown[c.Index]; before != nil {
				sign = binary.AppendVarint(sign, int64(before[device]))
			}
		}
		if candidate && ps.ledger.shareable.Has(device) {
			for _, takes := range ps.takes(a, device) {
				sign = takes.Append(sign)
			}
		}
	}
	ok = len(sign) > 0
	sign = append(sign, '/')
	if ps.ledger.consumers.Has(device) {
		for i, use := range ps.usesOf(device) {
			sign = use.Amount.Append(binary.AppendUvarint(sign, uint64(ps.counters[device][i])))
		}
	}
	ps.buffer = sign
	return sign, ok
}

// status describes what is left of a device: 0 is all of a device that shares nothing.
func (ps *parts) status(v *view, device int) int32 {
	shareable := ps.ledger.shareable.Has(device)
	if !shareable && len(v.admin) == 0 {
		return 0
	}
	status := ps.buffer[:0]
	if shareable {
		status = append(status, 's')
		if ps.ledger.isShared(device) {
			status = append(status, '+')
		}
		p := ps.poolOf(device)
		for _, left := range ps.ledger.roomOf(device)[:len(ps.pools[p].Capacity(device-ps.starts[p]).Names)] {
			status = left.Append(status)
		}
	} else {
		status = append(status, 'p')
		if ps.taken.Has(device) {
			status = append(status, '-')
		}
		for _, claim := range v.admin {
			if ps.takenBy[claim].Has(device) {
				status = binary.AppendUvarint(status, uint64(claim))
			}
		}
	}
	ps.buffer = status
	return intern(ps.statuses, status)
}

// content is the number of what there is in the part; 0 means nothing, and no part has the same as another by
// chance.
func (ps *parts) content(v *view, n int32) int32 {
	p := &ps.list[n]
	if p.picks == 0 && v.initial[n] >= 0 {
		return v.initial[n]
	}
	if p.view != v {
		p.view, p.content = v, ps.find(v, p)
	}
	if p.picks == 0 {
		v.initial[n] = p.content
	}
	return p.content
}

// find describes the part.
func (ps *parts) find(v *view, p *part) int32 {
	items, most := ps.items[:0], int32(-1)
	for _, device := range p.devices {
		if v.signs[device] < 0 || (len(v.admin) == 0 && ps.taken.Has(device)) {
			continue
		}
		if ps.ledger.consumers.Has(device) && !ps.ledger.isShared(device) {
			uses, left := ps.usesOf(device), ps.ledger.countersOf(device)
			if !counters.Affords(left, uses) {
				continue // nor ever will be
			}
			for i, use := range uses {
				counter := ps.counters[device][i]
				for ; most < counter; most++ {
					ps.needed[most+1] = amount.Amount{}
				}
				// With admin access each claim may have it, besides the one that has it alone.
				for range 1 + len(v.admin) {
					ps.needed[counter] = ps.needed[counter].Add(use.Amount)
				}
			}
		}
		items = append(items, item{v.signs[device], ps.status(v, device)})
	}
	ps.items = items
	bound := ps.boundValues(v, p)
	if len(items) == 0 && len(bound) == 0 {
		return 0
	}
	slices.SortFunc(items, func(a, b item) int { return cmp.Or(cmp.Compare(a.sign, b.sign), cmp.Compare(a.status, b.status)) })
	text := ps.buffer[:0]
	for _, item := range items {
		text = binary.AppendUvarint(binary.AppendUvarint(text, uint64(item.sign)), uint64(item.status))
	}
	text = append(text, 0)
	if most >= 0 {
		text = ps.appendLeft(v, p, text)
	}
	for _, b := range bound {
		text = binary.AppendVarint(text, b)
	}
	ps.buffer = text
	return intern(ps.known, text)
}

// appendLeft appends what is left of the counters that devices need, unless it is enough for all of them.
func (ps *parts) appendLeft(v *view, p *part, text []byte) []byte {
	for _, device := range p.devices {
		if v.signs[device] < 0 || !ps.ledger.consumers.Has(device) {
			continue
		}
		left := ps.ledger.countersOf(device)
		for i, use := range ps.usesOf(device) {
			n := ps.counters[device][i]
			if rest := left[use.Counter]; rest.Less(ps.needed[n]) {
				text = rest.Append(binary.AppendUvarint(text, uint64(n)+1))
				ps.needed[n] = amount.Least // once
			}
		}
	}
	return append(text, 0)
}

// boundValues lists the values of the part to which picks bind the constraints that still matter.
func (ps *parts) boundValues(v *view, p *part) (bound []int64) {
	if p.picks == 0 {
		return nil
	}
	for _, pick := range ps.picks {
		if &ps.list[ps.of[pick.Device]] != p {
			continue
		}
		for _, c := range ps.reqs.Lanes[pick.Lane].Constraints {
			if v.bound[c.Index] {
				bound = append(bound, int64(c.Index)<<32|int64(uint32(ps.values[c.Index][pick.Device])))
			}
		}
	}
	slices.Sort(bound)
	return slices.Compact(bound)
}
