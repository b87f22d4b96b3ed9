package allocator

import (
	"context"
	"slices"
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

	lanes   []lane                 // by alternative.lane
	matches []*inventory.PoolMatch // by alternative.lane and pool

	ledger ledger
	// taken are the devices picked so far, without the shareable ones; takenBy those by claim, kept only if there
	// is admin access, which may pick a device again that another claim of the pod has.
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
}

var searches = sync.Pool{New: func() any { return new(search) }}

func newSearch(ctx context.Context, in Input, devices *inventory.NodeDevices) *search {
	s := searches.Get().(*search)
	*s = search{
		ctx: ctx, reqs: in.Requests, in: in, pools: devices.Pools, problems: devices.Problems,
		starts: s.starts[:0], arena: s.arena[:0], lanes: s.lanes[:0], takenBy: s.takenBy[:0], bound: s.bound[:0],
		picks: s.picks[:0], used: s.used[:0], chosen: s.chosen[:0], order: s.order[:0], groups: s.groups[:0],
		matches: s.matches[:0], ledger: s.ledger,
	}
	for _, p := range s.pools {
		s.starts = append(s.starts, s.words*64)
		s.words += bitset.Words(p.Len())
	}
	s.openLedger()
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
	clear(s.matches)
	s.ledger.close()
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
	if (len(s.reqs.requests) > 1 || len(s.bound) > 0 || s.ledger.consumers != nil) && !s.promising(-1, 0, 0) {
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
	s.resetLedger()
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
	s.resetLedger()
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

// request satisfies the i-th request of the order and all later ones.
func (s *search) request(i int) bool {
	if i == len(s.order) {
		return true
	}
	request := s.reqs.requests[s.order[i]]
	twin := request.twin && i > 0 && s.order[i-1] == request.index-1 && !s.orderMatters(request.alternatives[0])
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
				// Devices that are not shareable are taken.
				from = s.picks[len(s.picks)-a.count].device
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
			class := s.classes.at(s, device, from)
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

// orderMatters tells whether a constraint of the alternative meets a value of an unknown kind, which may only come
// first: then the devices of two equal requests cannot be exchanged.
func (s *search) orderMatters(a *alternative) bool {
	for _, c := range a.constraints {
		for _, p := range s.pools {
			if p.Attribute(c.attribute).HasUnknown() {
				return true
			}
		}
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
