package allocator

import (
	"encoding/binary"
	"slices"

	"stowage.dev/stowage/pkg/inventory"
)

// parts partitions the devices of a node into those that have nothing to do with each other's counters: the
// partitions of one GPU are one part, those of another GPU another. Two parts have the same shape if their devices
// correspond one to one: same classes, same consumption of corresponding counters, and as much left of those
// before the search. If the same has been picked of both besides, one can stand for the other.
//
// The devices of one part that are alike in everything have the same place in it.
type parts struct {
	of     []int32 // by device: its part
	places []int32 // by device: its place
	list   []part
	shapes map[string]int32

	states map[string]int32 // what is picked of a part → number
	picked [][]string       // by part: what is picked of its devices, in order, see observe
	dirty  []int32          // parts of which picked is not empty
	known  map[string]int32 // shape, state and place → class
	first  int32            // the first class of those
}

// part is one part.
type part struct {
	shape       int32
	first, last int // devices
	simple      bool
}

// newParts finds the parts: what is connected through counters.
func newParts(s *search) *parts {
	ps := &parts{
		of: make([]int32, s.words*64), places: make([]int32, s.words*64),
		shapes: make(map[string]int32), states: make(map[string]int32), known: make(map[string]int32),
	}
	for p, pool := range s.pools {
		ps.connect(s.starts[p], pool)
	}
	ps.picked = make([][]string, len(ps.list))
	return ps
}

// connect makes the parts of one pool, the first device of which has the number start.
func (ps *parts) connect(start int, pool *inventory.NodePool) {
	known := make(map[int]int32) // part of the pool's counters → part
	for i := range pool.Len() {
		device := start + i
		uses := pool.Uses(i)
		n := int32(len(ps.list))
		if len(uses) > 0 {
			counters := pool.Pool.Counters.PartOf(uses[0])
			if known, ok := known[counters]; ok {
				ps.of[device] = known
				ps.list[known].last = device
				continue
			}
			known[counters] = n
		}
		ps.of[device] = n
		ps.list = append(ps.list, part{first: device, last: device, simple: len(uses) == 0 && !pool.Shareable().Has(i)})
	}
}

// refine makes classes of devices regardless of what they share into classes that take that into account.
func (ps *parts) refine(s *search, classes []int32) {
	devices := make([][]int, len(ps.list)) // by part, those that some request may take
	for p, pool := range s.pools {
		for i := range pool.Len() {
			device := s.starts[p] + i
			if slices.ContainsFunc(s.lanes, func(l lane) bool { return l.candidates.Has(device) || l.errors.Has(device) }) {
				devices[ps.of[device]] = append(devices[ps.of[device]], device)
			}
		}
	}
	simple := int32(0)
	for i := range ps.list {
		if ps.list[i].simple {
			simple = max(simple, classes[ps.list[i].first]+1)
		}
	}
	known := make(map[string]int32)
	for i := range ps.list {
		if ps.list[i].simple {
			continue
		}
		ps.list[i].shape = ps.shape(s, i, devices[i], classes)
		for _, device := range devices[i] {
			key := binary.AppendVarint(binary.AppendVarint(nil, int64(ps.list[i].shape)), int64(ps.places[device]))
			classes[device] = simple + intern(known, key)
		}
	}
	ps.first = simple + int32(len(known))
}

// shape describes the part, and finds the places of its devices.
func (ps *parts) shape(s *search, n int, devices []int, classes []int32) int32 {
	var shape []byte
	counters := make(map[int]int) // counter → its number in the part, in the order in which devices use them
	places := make(map[string]int32)
	for _, device := range devices {
		key := binary.AppendVarint(nil, int64(classes[device]))
		for _, use := range s.usesOf(device) {
			number, ok := counters[use.Counter]
			if !ok {
				number = len(counters)
				counters[use.Counter] = number
				shape = append(shape, 'c')
				shape = s.countersOf(device)[use.Counter].Append(shape)
			}
			key = use.Amount.Append(binary.AppendVarint(key, int64(number)))
		}
		key = append(key, '/')
		if s.ledger.shareable.Has(device) {
			key = s.appendShare(key, device)
		}
		ps.places[device] = intern(places, key)
		shape = binary.AppendVarint(append(shape, 'd'), int64(len(key)))
		shape = append(shape, key...)
	}
	return intern(ps.shapes, shape)
}

