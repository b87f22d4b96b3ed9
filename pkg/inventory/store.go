// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/benbjohnson/immutable"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/internal/sharded"
	"stowage.dev/stowage/pkg/inventory/amount"
)

// Features are the optional parts of the API that change which slices count or what selectors may say, named
// after the Kubernetes feature gates without their "DRA" prefix.
type Features struct {
	// PartitionableDevices: without it, slices with counter sets or with devices that choose their nodes
	// are for no node, and devices that consume counters are not usable.
	PartitionableDevices bool
	// ConsumableCapacity makes device.allowMultipleAllocations count, and known to selectors; capacity
	// requirements and request policies are looked at. Without it, no device allows multiple allocations.
	ConsumableCapacity bool
	// FractionalCapacityRange: steps of request policies are counted in thousandths where they can be.
	FractionalCapacityRange bool
	// NodeAllocatableResources: whoever allocates accounts for devices that stand for CPU or memory of a node, or
	// need some of it. Without it, such devices are not usable.
	NodeAllocatableResources bool
	// ListTypeAttributes makes attributes that are lists count in constraints, as all the values that are in them, and
	// list functions known to CEL expressions.
	ListTypeAttributes bool
	// CompatibilityGroups: without it, slices that use them do not count, and their pools are incomplete.
	CompatibilityGroups bool
	// OptionalNodeOperations: devices whose slices skip node operations can be used on nodes that declare the feature.
	// Without it, they are devices like any other, and nothing is skipped; but with another of the features that are
	// alpha in Kubernetes 1.37 they are not usable, because upstream's allocator for those refuses them.
	OptionalNodeOperations bool
	// DerivedAttributes: requests may derive attributes from those of devices.
	DerivedAttributes bool
}

// mindsNodeOperations tells whether it matters that devices skip node operations.
func (f Features) mindsNodeOperations() bool {
	return f.OptionalNodeOperations || f.ListTypeAttributes || f.CompatibilityGroups || f.DerivedAttributes
}

// DefaultFeatures are those on by default in Kubernetes 1.37.
func DefaultFeatures() Features {
	return Features{PartitionableDevices: true, ConsumableCapacity: true, FractionalCapacityRange: true}
}

// Options configure a Store. The zero value of a number means its default.
type Options struct {
	Features Features
	// OwnTaint is the key of a taint with effect NoSchedule that is ignored, as if every request tolerated it: it tells
	// other schedulers to leave devices alone. Empty: none. Other effects, and other taints on the same device, count.
	OwnTaint string
	// MaxSelectors bounds the different CEL selectors kept compiled, with their results. Default 128.
	MaxSelectors int
	// MaxMatchers bounds the different combinations of selectors and tolerations whose results are kept.
	// Default 64.
	MaxMatchers int
	// MaxDerivations bounds the different CEL expressions for derived attributes kept compiled, with their results.
	// Default 64.
	MaxDerivations int
}

// Store takes in events and gives out views. All methods may be called by any goroutine.
type Store struct {
	features Features
	ownTaint string
	current  atomic.Pointer[View]

	mu      sync.Mutex
	slices  map[string]*Slice // slice name → slice
	members map[PoolID]*sliceSet
}

// caches are shared by all views of a store.
type caches struct {
	features    Features
	limits      limits
	expressions *slotTable[*expression]
	matchers    *slotTable[*Matcher]
	derivations *slotTable[*Derivation]
	numbers     *slotTable[uint64]
	counters    counterTables

	// lostParts and lostColumns count what had no room in the caches of a pool.
	lostParts, lostColumns atomic.Uint64
}

// MaxNumbers is how many texts have a number at a time, see [View.NumberOf].
const MaxNumbers = 1024

// cacheBytes bounds what is compiled in each of the caches, in bytes.
const cacheBytes = 16 << 20

// numbers of the process that were given away.
var numbers atomic.Uint64

// NumberOf returns a number that no other text has, and whether the text was known: it keeps its number for as long as it is
// asked for often enough, and may get another one later. Never 0. A text that was not known takes of the namespace's share.
func (v *View) NumberOf(namespace, text string) (number uint64, known bool) {
	known = true
	number, _ = v.caches.numbers.get(context.Background(), namespace, text, func() (made[uint64], error) {
		known = false
		return made[uint64]{bytes: int64(len(text)), in: func(int) uint64 { return numbers.Add(1) }}, nil
	})
	return number, known
}

// NewStore returns an empty store.
func NewStore(opts Options) *Store {
	if opts.MaxSelectors <= 0 {
		opts.MaxSelectors = 128
	}
	if opts.MaxMatchers <= 0 {
		opts.MaxMatchers = 64
	}
	if opts.MaxDerivations <= 0 {
		opts.MaxDerivations = 64
	}
	s := &Store{
		features: opts.Features,
		ownTaint: opts.OwnTaint,
		slices:   make(map[string]*Slice),
		members:  make(map[PoolID]*sliceSet),
	}
	s.current.Store(&View{
		classes: immutable.NewMap[string, *Class](newStringHasher()),
		pools:   immutable.NewSortedMap[PoolID, *Pool](poolIDComparer{}),
		caches: &caches{
			features:    opts.Features,
			limits:      defaultLimits,
			expressions: newSlotTable[*expression](opts.MaxSelectors, cacheBytes),
			matchers:    newSlotTable[*Matcher](opts.MaxMatchers, cacheBytes),
			derivations: newSlotTable[*Derivation](opts.MaxDerivations, cacheBytes),
			numbers:     newSlotTable[uint64](MaxNumbers, cacheBytes),
		},
		attached: new(atomic.Value),
	})
	return s
}

// View returns what exists now. It costs one pointer read.
func (s *Store) View() *View { return s.current.Load() }

