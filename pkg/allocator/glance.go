package allocator

import (
	"hash/maphash"
	"iter"
	"math/bits"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// glance is what one look at a node needs: its devices, and where these are of one pool and nothing is wrong, as on most
// nodes, that pool and its tally. Immutable. To find it by the address of the node, which is never changed but replaced,
// takes a fraction of what it takes to find the devices by the node's name: with thousands of nodes each place in memory
// that is looked at on the way has to be fetched from afar.
type glance struct {
	node    *v1.Node
	devices *inventory.NodeDevices
	pool    *inventory.NodePool // nil if there is not one pool alone
	tally   *tally              // of pool
}

// glances is a table of them, kept on the view of the inventory that they are true for. A glance may be in one of two
// places; one that is displaced is made again when needed.
type glances struct {
	places []atomic.Pointer[glance] // a power of 2
	// displaced counts how often a glance had to give up its place, which tells that the table is too small.
	displaced atomic.Int64
}

const (
	leastGlances = 1 << 6
	mostGlances  = 1 << 20
	// placesPerNode keeps nodes from getting into each other's way.
	placesPerNode = 4
)

var glanceSeed = maphash.MakeSeed()

// glanceAt returns the glance of the node that is to be judged.
func glanceAt(in *Input) *glance {
	table, _ := in.Inventory.Attached().Load().(*glances)
	if table == nil {
		table = newGlances(in.Inventory.Nodes() * placesPerNode)
		if !in.Inventory.Attached().CompareAndSwap(nil, table) {
			table = in.Inventory.Attached().Load().(*glances)
		}
	}
	at := maphash.Comparable(glanceSeed, in.Node) & uint64(len(table.places)-1)
	for _, place := range [2]*atomic.Pointer[glance]{&table.places[at], &table.places[at^1]} {
		known := place.Load()
		if known == nil || known.node != in.Node {
			continue
		}
		if known.tally != nil && !known.tally.isOf(in.Usage) {
			known = newGlance(in, known.devices)
			place.Store(known)
		}
		return known
	}
	fresh := newGlance(in, in.Inventory.ForNode(in.Node))
	table.add(in.Inventory, at, fresh)
	return fresh
}

func newGlances(size int) *glances {
	size = min(max(size, leastGlances), mostGlances)
	return &glances{places: make([]atomic.Pointer[glance], 1<<bits.Len(uint(size-1)))}
}

// add enters a glance in the first of its two places, unless only the other one is empty.
func (t *glances) add(view *inventory.View, at uint64, fresh *glance) {
	switch {
	case t.places[at].CompareAndSwap(nil, fresh), t.places[at^1].CompareAndSwap(nil, fresh):
		return
	}
	t.places[at].Store(fresh)
	if n := len(t.places); int(t.displaced.Add(1)) > n && n < mostGlances {
		view.Attached().CompareAndSwap(t, newGlances(2*n))
	}
}

func newGlance(in *Input, devices *inventory.NodeDevices) *glance {
	g := &glance{node: in.Node, devices: devices}
	if len(devices.Pools) == 1 && len(devices.Problems) == 0 {
		g.pool = devices.Pools[0]
		g.tally = tallyOf(g.pool, in.Usage)
	}
	return g
}

// pools yields the node's pools and their tallies.
func (g *glance) pools(view usage.View) iter.Seq2[*inventory.NodePool, *tally] {
	return func(yield func(*inventory.NodePool, *tally) bool) {
		if g.pool != nil {
			yield(g.pool, g.tally)
			return
		}
		for _, p := range g.devices.Pools {
			if !yield(p, tallyOf(p, view)) {
				return
			}
		}
	}
}

// verdict returns the result that is known for the requests.
func (g *glance) verdict(in *Input) (Result, bool) {
	if g.tally == nil || !in.Requests.recurring {
		return Result{}, false
	}
	return g.tally.verdict(in)
}

// remember keeps the result for requests that recur, and returns it.
func (g *glance) remember(in *Input, result Result) Result {
	if g.tally != nil && in.Requests.recurring {
		g.tally.remember(in, result)
	}
	return result
}
