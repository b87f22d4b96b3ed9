// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math/rand/v2"
)

// holding is a claim that exists before the scheduler starts.
type holding struct {
	namespace, name string
	node            int
	gpus            []int // of the node; none: nobody has allocated it
	pods            []string
	count           int // GPUs that it asks for
}

func (h *holding) allocated() bool { return len(h.gpus) > 0 }

const (
	namespaces = 20
	// One claim of so many is not allocated.
	freeEvery = 25
	// One of so many is shared by two pods.
	sharedEvery = 50
	// One node of so many has all of its GPUs free.
	emptyNodeEvery = 20
)

func namespaceName(i int) string { return fmt.Sprintf("team-%02d", i%namespaces) }
func nodeName(i int) string      { return fmt.Sprintf("node-%04d", i) }

// population spreads claims over nodes as a cluster has them that has been used for a while: some nodes are full, some are
// empty, most are in between.
func population(s size) ([]holding, error) {
	random := rand.New(rand.NewPCG(s.Seed, 0))
	var rooms []room
	for _, i := range random.Perm(s.Nodes) {
		if i%emptyNodeEvery == 0 {
			continue
		}
		held := gpusPerNode
		if random.IntN(2) == 0 {
			held = 3 + random.IntN(gpusPerNode-3)
		}
		rooms = append(rooms, room{node: i, until: held})
	}
	all := make([]holding, 0, s.Claims)
	held, open := 0, 0
	for i := range s.Claims {
		h := holding{namespace: namespaceName(i), name: fmt.Sprintf("claim-%05d", i), count: wanted(random)}
		if i%freeEvery != 0 {
			for open < len(rooms) && rooms[open].full() {
				open++ // they need not be looked at again, unless there is no room elsewhere
			}
			at, ok := find(rooms[open:], h.count)
			if !ok {
				at, ok = find(rooms, h.count)
			}
			if !ok {
				return nil, fmt.Errorf("%d claims are too many for %d nodes: no room for the %dth", s.Claims, s.Nodes, i+1)
			}
			h.node, h.gpus = at.node, at.take(h.count)
			held += h.count
			h.pods = []string{fmt.Sprintf("user-%05d", i)}
			if i%sharedEvery == 1 {
				h.pods = append(h.pods, h.pods[0]+"-too")
			}
		}
		all = append(all, h)
	}
	if free := s.gpus() - held; free < 4*s.Burst {
		return nil, fmt.Errorf("%d GPUs are free beside %d claims: too few for a burst of %d pods and what comes after", free, s.Claims, s.Burst)
	}
	return all, nil
}

// wanted is how many GPUs a claim asks for.
func wanted(random *rand.Rand) int {
	switch n := random.IntN(20); {
	case n < 17:
		return 1
	case n < 19:
		return 2
	default:
		return 4
	}
}

// room is what is left to give on a node: its GPUs from next to until.
type room struct {
	node, next, until int
}

func (r *room) take(n int) []int {
	var gpus []int
	for range n {
		gpus = append(gpus, r.next)
		r.next++
	}
	return gpus
}

// find returns the first node with room for n GPUs, and if there is none one that was not meant to be filled so far.
func find(rooms []room, n int) (*room, bool) {
	for i := range rooms {
		if rooms[i].until-rooms[i].next >= n {
			return &rooms[i], true
		}
	}
	for i := range rooms {
		if gpusPerNode-rooms[i].next >= n {
			return &rooms[i], true
		}
	}
	return nil, false
}

// full tells that nothing is left of what the node was meant to give.
func (r *room) full() bool { return r.next >= r.until }
