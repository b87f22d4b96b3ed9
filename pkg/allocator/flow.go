package allocator

import (
	"cmp"
	"math/bits"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory/bitset"
)

func onesCount(word uint64) int { return bits.OnesCount64(word) }

// matchable tells whether the open requests can have their devices without sharing any that are not shareable.
// Requests with admin access may share across claims and are left out. Of shareable devices each request may have one
// share. With more than 64 requests the answer is yes without a look.
func (pr *pruning) matchable(all []open) bool {
	requests := pr.seekers[:0]
	for i := range all {
		o := &all[i]
		if o.admin || o.wanted <= 0 {
			continue
		}
		if shares := o.candidates.AndCount(pr.ledger.shareable); shares > 0 {
			if o.wanted <= shares {
				continue
			}
			rest := seeker{wanted: o.wanted - shares, candidates: pr.newSet()}
			copy(rest.candidates, o.candidates)
			rest.candidates.AndNot(pr.ledger.shareable)
			requests = append(requests, rest)
			continue
		}
		requests = append(requests, seeker{o.candidates, o.wanted})
	}
	pr.seekers = requests
	if len(requests) < 2 || len(requests) > 64 {
		return true
	}
	// The most particular first: if each finds enough even after all before it took theirs, all do.
	slices.SortStableFunc(requests, func(a, b seeker) int { return cmp.Compare(a.candidates.Count(), b.candidates.Count()) })
	wanted, easy := 0, true
	for _, o := range requests {
		wanted += o.wanted
		easy = easy && o.candidates.Count() >= wanted
	}
	if easy {
		return true
	}
	return pr.flow.of(requests, pr.words).saturates()
}

// seeker is a request that wants devices of a set.
type seeker struct {
	candidates bitset.Set
	wanted     int
}

// flow is a bipartite network: requests on one side, on the other groups of devices that are open to the same
// requests, with as much capacity as devices.
type flow struct {
	wanted  []int
	groups  []flowGroup
	visited []bool // scratch
}

type flowGroup struct {
	open uint64 // bit i: open to request i
	free int
	load []int // by request
}

// begin empties the flow and keeps its memory.
func (f *flow) begin() *flow {
	f.wanted, f.groups = f.wanted[:0], f.groups[:0]
	return f
}

// of makes it the flow of the requests.
func (f *flow) of(requests []seeker, words int) *flow {
	f.begin()
	for _, o := range requests {
		f.wanted = append(f.wanted, o.wanted)
	}
	for w := range words {
		var union uint64
		for _, o := range requests {
			union |= o.candidates[w]
		}
		for ; union != 0; union &= union - 1 {
			bit := union & -union
			var open uint64
			for i, o := range requests {
				if o.candidates[w]&bit != 0 {
					open |= 1 << i
				}
			}
			f.add(open)
		}
	}
	return f
}

func (f *flow) add(open uint64) {
	for i := range f.groups {
		if f.groups[i].open == open {
			f.groups[i].free++
			return
		}
	}
	group := flowGroup{open: open, free: 1}
	if n := len(f.groups); n < cap(f.groups) { // the memory of an earlier one
		group.load = f.groups[:n+1][n].load[:0]
	}
	group.load = slices.Grow(group.load, len(f.wanted))[:len(f.wanted)]
	clear(group.load)
	f.groups = append(f.groups, group)
}

// saturates tells whether every request gets what it wants.
func (f *flow) saturates() bool {
	visited := slices.Grow(f.visited[:0], len(f.groups))[:len(f.groups)]
	f.visited = visited
	for r, wanted := range f.wanted {
		for range wanted {
			clear(visited)
			if !f.augment(r, visited) {
				return false
			}
		}
	}
	return true
}

// augment finds one device for request r, moving other requests to other groups if need be.
func (f *flow) augment(r int, visited []bool) bool {
	for g := range f.groups {
		group := &f.groups[g]
		if group.open&(1<<r) == 0 || visited[g] {
			continue
		}
		visited[g] = true
		if group.free > 0 {
			group.free--
			group.load[r]++
			return true
		}
		for other, load := range group.load {
			if load > 0 && other != r && f.augment(other, visited) {
				group.load[other]--
				group.load[r]++
				return true
			}
		}
	}
	return false
}

// decideByFlow decides what is nothing but a choice of values and a flow, unless there are too many values.
func (pr *pruning) decideByFlow(i int) (possible, known bool) {
	mark := pr.mark()
	defer pr.takeBack(mark)
	requests, ok := pr.openRequests(i-1, pr.wantedBy(i-1), 0)
	if !ok || !pr.isFlow(requests) {
		return false, !ok
	}
	total := slices.Clone(pr.used)
	var constraints []*constraint
	for i := range requests {
		claim := requests[i].request.claim
		if total[claim] += requests[i].wanted; total[claim] > resourceapi.AllocationResultsMaxSize {
			return false, true
		}
	}
	for _, claim := range pr.reqs.claims {
		constraints = pr.unbound(constraints, claim.constraints, requests)
	}
	if !pr.isEnough(requests) {
		return false, true
	}
	budget := maxFlows
	possible = pr.assignable(i, requests, constraints, nil, &budget)
	return possible, budget >= 0
}

// maxFlows is for how many values it is asked whether a flow finds devices, before they are searched for.
const maxFlows = 500
