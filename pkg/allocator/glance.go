// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"hash/maphash"
	"iter"
	"math/bits"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/inventory"
)

// glance is what one look at a node needs: its devices, and where these are of one pool and nothing is wrong, as on most
// nodes, that pool and its tally. Immutable. To find it by the address of the node, which is never changed but replaced,
// takes a fraction of what it takes to find the devices by the node's name: with thousands of nodes each place in memory
// that is looked at on the way has to be fetched from afar.
type glance struct {
	node    *v1.Node
	devices *inventory.NodeDevices
	pool    *inventory.NodePool // nil if there is not one pool alone
	tally   *tally              // of pool, for no namespace
}

// glances is a table of them, kept on the view of the inventory that they are true for. A glance may be in one of two
// places; one that is displaced is made again when needed. A view may be the present one for days, in which nodes are replaced
// with each report of their status: what is known of a node goes when it is replaced.
type glances struct {
	places []atomic.Pointer[glance] // a power of 2
	// latest has, by name, the object of each node that was entered last: any other of that name may be in no place. Only
	// entering looks at it.
	latest sync.Map // string → *v1.Node
	// displaced counts how often a glance had to give up its place to that of another node, which tells that the table is too small.
	displaced atomic.Int64
}

const (
	leastGlances = 1 << 6
	mostGlances  = 1 << 20
	// placesPerNode keeps nodes from getting into each other's way.
	placesPerNode = 4
)

var glanceSeed = maphash.MakeSeed()

// displacedGlances are those of all tables of the process.
var displacedGlances atomic.Uint64

// GlanceStats describes what is kept about nodes for the view, which is the cache for whatever follows from the node and the view alone.
// It goes through all of it.
func GlanceStats(view *inventory.View) inventory.CacheStats {
	stats := inventory.CacheStats{Limit: mostGlances, Evicted: displacedGlances.Load()}
	if table, _ := view.Attached().Load().(*glances); table != nil {
		for i := range table.places {
			if table.places[i].Load() != nil {
				stats.Entries++
			}
		}
	}
	return stats
}

// glanceAt returns the glance of the node that is to be judged.
func glanceAt(in *Input) *glance {
	table, _ := in.Inventory.Attached().Load().(*glances)
	if table == nil {
		table = newGlances(in.Inventory.Nodes() * placesPerNode)
		if !in.Inventory.Attached().CompareAndSwap(nil, table) {
			table = in.Inventory.Attached().Load().(*glances)
		}
	}
	for _, place := range table.placesOf(in.Node) {
		known := place.Load()
		if known == nil || known.node != in.Node {
			continue
		}
		if known.tally != nil && !known.tally.isOf(in.Usage) {
			fresh := newGlance(in, known.devices)
			place.CompareAndSwap(known, fresh) // not if the node has been replaced meanwhile
			known = fresh
		}
		return known
	}
	fresh := newGlance(in, in.Inventory.ForNode(in.Node))
	table.add(in.Inventory, fresh)
	return fresh
}

func newGlances(size int) *glances {
	size = min(max(size, leastGlances), mostGlances)
	return &glances{places: make([]atomic.Pointer[glance], 1<<bits.Len(uint(size-1)))}
}

// placesOf are the two places where the glance of a node may be.
func (t *glances) placesOf(node *v1.Node) [2]*atomic.Pointer[glance] {
	at := maphash.Comparable(glanceSeed, node) & uint64(len(t.places)-1)
	return [2]*atomic.Pointer[glance]{&t.places[at], &t.places[at^1]}
}

// add enters a glance in the first of its two places, unless only the other one is empty, and forgets the object that the node
// was before. In this order: of two objects of one name that are added at a time, whichever is noted later finds the other.
func (t *glances) add(view *inventory.View, fresh *glance) {
	places := t.placesOf(fresh.node)
	isDisplacing := !places[0].CompareAndSwap(nil, fresh) && !places[1].CompareAndSwap(nil, fresh)
	if isDisplacing {
		places[0].Store(fresh)
	}
	if before, _ := t.latest.Swap(fresh.node.Name, fresh.node); before != nil && before != fresh.node {
		t.forget(before.(*v1.Node))
	}
	if !isDisplacing {
		return
	}
	displacedGlances.Add(1)
	if n := len(t.places); int(t.displaced.Add(1)) > n && n < mostGlances {
		view.Attached().CompareAndSwap(t, newGlances(2*n))
	}
}

// forget removes what is known of an object that a node is no more.
func (t *glances) forget(node *v1.Node) {
	for _, place := range t.placesOf(node) {
		for known := place.Load(); known != nil && known.node == node; known = place.Load() {
			place.CompareAndSwap(known, nil)
		}
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

// pools yields the node's pools and their tallies for the requests' namespace.
func (g *glance) pools(in *Input) iter.Seq2[*inventory.NodePool, *tally] {
	return func(yield func(*inventory.NodePool, *tally) bool) {
		if g.pool != nil {
			yield(g.pool, g.tally.in(g.pool, in.Requests.compiled.Namespace))
			return
		}
		for _, p := range g.devices.Pools {
			if !yield(p, in.tallyOf(p)) {
				return
			}
		}
	}
}

// verdict returns the result that is known for the requests.
func (g *glance) verdict(in *Input) (Result, bool) {
	if g.tally == nil || !in.Requests.compiled.Recurring {
		return Result{}, false
	}
	return g.tally.in(g.pool, in.Requests.compiled.Namespace).verdict(in)
}

// remember keeps the result for requests that recur, and returns it.
func (g *glance) remember(in *Input, result Result) Result {
	if g.tally != nil && in.Requests.compiled.Recurring {
		g.tally.in(g.pool, in.Requests.compiled.Namespace).remember(in, result)
	}
	return result
}
