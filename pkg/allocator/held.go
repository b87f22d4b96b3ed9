package allocator

import (
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/inventory/bitset"
	"stowage.dev/stowage/pkg/usage"
)

// poolState is what holders leave of one NodePool in one state of usage. Immutable.
type poolState struct {
	in *usage.Pool
	// held are the devices that have a holder; of the shareable ones only those that somebody has for itself alone.
	held bitset.Set
	// foreign are those of held of which another namespace has shares, see apart; nil if there are none.
	foreign bitset.Set
	// short are the devices that need more of a shared counter than is left, or are incompatible; not those that are
	// shared already, for which nothing more is taken of counters (KEP-5075). Also those that are not supported.
	short bitset.Set
	// incompatible are the devices whose compatibility groups do not allow them to be in use beside those that are.
	incompatible bitset.Set
	// taken are held and short together.
	taken bitset.Set
	// counters is what is left of the pool's counters; nil if it has none.
	counters []amount.Amount
	// groups are the states of the pool's counter sets; nil if no device has compatibility groups.
	groups []groupState
	// room is what is left of the capacity of the shareable devices that have holders, by device; nil if none has.
	room [][]amount.Amount
}

// stateOf returns what holders leave of the pool to the requests' namespace.
func (in *Input) stateOf(p *inventory.NodePool) *poolState { return in.tallyOf(p).state }

func newPoolState(p *inventory.NodePool, in *usage.Pool) *poolState {
	s := &poolState{in: in}
	for name, device := range in.All() {
		i := p.Index(name)
		switch {
		case i < 0:
		case p.Shareable().Has(i):
			s.share(p, i, device.Holders())
		default:
			s.hold(p, i)
		}
	}
	s.taken = s.held
	s.short = p.Unsupported()
	if p.Consumers() != nil {
		s.countCounters(p)
	}
	if s.short != nil {
		s.taken = s.short.Clone()
		s.taken.Or(s.held)
	}
	return s
}

// countCounters finds what is left of counters, and for which devices it is not enough.
func (s *poolState) countCounters(p *inventory.NodePool) {
	var overdrawn map[string]bool
	s.counters, overdrawn = countersLeft(p.Pool, s.in)
	s.groups = groupsLeft(p, s.in)
	s.short = s.short.Clone() // the inventory's
	for i := p.Consumers().Next(0); i >= 0; i = p.Consumers().Next(i + 1) {
		if s.isShared(i) {
			continue
		}
		incompatible := s.groups != nil && !groupsAdmit(s.groups, p.Memberships(i))
		if incompatible {
			s.incompatible = addTo(s.incompatible, i, p.Len())
		}
		if incompatible || len(overdrawn) > 0 && (overdrawn[""] || overdrawn[p.NodeOf(i)]) || !affords(s.counters, p.Uses(i)) {
			s.short = addTo(s.short, i, p.Len())
		}
	}
}

// addTo adds i to a set of n, made when needed.
func addTo(set bitset.Set, i, n int) bitset.Set {
	if set == nil {
		set = bitset.New(n)
	}
	set.Add(i)
	return set
}

func (s *poolState) hold(p *inventory.NodePool, i int) {
	s.held = addTo(s.held, i, p.Len())
}

// share subtracts what the holders of shareable device i have. One without a share has all of it, and does not make it a
// shared device.
func (s *poolState) share(p *inventory.NodePool, i int, holders []usage.Holder) {
	capacity := p.Capacity(i)
	left := append(make([]amount.Amount, 0, len(capacity.Amounts)), capacity.Amounts...)
	shared := false
	for h := range holders {
		if holders[h].ShareID == nil {
			s.hold(p, i)
			continue
		}
		shared = true
		for k, name := range capacity.Names {
			if consumed, ok := holders[h].ConsumedCapacity[name]; ok {
				left[k] = left[k].Sub(amount.Of(consumed))
			}
		}
	}
	if !shared {
		return
	}
	if s.room == nil {
		s.room = make([][]amount.Amount, p.Len())
	}
	s.room[i] = left
}

// isShared tells whether the shareable device i has a holder of a share.
func (s *poolState) isShared(i int) bool { return s.room != nil && s.room[i] != nil }

// roomOf is what is left of the capacity of shareable device i. Read only.
func (s *poolState) roomOf(p *inventory.NodePool, i int) []amount.Amount {
	if s.isShared(i) {
		return s.room[i]
	}
	return p.Capacity(i).Amounts
}

// countersState is what is left of the counters of one pool in one state of usage, kept on the Pool.
type countersState struct {
	in        *usage.Pool
	left      []amount.Amount
	overdrawn map[string]bool
}

// countersLeft subtracts what held devices take of the pool's counters, whichever nodes they are for. Overdrawn
// tells of which nodes' counters, or under "" of the pool's, more is taken than there is of one: then nobody knows
// what else is wrong, and, as upstream does, no device that could need them is given away.
func countersLeft(p *inventory.Pool, in *usage.Pool) (left []amount.Amount, overdrawn map[string]bool) {
	if known, ok := p.Attached.Load().(*countersState); ok && known.in == in {
		return known.left, known.overdrawn
	}
	state := &countersState{in: in, left: make([]amount.Amount, len(p.Counters.All))}
	for i := range p.Counters.All {
		state.left[i] = p.Counters.All[i].Total
	}
	for name := range in.All() {
		for _, use := range p.Counters.Uses(name) {
			state.left[use.Counter] = state.left[use.Counter].Sub(use.Amount)
		}
	}
	for i, left := range state.left {
		if left.IsNegative() {
			if state.overdrawn == nil {
				state.overdrawn = make(map[string]bool)
			}
			state.overdrawn[p.Counters.All[i].Node] = true
		}
	}
	p.Attached.Store(state)
	return state.left, state.overdrawn
}

// affords tells whether so much is left.
func affords(left []amount.Amount, uses []inventory.Use) bool {
	for i := range uses {
		if left[uses[i].Counter].Less(uses[i].Amount) {
			return false
		}
	}
	return true
}

// covers tells whether what is left of each capacity is enough.
func covers(left, takes []amount.Amount) bool {
	for i := range takes {
		if left[i].Less(takes[i]) {
			return false
		}
	}
	return true
}

// takenFor are the devices that holders keep from the alternative. With admin access it does not matter who holds
// them. Shareable ones may not have the room even so.
func (s *poolState) takenFor(a *alternative) bitset.Set {
	if a.admin {
		return s.short
	}
	return s.taken
}

// lacksRoom tells whether device i, which matches, is shareable and has holders that leave less than the request takes.
func (s *poolState) lacksRoom(p *inventory.NodePool, match *inventory.PoolMatch, i int) bool {
	return s.isShared(i) && !covers(s.room[i], match.Takes(i))
}

// crowded counts the devices of set, which match, that lack room.
func (s *poolState) crowded(p *inventory.NodePool, match *inventory.PoolMatch, set, without bitset.Set) int {
	if s.room == nil {
		return 0
	}
	n := 0
	for i := p.Shareable().Next(0); i >= 0; i = p.Shareable().Next(i + 1) {
		if set.Has(i) && !without.Has(i) && s.lacksRoom(p, match, i) {
			n++
		}
	}
	return n
}

// free counts the devices of the pool that the alternative could have, each alone.
func (s *poolState) free(p *inventory.NodePool, match *inventory.PoolMatch, a *alternative) int {
	taken := s.takenFor(a)
	return match.Usable.AndNotCount(taken) - s.crowded(p, match, match.Usable, taken)
}