// appendShare describes what matters about a shareable device: its room, what each alternative takes of it, and
// whether it is shared already.
func (s *search) appendShare(key []byte, device int) []byte {
	p := s.poolOf(device)
	n := len(s.pools[p].Capacity(device - s.starts[p]).Names)
	shared := byte(0)
	if s.isShared(device) {
		shared = 1
	}
	key = append(key, shared)
	for _, left := range s.roomOf(device)[:n] {
		key = left.Append(key)
	}
	for _, a := range s.reqs.lanes {
		if !s.lanes[a.lane].candidates.Has(device) {
			continue
		}
		for _, takes := range s.takes(a, device) {
			key = takes.Append(key)
		}
	}
	return key
}

// isSimple tells whether the device is a part of its own and not shareable.
func (ps *parts) isSimple(device int) bool { return ps.list[ps.of[device]].simple }

// observe looks at what is picked of the parts that are not simple.
func (ps *parts) observe(s *search) {
	for _, n := range ps.dirty {
		ps.picked[n] = ps.picked[n][:0]
	}
	ps.dirty = ps.dirty[:0]
	for i, p := range s.picks {
		n := ps.of[p.device]
		if ps.list[n].simple {
			continue
		}
		if len(ps.picked[n]) == 0 {
			ps.dirty = append(ps.dirty, n)
		}
		isFirst := !slices.ContainsFunc(s.picks[:i], func(other pick) bool { return other.device == p.device })
		if isFirst { // all shares of a device are described together
			ps.picked[n] = append(ps.picked[n], ps.describe(s, p.device))
		}
	}
	for _, n := range ps.dirty {
		slices.Sort(ps.picked[n])
	}
}

// describe says what is picked of the device, in a form that is equal for devices of the same place of which the same
// is picked. It is empty if nothing is.
func (ps *parts) describe(s *search, device int) string {
	var kinds []int
	for _, pick := range s.picks {
		if pick.device == device {
			kinds = append(kinds, s.kindOf(pick.lane))
		}
	}
	if len(kinds) == 0 {
		return ""
	}
	slices.Sort(kinds)
	text := binary.AppendVarint(nil, int64(ps.places[device]))
	if s.ledger.shareable.Has(device) {
		text = binary.AppendVarint(text, int64(len(kinds)))
		for _, kind := range kinds {
			text = binary.AppendVarint(text, int64(kind))
		}
	}
	return string(text)
}

// kindOf tells alternatives apart by what a share for them takes.
func (s *search) kindOf(lane int) int {
	return slices.IndexFunc(s.reqs.lanes, func(a *alternative) bool { return a.matcher == s.reqs.lanes[lane].matcher })
}

func (ps *parts) appendPicked(key []byte, n int32) []byte {
	for _, text := range ps.picked[n] {
		key = append(binary.AppendVarint(key, int64(len(text))), text...)
	}
	return key
}

// class is the class of a device of a part that is not simple, for a request that takes devices from the number from
// on. A part that the request may take only in part is like no other.
func (ps *parts) class(s *search, device, from int) int32 {
	ps.observe(s)
	n := ps.of[device]
	p := &ps.list[n]
	key := binary.AppendVarint(nil, int64(p.shape))
	if p.first < from {
		key = binary.AppendVarint(append(key, '!'), int64(n))
	}
	key = binary.AppendVarint(key, int64(ps.places[device]))
	own := ps.describe(s, device)
	key = append(binary.AppendVarint(key, int64(len(own))), own...)
	return ps.first + intern(ps.known, ps.appendPicked(key, n))
}

// appendStates appends what is picked of all parts that are not simple, regardless of which of those of equal shape
// it is, for those that have a device for which matters says so.
func (ps *parts) appendStates(s *search, key []byte, matters func(device int) bool) []byte {
	ps.observe(s)
	var states []int32
	for _, n := range ps.dirty {
		if ps.mattersAt(s, n, matters) {
			states = append(states, intern(ps.states, ps.appendPicked(binary.AppendVarint(nil, int64(ps.list[n].shape)), n)))
		}
	}
	slices.Sort(states)
	key = binary.AppendUvarint(key, uint64(len(states)))
	for _, state := range states {
		key = binary.AppendUvarint(key, uint64(state))
	}
	return key
}

func (ps *parts) mattersAt(s *search, n int32, matters func(device int) bool) bool {
	p := &ps.list[n]
	for device := p.first; device <= p.last; device++ {
		if ps.of[device] == n && s.isCandidate(device) && matters(device) {
			return true
		}
	}
	return false
}

func (s *search) isCandidate(device int) bool {
	return slices.ContainsFunc(s.lanes, func(l lane) bool { return l.candidates.Has(device) })
}
