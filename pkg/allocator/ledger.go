package allocator

import (
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// ledger is what the picks of a search leave of what devices share: the counters of their pools, and the capacity of
// devices that allow multiple allocations. Where no device of the node shares anything it is empty.
type ledger struct {
	states []*poolState // by pool

	// consumers and shareable are the devices, of all pools, that consume counters and that allow multiple
	// allocations. Nil if there are none.
	consumers, shareable bitset.Set

	counters     []amount.Amount // what is left, of all pools
	firstCounter []int           // by pool: where its counters begin

	groups     []groupState  // of the counter sets of all pools; empty if none has compatibility groups
	firstGroup []int         // by pool: where its counter sets begin
	former     []formerGroup // what the picks have changed of groups, in order

	room      []amount.Amount // what is left of each capacity of the shareable devices
	firstRoom []int           // by device: where its room begins
	shares    []int           // by device: how many shares are picked
}

// open makes the ledger for the pools of the search, before anything is picked.
func (s *search) openLedger() {
	l := &s.ledger
	consumers, shareable := false, false
	for _, p := range s.pools {
		l.states = append(l.states, s.in.stateOf(p))
		consumers = consumers || p.Consumers() != nil
		shareable = shareable || p.Shareable() != nil
	}
	if consumers {
		l.consumers = s.newSet()
		for i, p := range s.pools {
			copy(l.consumers[s.starts[i]/64:], p.Consumers())
		}
	}
	if shareable {
		l.shareable = s.newSet()
		for i, p := range s.pools {
			copy(l.shareable[s.starts[i]/64:], p.Shareable())
		}
	}
	s.resetLedger()
}

// resetLedger takes back what all picks took.
func (s *search) resetLedger() {
	l := &s.ledger
	if l.consumers != nil {
		l.counters, l.firstCounter = l.counters[:0], l.firstCounter[:0]
		for _, state := range l.states {
			l.firstCounter = append(l.firstCounter, len(l.counters))
			l.counters = append(l.counters, state.counters...)
		}
		l.groups, l.firstGroup, l.former = l.groups[:0], l.firstGroup[:0], l.former[:0]
		for _, state := range l.states {
			l.firstGroup = append(l.firstGroup, len(l.groups))
			l.groups = append(l.groups, state.groups...)
		}
	}
	if l.shareable != nil {
		l.room, l.firstRoom, l.shares = l.room[:0], l.firstRoom[:0], l.shares[:0]
		for range s.words * 64 {
			l.firstRoom, l.shares = append(l.firstRoom, 0), append(l.shares, 0)
		}
		for i, p := range s.pools {
			for device := p.Shareable().Next(0); device >= 0; device = p.Shareable().Next(device + 1) {
				l.firstRoom[s.starts[i]+device] = len(l.room)
				l.room = append(l.room, l.states[i].roomOf(p, device)...)
			}
		}
	}
}

// close forgets everything but the memory.
func (l *ledger) close() {
	clear(l.states)
	clear(l.groups)
	clear(l.former)
	*l = ledger{
		groups: l.groups[:0], firstGroup: l.firstGroup[:0], former: l.former[:0],
		states: l.states[:0], counters: l.counters[:0], firstCounter: l.firstCounter[:0],
		room: l.room[:0], firstRoom: l.firstRoom[:0], shares: l.shares[:0],
	}
}

// isPlain tells whether the device shares nothing.
func (l *ledger) isPlain(device int) bool {
	return !l.consumers.Has(device) && !l.shareable.Has(device)
}

// charge takes what the alternative takes with the device, if there is so much.
func (s *search) charge(a *alternative, device int) bool {
	if s.ledger.isPlain(device) {
		return true
	}
	if !s.canCharge(a, device) {
		return false
	}
	s.post(a, device, amount.Amount.Sub, true)
	return true
}

// refund gives back what charge took.
func (s *search) refund(a *alternative, device int) {
	if !s.ledger.isPlain(device) {
		s.post(a, device, amount.Amount.Add, false)
	}
}

// post books a pick or, if it is not one, its return.
func (s *search) post(a *alternative, device int, book func(amount.Amount, amount.Amount) amount.Amount, isPick bool) {
	l := &s.ledger
	shareable := l.shareable.Has(device)
	if shareable && !isPick {
		l.shares[device]--
	}
	if l.consumers.Has(device) && !s.isShared(device) {
		counters := s.countersOf(device)
		for _, use := range s.usesOf(device) {
			counters[use.Counter] = book(counters[use.Counter], use.Amount)
		}
		if isPick {
			s.joinGroups(device)
		} else {
			s.leaveGroups(device)
		}
	}
	if shareable {
		room := s.roomOf(device)
		for k, takes := range s.takes(a, device) {
			room[k] = book(room[k], takes)
		}
		if isPick {
			l.shares[device]++
		}
	}
}

// canCharge tells whether enough is left for the alternative to take the device.
func (s *search) canCharge(a *alternative, device int) bool {
	l := &s.ledger
	if l.shareable.Has(device) && !covers(s.roomOf(device), s.takes(a, device)) {
		return false
	}
	return !l.consumers.Has(device) || s.isShared(device) ||
		(affords(s.countersOf(device), s.usesOf(device)) && s.admitsGroups(device))
}

// isShared tells whether somebody has a share of the device already, a holder or a pick, so that another share
// takes nothing more of counters.
func (s *search) isShared(device int) bool {
	l := &s.ledger
	if !l.shareable.Has(device) {
		return false
	}
	p := s.poolOf(device)
	return l.shares[device] > 0 || l.states[p].isShared(device-s.starts[p])
}

// usesOf is what the device takes of the counters of its pool.
func (s *search) usesOf(device int) []inventory.Use {
	p := s.poolOf(device)
	return s.pools[p].Uses(device - s.starts[p])
}

// countersOf is what is left of the counters of the device's pool.
func (s *search) countersOf(device int) []amount.Amount {
	return s.ledger.counters[s.ledger.firstCounter[s.poolOf(device)]:]
}

// roomOf is what is left of the capacity of the shareable device.
func (s *search) roomOf(device int) []amount.Amount {
	return s.ledger.room[s.ledger.firstRoom[device]:]
}

// takes is what the alternative takes of the capacity of the shareable device, which is one of its candidates.
func (s *search) takes(a *alternative, device int) []amount.Amount {
	p := s.poolOf(device)
	return s.matchOf(a, p).Takes(device - s.starts[p])
}

// matchOf is what the alternative's matcher says about the pool.
func (s *search) matchOf(a *alternative, p int) *inventory.PoolMatch {
	return s.matches[a.lane*len(s.pools)+p]
}
