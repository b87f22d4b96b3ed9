package allocator

import (
	"context"
	"math/bits"
	"slices"
	"sort"
	"sync"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// search finds the first way to satisfy all requests on one node, in upstream's order: requests in order,
// alternatives in order, devices of a request ascending. The order defines the answer, so every shortcut skips
// only what cannot contain the first answer:
//
//   - Necessary conditions that are cheap to check (promising.go) cut off what cannot be completed.
//   - Of devices that nothing can tell apart only the first is tried for one place (class.go).
//   - What led nowhere once is not tried again in another guise (class.go).
//   - Of two requests that ask for the same, the earlier gets the earlier device.
//
// The first attempt is greedy: it never takes a pick back. Only when it fails is the search started anew with
// all shortcuts. Devices of all pools of the node are numbered in the order in which they are tried, each pool
// starting at a multiple of 64.
type search struct {
	ctx   context.Context
	reqs  *Requests
	in    Input
	pools []*inventory.NodePool
	// starts has the number of the first device of each pool.
	starts   []int
	problems []*inventory.PoolProblem
	words    int // length of all bitsets
	arena    []uint64

	lanes []lane // by alternative.lane

	// taken are the devices picked so far; takenBy those by claim, kept only if there is admin access, which
	// may pick a device again that another claim of the pod has.
	taken   bitset.Set
	takenBy []bitset.Set
	bound   []binding // by constraint.index
	picks   []pick
	used    []int // devices picked, by claim
	chosen  []int // position of the alternative, by request

	// order has the requests to satisfy, as indexes into reqs.requests.
	order []int
	steps int
	// careful is false for the greedy attempt, which sets stuck where it would have to take a pick back.
	careful bool
	stuck   bool
	classes *classes    // nil while not careful, or if devices cannot be told apart safely
	groups  []*grouping // by constraint.index; made when first needed

	// What ended the search early, if anything did.
	err           error
	selectorError *SelectorError
	tooMany       bool
	poolProblem   bool
}

// lane is an alternative on this node.
type lane struct {
	// candidates may be picked if nothing picked before forbids it. For a request for all devices these
	// are the ones to take.
	candidates bitset.Set
	// errors are the devices that cannot be judged. Nil if none.
	errors bitset.Set
	wanted int
	// hopeless lanes cannot be satisfied whatever else is picked.
	hopeless bool
}

// pick is one device given to one alternative.
type pick struct {
	lane   int
	device int
}

// binding is the state of one constraint: the values of the devices picked so far.
type binding struct {
	values []inventory.AttributeValue
}

var searches = sync.Pool{New: func() any { return new(search) }}

func newSearch(ctx context.Context, in Input, devices *inventory.NodeDevices) *search {
	s := searches.Get().(*search)
	*s = search{
		ctx: ctx, reqs: in.Requests, in: in, pools: devices.Pools, problems: devices.Problems,
		starts: s.starts[:0], arena: s.arena[:0], lanes: s.lanes[:0], takenBy: s.takenBy[:0], bound: s.bound[:0],
		picks: s.picks[:0], used: s.used[:0], chosen: s.chosen[:0], order: s.order[:0], groups: s.groups[:0],
	}
	for _, p := range s.pools {
		s.starts = append(s.starts, s.words*64)
		s.words += bitset.Words(p.Len())
	}
	s.taken = s.newSet()
	for _, c := range s.reqs.claims {
		s.used = append(s.used, 0)
		if s.reqs.admin {
			s.takenBy = append(s.takenBy, s.newSet())
		}
		for _, constraint := range c.constraints {
			if n := constraint.index; n < cap(s.bound) {
				s.bound = s.bound[:n+1]
				s.bound[n].values = s.bound[n].values[:0]
			} else {
				s.bound = append(s.bound, binding{})
			}
			s.groups = append(s.groups, nil)
		}
	}
	for i := range s.reqs.requests {
		s.chosen = append(s.chosen, 0)
		s.order = append(s.order, i)
	}
	return s
}

// release gives the memory to the next search.
func (s *search) release() {
	clear(s.groups)
	s.ctx, s.in, s.reqs, s.pools, s.problems, s.classes = nil, Input{}, nil, nil, nil, nil
	searches.Put(s)
}

// newSet returns an empty set from the search's own memory.
func (s *search) newSet() bitset.Set {
	n := len(s.arena)
	if n+s.words > cap(s.arena) || cap(s.arena) == 0 {
		// Sets made before keep the old memory.
		s.arena = make([]uint64, 0, max(256, 2*cap(s.arena), 8*s.words))
		n = 0
	}
	s.arena = s.arena[:n+s.words]
	set := s.arena[n : n+s.words : n+s.words]
	clear(set)
	return bitset.Set(set)
}

// run searches. It returns false if there is no answer, or none was found before something ended the search.
func (s *search) run() bool {
	if err := s.ctx.Err(); err != nil {
		s.err = context.Cause(s.ctx)
		return false
	}
	for _, a := range s.reqs.lanes {
		if !s.prepare(a) {
			return false
		}
	}
	if !s.enough() {
		return false
	}
	if (len(s.reqs.requests) > 1 || len(s.bound) > 0) && !s.promising(-1, 0, 0) {
		return false
	}
	if s.request(0) {
		return true
	}
	if !s.stuck {
		return false
	}
	return s.thorough()
}

// thorough searches with all shortcuts, after the greedy attempt got stuck. It begins with the parts: if one
// request or one claim cannot be satisfied even when it is alone, there is no need to vary what comes before.
func (s *search) thorough() bool {
	s.careful, s.stuck = true, false
	s.classify()
	whole := s.order
	var parts [][]int
	if len(whole) > 1 {
		for _, r := range whole {
			parts = append(parts, []int{r})
		}
	}
	if len(s.reqs.claims) > 1 {
		for i := range s.reqs.claims {
			var part []int
			for _, r := range s.reqs.claims[i].requests {
				part = append(part, r.index)
			}
			if len(part) > 1 {
				parts = append(parts, part)
			}
		}
	}
	for _, part := range parts {
		s.begin(part)
		if !s.promising(-1, 0, 0) || !s.request(0) {
			if s.err != nil {
				return false
			}
			if s.selectorError == nil {
				s.begin(whole)
				return false
			}
			// Alone, the request came to a device that it might not come to otherwise.
			s.selectorError = nil
		}
	}
	s.begin(whole)
	return s.request(0)
}

// begin takes all picks back and sets which requests are to be satisfied.
func (s *search) begin(order []int) {
	s.order = order
	clear(s.taken)
	for i := range s.takenBy {
		clear(s.takenBy[i])
	}
	for i := range s.bound {
		s.bound[i].values = s.bound[i].values[:0]
	}
	s.picks = s.picks[:0]
	clear(s.used)
	if s.classes != nil {
		s.classes.begin(s)
	}
}

// prepare finds the devices for one alternative. It returns false if the node is out of the question.
func (s *search) prepare(a *alternative) bool {
	l := lane{candidates: s.newSet(), wanted: a.count}
	blocked := false
	for i, p := range s.pools {
		match := a.matcher.On(p)
		base := s.starts[i] / 64
		if match.Errors != nil {
			if a.all {
				return s.fail(a, s.starts[i]+match.Errors.Next(0))
			}
			if l.errors == nil {
				l.errors = s.newSet()
			}
			copy(l.errors[base:], match.Errors)
		}
		own := l.candidates[base : base+bitset.Words(p.Len())]
		if a.all {
			copy(own, match.Match)
			blocked = blocked || match.Tainted != nil || own.Intersects(p.Advanced()) ||
				(!a.admin && own.Intersects(held(p, s.in.Usage)))
			continue
		}
		copy(own, match.Usable)
		own.AndNot(p.Advanced())
		if !a.admin {
			taken := held(p, s.in.Usage)
			own.AndNot(taken)
			if l.errors != nil {
				l.errors[base:].AndNot(taken)
			}
		}
	}
	n := l.candidates.Count()
	if a.all {
		if len(s.problems) > 0 {
			s.poolProblem = true
			return false
		}
		l.wanted = n
		l.hopeless = blocked || n == 0
	} else {
		l.hopeless = n < a.count && l.errors.Empty()
	}
	s.lanes = append(s.lanes, l)
	return true
}

// enough tells whether each request has an alternative that the node has devices for, and each claim's
// allocation has room for them.
func (s *search) enough() bool {
	for _, c := range s.reqs.claims {
		least := 0
		for _, r := range c.requests {
			alive := false
			smallest := resourceapi.AllocationResultsMaxSize + 1
			for _, a := range r.alternatives {
				alive = alive || !s.lanes[a.lane].hopeless
				smallest = min(smallest, s.lanes[a.lane].wanted)
			}
			if !alive {
				return false
			}
			least += smallest
		}
		if least > resourceapi.AllocationResultsMaxSize {
			s.tooMany = true
			return false
		}
	}
	return true
}

// request satisfies the i-th request of the order and all later ones.
func (s *search) request(i int) bool {
	if i == len(s.order) {
		return true
	}
	request := s.reqs.requests[s.order[i]]
	twin := request.twin && i > 0 && s.order[i-1] == request.index-1
	var known string
	if s.classes != nil && !twin && i > 0 {
		var dead bool
		if known, dead = s.classes.dead(s, i); dead {
			return false
		}
	}
	for _, a := range request.alternatives {
		l := &s.lanes[a.lane]
		if l.hopeless || l.wanted > resourceapi.AllocationResultsMaxSize-s.used[request.claim] {
			continue
		}
		s.chosen[request.index] = a.position
		var ok bool
		if a.all {
			ok = s.takeAll(i, a, l)
		} else {
			from := 0
			if twin {
				from = s.picks[len(s.picks)-a.count].device + 1
			}
			ok = s.take(i, a, l, 0, from)
		}
		if ok {
			return true
		}
		if s.stopped() {
			return false
		}
	}
	if known != "" {
		s.classes.bury(known)
	}
	return false
}

// take picks devices for the alternative, from the k-th on, numbered at least from, then goes on to the next
// request.
func (s *search) take(i int, a *alternative, l *lane, k, from int) bool {
	if k >= l.wanted {
		return s.request(i + 1)
	}
	if s.steps++; s.steps%64 == 0 && s.ctx.Err() != nil {
		s.err = context.Cause(s.ctx)
		return false
	}
	taken := s.takenFor(a)
	left := s.countFrom(l.candidates, taken, from)
	var tried []int32 // classes that led nowhere
	for device := s.next(l, taken, from); device >= 0; device = s.next(l, taken, device+1) {
		if l.errors.Has(device) {
			return s.fail(a, device)
		}
		if left < l.wanted-k {
			return false
		}
		left--
		if s.classes != nil {
			class := s.classes.of[device]
			if slices.Contains(tried, class) {
				continue
			}
			tried = append(tried, class)
		}
		if !s.pick(a, device) {
			continue
		}
		if (!s.careful || s.promising(i, k+1, device+1)) && s.take(i, a, l, k+1, device+1) {
			return true
		}
		if s.stopped() {
			return false
		}
		if !s.careful {
			s.stuck = true
			return false
		}
		s.unpick(a)
	}
	return false
}

// takeAll picks all candidates, then goes on to the next request.
func (s *search) takeAll(i int, a *alternative, l *lane) bool {
	picked := 0
	taken := s.takenFor(a)
	for device := l.candidates.Next(0); device >= 0; device = l.candidates.Next(device + 1) {
		if taken.Has(device) || !s.pick(a, device) {
			break
		}
		picked++
	}
	if picked == l.wanted && (!s.careful || s.promising(i, picked, 0)) && s.request(i+1) {
		return true
	}
	if s.stopped() {
		return false
	}
	if !s.careful && picked > 0 {
		s.stuck = true
		return false
	}
	for range picked {
		s.unpick(a)
	}
	return false
}

// takenFor are the devices that the alternative cannot have because of earlier picks: those of the whole pod,
// or with admin access those of the claim.
func (s *search) takenFor(a *alternative) bitset.Set {
	if a.admin {
		return s.takenBy[a.request.claim]
	}
	return s.taken
}

// next is the first device numbered at least from that is a candidate, or would be if it could be judged.
func (s *search) next(l *lane, taken bitset.Set, from int) int {
	for w := from / 64; w < s.words; w++ {
		word := l.candidates[w]
		if l.errors != nil {
			word |= l.errors[w]
		}
		word &^= taken[w]
		if w == from/64 {
			word &= ^uint64(0) << (uint(from) & 63)
		}
		if word != 0 {
			return w*64 + bits.TrailingZeros64(word)
		}
	}
	return -1
}

func (s *search) countFrom(set, taken bitset.Set, from int) int {
	n := 0
	for w := from / 64; w < s.words; w++ {
		word := set[w] &^ taken[w]
		if w == from/64 {
			word &= ^uint64(0) << (uint(from) & 63)
		}
		n += bits.OnesCount64(word)
	}
	return n
}

// pick gives the device to the alternative unless a constraint forbids it.
func (s *search) pick(a *alternative, device int) bool {
	for i, c := range a.constraints {
		if !s.bind(c, device) {
			for _, c := range a.constraints[:i] {
				s.unbind(c)
			}
			return false
		}
	}
	s.taken.Add(device)
	if len(s.takenBy) > 0 {
		s.takenBy[a.request.claim].Add(device)
	}
	s.used[a.request.claim]++
	s.picks = append(s.picks, pick{lane: a.lane, device: device})
	return true
}

// unpick takes back the last pick, which was for the alternative.
func (s *search) unpick(a *alternative) {
	device := s.picks[len(s.picks)-1].device
	s.picks = s.picks[:len(s.picks)-1]
	s.used[a.request.claim]--
	stillTaken := false
	if len(s.takenBy) > 0 {
		s.takenBy[a.request.claim].Remove(device)
		for _, by := range s.takenBy {
			stillTaken = stillTaken || by.Has(device)
		}
	}
	if !stillTaken {
		s.taken.Remove(device)
	}
	for _, c := range a.constraints {
		s.unbind(c)
	}
}

// bind adds the device's value to the constraint's, if that is permitted.
func (s *search) bind(c *constraint, device int) bool {
	value := s.value(c, device)
	if value.Kind == inventory.NoAttribute {
		return false
	}
	b := &s.bound[c.index]
	if !admits(c, b.values, value) {
		return false
	}
	b.values = append(b.values, value)
	return true
}

func (s *search) unbind(c *constraint) {
	b := &s.bound[c.index]
	b.values = b.values[:len(b.values)-1]
}

// admits tells whether a device with the value may join those with the values that are there. A value of an
// unknown kind may only come first.
func admits(c *constraint, have []inventory.AttributeValue, value inventory.AttributeValue) bool {
	if len(have) == 0 {
		return true
	}
	if value.Kind == inventory.UnknownKind {
		return false
	}
	if !c.distinct {
		return have[0] == value
	}
	for _, other := range have {
		if other == value {
			return false
		}
	}
	return true
}

// value is the device's value of the constraint's attribute.
func (s *search) value(c *constraint, device int) inventory.AttributeValue {
	p := s.poolOf(device)
	return s.pools[p].Attribute(c.attribute).Value(device - s.starts[p])
}

// poolOf is the index of the pool that the device is in.
func (s *search) poolOf(device int) int {
	if len(s.starts) == 1 {
		return 0
	}
	return sort.SearchInts(s.starts, device+1) - 1
}

// fail ends the search because the alternative needs to judge a device on which a selector fails.
func (s *search) fail(a *alternative, device int) bool {
	p := s.poolOf(device)
	s.selectorError = selectorError(s.reqs, a, s.pools[p], device-s.starts[p])
	return false
}

func (s *search) stopped() bool { return s.err != nil || s.selectorError != nil || s.stuck }

// score is the preference of the chosen alternatives.
func (s *search) score() int64 {
	var score int64
	for i, r := range s.reqs.requests {
		score += r.alternatives[s.chosen[i]].preference()
	}
	return score
}
