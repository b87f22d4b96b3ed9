package allocator

import (
	"sync/atomic"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// tally is what is kept on a NodePool: the state that holders leave it in, and how many devices that leaves to the
// requests seen last. As long as nothing in the pool is taken or given back it is the answer for every pod, and most
// nodes are judged by nothing else: Filter has to look at every node of the cluster, so each place in memory that it
// needs not go to counts.
type tally struct {
	place usage.Place
	mark  usage.Mark
	state *poolState
	// counts has, by the number of the matcher modulo its length, a count as made by pack; 0 if there is none.
	counts [4]atomic.Uint64
}

// tallyIn returns the tally of the i-th pool of a node. It is kept also on the node that has only that pool.
func tallyIn(devices *inventory.NodeDevices, i int, view usage.View) *tally {
	if len(devices.Pools) > 1 {
		return tallyOf(devices.Pools[i], view)
	}
	known, _ := devices.Attached.Load().(*tally)
	if known == nil || known.mark != view.Mark(known.place) {
		known = tallyOf(devices.Pools[i], view)
		devices.Attached.Store(known)
	}
	return known
}

// tallyOf returns the tally that is true in the view.
func tallyOf(p *inventory.NodePool, view usage.View) *tally {
	known, _ := p.Attached.Load().(*tally)
	if known != nil && known.mark == view.Mark(known.place) {
		return known
	}
	id := usage.PoolID(p.ID())
	next := &tally{place: usage.PlaceOf(id)}
	next.mark = view.Mark(next.place)
	if in := view.Pool(id); known != nil && known.state.in == in {
		// Something changed in another pool that has the same mark.
		next.state = known.state
		for i := range known.counts {
			next.counts[i].Store(known.counts[i].Load())
		}
	} else {
		next.state = newPoolState(p, in)
	}
	p.Attached.Store(next)
	return next
}

// count says how the devices of a pool look to a request.
type count struct {
	// free are the devices that the request could have, each alone.
	free int
	// dependent tells that some of them consume counters, so that having one may rule out another.
	dependent bool
	// errors tells that a selector failed on some device.
	errors bool
}

const (
	dependentBit = 1 << 30
	errorsBit    = 1 << 31
)

func (c count) pack(id uint32) uint64 {
	packed := uint64(id)<<32 | uint64(c.free)
	if c.dependent {
		packed |= dependentBit
	}
	if c.errors {
		packed |= errorsBit
	}
	return packed
}

func unpack(packed uint64) count {
	return count{free: int(packed & (dependentBit - 1)), dependent: packed&dependentBit != 0, errors: packed&errorsBit != 0}
}

// count returns the count of the i-th pool of a node for the alternative, which has no admin access.
func (t *tally) count(devices *inventory.NodeDevices, i int, a *alternative) count {
	id := a.matcher.ID()
	slot := &t.counts[id%uint32(len(t.counts))]
	if packed := slot.Load(); packed>>32 == uint64(id) {
		return unpack(packed)
	}
	c := t.state.count(devices.Pools[i], a)
	slot.Store(c.pack(id))
	return c
}

func (s *poolState) count(p *inventory.NodePool, a *alternative) count {
	match := a.matcher.On(p)
	return count{
		free:      s.free(p, match, a),
		dependent: match.Usable.Intersects(p.Consumers()),
		errors:    match.Errors != nil,
	}
}