// SetSlice adds or replaces the slice with the object's name. The object must not change afterwards.
func (s *Store) SetSlice(object *resourceapi.ResourceSlice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	object = withoutTaint(object, s.ownTaint)
	old := s.slices[object.Name]
	if old != nil && (old.Object == object || amount.Semantic.DeepEqual(&old.Object.Spec, &object.Spec)) {
		return
	}
	slice := newSlice(object, s.features)
	if old != nil {
		slice.adopt(old)
	}
	id := poolOf(object)
	s.slices[object.Name] = slice
	if old != nil {
		s.members[poolOf(old.Object)].remove(old)
		if was := poolOf(old.Object); was != id {
			s.rebuild(was)
		}
	}
	if s.members[id] == nil {
		s.members[id] = &sliceSet{ofNode: make(map[string]map[string]*Slice)}
	}
	s.members[id].add(slice)
	s.rebuild(id)
}

// DeleteSlice removes the slice with the name, if there is one.
func (s *Store) DeleteSlice(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.slices[name]; old != nil {
		delete(s.slices, name)
		s.members[poolOf(old.Object)].remove(old)
		s.rebuild(poolOf(old.Object))
	}
}

// SetClass adds or replaces the class with the object's name. The object must not change afterwards.
func (s *Store) SetClass(object *resourceapi.DeviceClass) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.change(func(v *View) { v.classes = v.classes.Set(object.Name, &Class{Object: object}) })
}

// DeleteClass removes the class with the name, if there is one.
func (s *Store) DeleteClass(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.change(func(v *View) { v.classes = v.classes.Delete(name) })
}

// rebuild derives the pool anew from its slices and publishes it. The caller holds mu.
func (s *Store) rebuild(id PoolID) {
	var pool *Pool
	if s.members[id].count > 0 {
		pool = s.members[id].pool(id, s.View().caches)
	} else {
		delete(s.members, id)
	}
	s.change(func(v *View) {
		old, _ := v.pools.Get(id)
		if pool != nil {
			v.pools = v.pools.Set(id, pool)
		} else {
			v.pools = v.pools.Delete(id)
		}
		if old != nil && old.apart {
			v.apart--
		}
		if pool != nil && pool.apart {
			v.apart++
		}
		v.replaceLocal(id, old, pool)
		v.replaceShared(id, old, pool)
	})
}

// change publishes a copy of the current view with one change. The caller holds mu.
func (s *Store) change(fn func(*View)) {
	next := *s.current.Load()
	next.generation++
	next.attached = new(atomic.Value)
	fn(&next)
	s.current.Store(&next)
}

// replaceLocal puts a pool that consists of slices for single nodes in the place of its predecessor. Either may
// be nil, or not of that sort.
func (v *View) replaceLocal(id PoolID, old, pool *Pool) {
	if old != nil && old.local {
		for name := range old.nodeNames() {
			if pool != nil && pool.local && pool.isFor(name) {
				continue // replaced below
			}
			v.setLocal(name, id, nil, nil)
		}
	}
	if pool == nil || !pool.local {
		return
	}
	// Slices for a node by name do not look at its labels.
	node, able := &v1.Node{}, &v1.Node{Status: v1.NodeStatus{DeclaredFeatures: []string{nodeOperationsFeature}}}
	for name := range pool.nodeNames() {
		node.Name, able.Name = name, name
		v.setLocal(name, id, pool.forNode(node), pool.forNode(able))
	}
}

// setLocal makes the node see the given part of the pool, or nothing of it if that is nil; able is the part that it sees
// if it can skip node operations.
func (v *View) setLocal(name string, id PoolID, seen, able *part) {
	local, ok := v.local.Get(name)
	if !ok {
		if seen == nil && able == nil {
			return // had only an outdated part of the pool, which it could not use
		}
		local = noDevices
	}
	if other, ok := v.able.Get(name); ok || seen != able {
		if !ok {
			other = local
		}
		v.able = put(v.able, name, other.with(id, able))
		v.isAble = true
	}
	v.local = put(v.local, name, local.with(id, seen))
}

// put sets what the node can reach, or removes it if that is nothing.
func put(m sharded.Map[string, *NodeDevices], name string, devices *NodeDevices) sharded.Map[string, *NodeDevices] {
	if len(devices.Pools)+len(devices.Problems) > 0 {
		return m.Set(name, devices)
	}
	return m.Delete(name)
}

// replaceShared does the same for a pool that has slices for more than one node.
func (v *View) replaceShared(id PoolID, old, pool *Pool) {
	wasShared := old != nil && !old.local
	isShared := pool != nil && !pool.local
	if !wasShared && !isShared {
		return
	}
	at, found := slices.BinarySearchFunc(v.shared, id, func(p *Pool, id PoolID) int { return p.ID.compare(id) })
	shared := slices.Clone(v.shared)
	switch {
	case found && isShared:
		shared[at] = pool
	case found:
		shared = slices.Delete(shared, at, at+1)
	case isShared:
		shared = slices.Insert(shared, at, pool)
	}
	v.shared = shared
}

func poolOf(object *resourceapi.ResourceSlice) PoolID {
	return PoolID{Driver: object.Spec.Driver, Pool: object.Spec.Pool.Name}
}

type stringHasher struct{ seed maphash.Seed }

func newStringHasher() stringHasher { return stringHasher{seed: maphash.MakeSeed()} }

func (h stringHasher) Hash(key string) uint32 { return uint32(maphash.String(h.seed, key)) }
func (stringHasher) Equal(a, b string) bool   { return a == b }

type poolIDComparer struct{}

func (poolIDComparer) Compare(a, b PoolID) int { return a.compare(b) }
