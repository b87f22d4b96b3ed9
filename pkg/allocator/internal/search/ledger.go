// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/counters"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// ledger is what the picks of a search leave of what devices share: the counters of their pools, and the capacity of
// devices that allow multiple allocations. Where no device of the node shares anything it is empty.
type ledger struct {
	*offer

	// consumers and shareable are the devices, of all pools, that consume counters and that allow multiple
	// allocations. Nil if there are none.
	consumers, shareable bitset.Set

	counters     []amount.Amount // what is left, of all pools
	firstCounter []int           // by pool: where its counters begin

	groups     []counters.GroupState // of the counter sets of all pools; empty if none has compatibility groups
	firstGroup []int                 // by pool: where its counter sets begin
	former     []formerGroup         // what the picks have changed of groups, in order

	room      []amount.Amount // what is left of each capacity of the shareable devices
	firstRoom []int           // by device: where its room begins
	shares    []int           // by device: how many shares are picked
}

// open makes the ledger of the offer, before anything is picked.
func (l *ledger) open() {
	for i, p := range l.pools {
		l.consumers = l.place(l.consumers, p.Consumers(), i)
		l.shareable = l.place(l.shareable, p.Shareable(), i)
	}
	l.reset()
}

// reset takes back what all picks took.
func (l *ledger) reset() {
	if l.consumers != nil {
		l.counters, l.firstCounter = l.counters[:0], l.firstCounter[:0]
		for _, state := range l.states {
			l.firstCounter = append(l.firstCounter, len(l.counters))
			l.counters = append(l.counters, state.Counters...)
		}
		l.groups, l.firstGroup, l.former = l.groups[:0], l.firstGroup[:0], l.former[:0]
		for _, state := range l.states {
			l.firstGroup = append(l.firstGroup, len(l.groups))
			l.groups = append(l.groups, state.Groups...)
		}
	}
	if l.shareable != nil {
		l.room, l.firstRoom, l.shares = l.room[:0], l.firstRoom[:0], l.shares[:0]
		for range l.words * 64 {
			l.firstRoom, l.shares = append(l.firstRoom, 0), append(l.shares, 0)
		}
		for i, p := range l.pools {
			for device := p.Shareable().Next(0); device >= 0; device = p.Shareable().Next(device + 1) {
				l.firstRoom[l.starts[i]+device] = len(l.room)
				l.room = append(l.room, l.states[i].RoomOf(p, device)...)
			}
		}
	}
}

// close forgets everything but the memory.
func (l *ledger) close() {
	clear(l.groups)
	clear(l.former)
	*l = ledger{
		offer:  l.offer,
		groups: l.groups[:0], firstGroup: l.firstGroup[:0], former: l.former[:0],
		counters: l.counters[:0], firstCounter: l.firstCounter[:0],
		room: l.room[:0], firstRoom: l.firstRoom[:0], shares: l.shares[:0],
	}
}

// isPlain tells whether the device shares nothing.
func (l *ledger) isPlain(device int) bool {
	return !l.consumers.Has(device) && !l.shareable.Has(device)
}

// charge takes what the alternative takes with the device, if there is so much.
func (l *ledger) charge(a *compiled.Alternative, device int) bool {
	if l.isPlain(device) {
		return true
	}
	if !l.canCharge(a, device) {
		return false
	}
	l.post(a, device, amount.Amount.Sub, true)
	return true
}

// refund gives back what charge took.
func (l *ledger) refund(a *compiled.Alternative, device int) {
	if !l.isPlain(device) {
		l.post(a, device, amount.Amount.Add, false)
	}
}

// post books a pick or, if it is not one, its return.
func (l *ledger) post(a *compiled.Alternative, device int, book func(amount.Amount, amount.Amount) amount.Amount, isPick bool) {
	shareable := l.shareable.Has(device)
	if shareable && !isPick {
		l.shares[device]--
	}
	if l.consumers.Has(device) && !l.isShared(device) {
		counters := l.countersOf(device)
		for _, use := range l.usesOf(device) {
			counters[use.Counter] = book(counters[use.Counter], use.Amount)
		}
		if isPick {
			l.joinGroups(device)
		} else {
			l.leaveGroups(device)
		}
	}
	if shareable {
		room := l.roomOf(device)
		for k, takes := range l.takes(a, device) {
			room[k] = book(room[k], takes)
		}
		if isPick {
			l.shares[device]++
		}
	}
}

// canCharge tells whether enough is left for the alternative to take the device.
func (l *ledger) canCharge(a *compiled.Alternative, device int) bool {
	if l.shareable.Has(device) && !counters.Covers(l.roomOf(device), l.takes(a, device)) {
		return false
	}
	return !l.consumers.Has(device) || l.isShared(device) ||
		(counters.Affords(l.countersOf(device), l.usesOf(device)) && l.admitsGroups(device))
}

// dropUnaffordable takes those devices out of set, which the alternative could take otherwise, for which too little
// is left. What is left only shrinks, so they are out of the question until a pick is taken back.
func (l *ledger) dropUnaffordable(a *compiled.Alternative, from *lane, set bitset.Set) {
	if l.consumers == nil && l.shareable == nil {
		return
	}
	for device := set.Next(0); device >= 0; device = set.Next(device + 1) {
		if !l.isPlain(device) && from.candidates.Has(device) && !l.canCharge(a, device) {
			set.Remove(device)
		}
	}
}

// isShared tells whether somebody has a share of the device already, a holder or a pick, so that another share
// takes nothing more of counters.
func (l *ledger) isShared(device int) bool {
	if !l.shareable.Has(device) {
		return false
	}
	p := l.poolOf(device)
	return l.shares[device] > 0 || l.states[p].IsShared(device-l.starts[p])
}

// countersOf is what is left of the counters of the device's pool.
func (l *ledger) countersOf(device int) []amount.Amount {
	return l.counters[l.firstCounter[l.poolOf(device)]:]
}

// roomOf is what is left of the capacity of the shareable device.
func (l *ledger) roomOf(device int) []amount.Amount {
	return l.room[l.firstRoom[device]:]
}

// formerGroup is a state to go back to.
type formerGroup struct {
	index int // in ledger.groups
	state counters.GroupState
}

// admitsGroups tells whether the device's groups allow it to be picked.
func (l *ledger) admitsGroups(device int) bool {
	return len(l.groups) == 0 || counters.GroupsAdmit(l.groups[l.firstGroup[l.poolOf(device)]:], l.membershipsOf(device))
}

// joinGroups puts the device into its groups, which leaveGroups takes back, the last one first.
func (l *ledger) joinGroups(device int) {
	if len(l.groups) == 0 {
		return
	}
	first := l.firstGroup[l.poolOf(device)]
	for _, m := range l.membershipsOf(device) {
		state := &l.groups[first+m.Set]
		l.former = append(l.former, formerGroup{first + m.Set, *state})
		*state = state.With(m.Groups)
	}
}

func (l *ledger) leaveGroups(device int) {
	if len(l.groups) == 0 {
		return
	}
	for range l.membershipsOf(device) {
		last := l.former[len(l.former)-1]
		l.former = l.former[:len(l.former)-1]
		l.groups[last.index] = last.state
	}
}
