// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"iter"
	"maps"
	"slices"
	"sync/atomic"

	"github.com/benbjohnson/immutable"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/internal/sharded"
)

// View is what exists at one moment. It never changes and may be kept for as long as wanted; any number of
// goroutines may use it.
type View struct {
	generation uint64
	classes    *immutable.Map[string, *Class]
	pools      *immutable.SortedMap[PoolID, *Pool]
	// local has, by node name, what nodes see of the pools that consist of slices for single nodes only.
	local sharded.Map[string, *NodeDevices]
	// able has the same for nodes that declare that they can skip node operations, where that makes a difference.
	// isAble tells whether there are any.
	able   sharded.Map[string, *NodeDevices]
	isAble bool
	// shared are the other pools, by ID.
	shared []*Pool
	caches *caches
	// apart counts the pools that have devices whose shares are one namespace's.
	apart int

	attached *atomic.Value
}

// Class is a DeviceClass. Immutable.
type Class struct {
	// Object is the class. Read only.
	Object *resourceapi.DeviceClass
}

// NodeDevices is what one node can reach. Immutable.
type NodeDevices struct {
	// Pools are the usable pools in the order in which upstream tries them: by driver and name, those with
	// binding conditions last.
	Pools []*NodePool
	// Problems are about the pools of which the node would see more if they were complete and valid, by pool.
	Problems []*PoolProblem
}

var noDevices = &NodeDevices{}

// Generation counts the events that changed something. A view with a higher number is newer.
func (v *View) Generation() uint64 { return v.generation }

// Attached is a place for one value that a consumer derives from this very view and something else that it can recognize
// again, like NodePool.Attached.
func (v *View) Attached() *atomic.Value { return v.attached }

// Nodes returns the number of nodes that have devices of their own.
func (v *View) Nodes() int { return v.local.Len() }

// MindsNamespaces tells whether some device may be had by claims of one namespace and not by those of another, see [IsApart].
func (v *View) MindsNamespaces() bool { return v.apart > 0 }

// Features are those that the view was made with.
func (v *View) Features() Features { return v.caches.features }

// Class returns the DeviceClass with the name, nil if there is none.
func (v *View) Class(name string) *Class {
	class, _ := v.classes.Get(name)
	return class
}

// Classes yields all DeviceClasses in no particular order.
func (v *View) Classes() iter.Seq[*Class] {
	return func(yield func(*Class) bool) {
		for it := v.classes.Iterator(); !it.Done(); {
			if _, class, _ := it.Next(); !yield(class) {
				return
			}
		}
	}
}

// Pool returns the pool, nil if it has no slice.
func (v *View) Pool(id PoolID) *Pool {
	pool, _ := v.pools.Get(id)
	return pool
}

// Pools yields all pools, usable or not, by driver and name.
func (v *View) Pools() iter.Seq[*Pool] {
	return func(yield func(*Pool) bool) {
		for it := v.pools.Iterator(); !it.Done(); {
			if _, pool, _ := it.Next(); !yield(pool) {
				return
			}
		}
	}
}

// Problems yields the pools that are unusable on every node, those of which not all slices are looked at, and the nodes whose slices of
// a pool do not count, by driver and name.
func (v *View) Problems() iter.Seq[*PoolProblem] {
	return func(yield func(*PoolProblem) bool) {
		for pool := range v.Pools() {
			if pool.Problem != nil && !yield(pool.Problem) {
				return
			}
			if pool.excess != nil && pool.excess != pool.Problem && !yield(pool.excess) {
				return
			}
			for _, node := range slices.Sorted(maps.Keys(pool.strangers)) {
				if !yield(pool.strangers[node]) {
					return
				}
			}
		}
	}
}

// ForNode returns what the node can reach. It looks at the node's name, labels and declared features.
func (v *View) ForNode(node *v1.Node) *NodeDevices {
	local, ok := v.local.Get(node.Name)
	if !ok {
		local = noDevices
	}
	if v.isAble && canSkipOperations(node) {
		if able, ok := v.able.Get(node.Name); ok {
			local = able
		}
	}
	merged := local
	for _, pool := range v.shared {
		seen := pool.forNode(node)
		if seen == nil {
			continue
		}
		if merged == local {
			merged = &NodeDevices{Pools: slices.Clone(local.Pools), Problems: slices.Clone(local.Problems)}
		}
		merged.add(seen)
	}
	if merged != local {
		merged.sort()
	}
	return merged
}

func (d *NodeDevices) add(seen *part) {
	if seen.problem != nil {
		d.Problems = append(d.Problems, seen.problem)
	}
	if seen.pool != nil {
		d.Pools = append(d.Pools, seen.pool)
	}
}

func (d *NodeDevices) sort() {
	slices.SortFunc(d.Pools, (*NodePool).compare)
	slices.SortFunc(d.Problems, func(a, b *PoolProblem) int { return a.Pool.compare(b.Pool) })
}

// with returns a copy in which the node sees the given part of the pool, or nothing of it if that is nil.
func (d *NodeDevices) with(id PoolID, seen *part) *NodeDevices {
	changed := &NodeDevices{
		Pools:    make([]*NodePool, 0, len(d.Pools)+1),
		Problems: make([]*PoolProblem, 0, len(d.Problems)+1),
	}
	for _, pool := range d.Pools {
		if pool.Pool.ID != id {
			changed.Pools = append(changed.Pools, pool)
		}
	}
	for _, problem := range d.Problems {
		if problem.Pool != id {
			changed.Problems = append(changed.Problems, problem)
		}
	}
	if seen != nil {
		changed.add(seen)
	}
	changed.sort()
	return changed
}
