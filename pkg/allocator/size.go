package allocator

import (
	"slices"

	"stowage.dev/stowage/pkg/inventory"
)

// size is how large the devices are that a pod's requests would take of a node. SmallestFit chooses among the devices of a node; where
// each node has one kind of them, it takes this to choose among nodes.
//
// It is found from what is free, not from what was chosen, so that it costs next to nothing and is the same before the choice.
type size struct {
	sum     int64
	unknown bool
}

// add counts the devices that the alternative would take, the smallest that are free for it. What it takes of a shared device is
// the same everywhere, so it is the device's own size that matters.
func (s *size) add(seen *glance, in *Input, a *alternative) {
	least, most := 0, 0 // among pools with enough devices, and among those without
	for p, t := range seen.pools(in) {
		free := t.count(in, p, a).free
		if free == 0 {
			continue
		}
		each, same := p.SameSize()
		if !same {
			each = t.state.nthSmallest(in, p, a, min(free, max(1, a.count)))
		}
		switch {
		case each == 0:
			s.unknown = true
		case free < a.count:
			most = max(most, each)
		case least == 0 || each < least:
			least = each
		}
	}
	if least == 0 {
		least = most
	}
	s.sum += int64(least)
}

// total is 0 if the size of some device is not known.
func (s *size) total() int64 {
	if s.unknown {
		return 0
	}
	return s.sum
}

// nthSmallest is the size of the n-th of the free devices, the smallest first. There are at least n.
func (s *poolState) nthSmallest(in *Input, p *inventory.NodePool, a *alternative, n int) int {
	match, taken := in.match(a, p), s.takenFor(a)
	var buffer [64]int // as many as most nodes have
	sizes := buffer[:0]
	for i := match.Usable.Next(0); i >= 0; i = match.Usable.Next(i + 1) {
		if !taken.Has(i) && !(p.Shareable().Has(i) && s.lacksRoom(p, match, i)) {
			sizes = append(sizes, p.Size(i))
		}
	}
	slices.Sort(sizes)
	return sizes[n-1]
}
