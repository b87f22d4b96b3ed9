// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package sharded has an immutable map for many readers and single changes: a lookup costs a hash and a few reads of
// memory, a change copies one small shard and the little that leads to it, and neither grows with the map but by one
// step each time that has grown 32 times larger.
//
// It is a trie by hash whose leaves are the shards. They are larger than in the usual persistent maps, and lie flat in
// memory, because here one change (an event about a claim or a slice) is followed by a lookup for each of thousands of
// nodes.
package sharded

import (
	"hash/maphash"
	"iter"
)

const (
	// fan is how many children a branch has; hashBits of a hash choose among them.
	fan      = 1 << hashBits
	hashBits = 5
	// most is how many entries a shard has before it is split: few enough to be searched in a few lines of cache.
	most = 16
	// least is how many entries below one branch become one shard again. That is well below most, so that no entry
	// that comes and goes splits and joins each time.
	least = most / 2
)

var seed = maphash.MakeSeed()

// Map is an immutable map. The zero Map is empty. Copies share everything.
type Map[K comparable, V any] struct {
	root node[K, V]
	len  int
}

// node is a branch or a shard, or nothing if both are nil. It is small because a change copies many of them.
type node[K comparable, V any] struct {
	branch *[fan]node[K, V]
	shard  *shard[K, V]
}

// shard is never empty.
type shard[K comparable, V any] struct{ entries []entry[K, V] }

type entry[K comparable, V any] struct {
	hash  uint64
	key   K
	value V
}

// Slot says where a key is to be found, in all maps with keys of that type in this process.
type Slot uint64

// SlotOf returns the key's slot.
func SlotOf[K comparable](key K) Slot { return Slot(maphash.Comparable(seed, key)) }

// Mark stands for the content of one shard. As long as nothing in it changes, maps derived from each other have the
// same mark there, so a mark tells whether what was once looked up still holds.
type Mark[K comparable, V any] struct{ shard *shard[K, V] }

// Len returns the number of entries.
func (m Map[K, V]) Len() int { return m.len }

// Mark returns the mark of the shard in a slot.
func (m Map[K, V]) Mark(slot Slot) Mark[K, V] { return Mark[K, V]{m.root.find(uint64(slot))} }

// Get returns the key's value.
func (m Map[K, V]) Get(key K) (value V, ok bool) {
	hash := maphash.Comparable(seed, key)
	if s, i := m.root.find(hash).indexOf(hash, key); i >= 0 {
		return s[i].value, true
	}
	return value, false
}

// Set returns a map in which the key has the value.
func (m Map[K, V]) Set(key K, value V) Map[K, V] {
	hash := maphash.Comparable(seed, key)
	if _, i := m.root.find(hash).indexOf(hash, key); i < 0 {
		m.len++
	}
	m.root = m.root.with(&entry[K, V]{hash, key, value}, 0)
	return m
}

// Delete returns a map without the key.
func (m Map[K, V]) Delete(key K) Map[K, V] {
	hash := maphash.Comparable(seed, key)
	if _, i := m.root.find(hash).indexOf(hash, key); i < 0 {
		return m
	}
	m.len--
	m.root = m.root.without(hash, key, 0)
	return m
}

// All yields all entries in no particular order.
func (m Map[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) { m.root.all(yield) }
}

// find returns the shard for the hash, nil if there is none.
func (n *node[K, V]) find(hash uint64) *shard[K, V] {
	for n.branch != nil {
		n = &n.branch[hash%fan]
		hash >>= hashBits
	}
	return n.shard
}

// indexOf returns all entries, and the index of the key's or -1.
func (s *shard[K, V]) indexOf(hash uint64, key K) ([]entry[K, V], int) {
	if s == nil {
		return nil, -1
	}
	for i := range s.entries {
		if s.entries[i].hash == hash && s.entries[i].key == key {
			return s.entries, i
		}
	}
	return s.entries, -1
}

// with returns a node that has the entry, instead of any with the same key. The node is below so many bits of the hash.
func (n node[K, V]) with(e *entry[K, V], bits uint) node[K, V] {
	if n.branch != nil {
		branch := *n.branch
		child := &branch[e.hash>>bits%fan]
		*child = child.with(e, bits+hashBits)
		return node[K, V]{branch: &branch}
	}
	old, at := n.shard.indexOf(e.hash, e.key)
	size := len(old)
	if at < 0 {
		at = size
		size++
	}
	s := make([]entry[K, V], size)
	copy(s, old)
	s[at] = *e
	return split(s, bits)
}

// split makes a node of the entries, which nobody else has.
func split[K comparable, V any](s []entry[K, V], bits uint) node[K, V] {
	switch {
	case len(s) == 0:
		return node[K, V]{}
	case len(s) <= most || bits >= 64:
		return node[K, V]{shard: &shard[K, V]{s}}
	}
	var shards [fan][]entry[K, V]
	for i := range s {
		child := &shards[s[i].hash>>bits%fan]
		*child = append(*child, s[i])
	}
	var branch [fan]node[K, V]
	for i := range shards {
		branch[i] = split(shards[i], bits+hashBits)
	}
	return node[K, V]{branch: &branch}
}

// without returns a node without the key, which it has.
func (n node[K, V]) without(hash uint64, key K, bits uint) node[K, V] {
	if n.branch == nil {
		old, at := n.shard.indexOf(hash, key)
		s := make([]entry[K, V], 0, len(old)-1)
		return split(append(append(s, old[:at]...), old[at+1:]...), bits)
	}
	branch := *n.branch
	child := &branch[hash>>bits%fan]
	*child = child.without(hash, key, bits+hashBits)
	return join(&branch)
}

// join makes one shard of the children of a branch if they have few entries together.
func join[K comparable, V any](branch *[fan]node[K, V]) node[K, V] {
	var s []entry[K, V]
	for i := range branch {
		if branch[i].shard != nil {
			s = append(s, branch[i].shard.entries...)
		}
		if branch[i].branch != nil || len(s) > least {
			return node[K, V]{branch: branch}
		}
	}
	return node[K, V]{shard: &shard[K, V]{s}}
}

// all tells whether to go on.
func (n *node[K, V]) all(yield func(K, V) bool) bool {
	switch {
	case n.branch != nil:
		for i := range n.branch {
			if !n.branch[i].all(yield) {
				return false
			}
		}
	case n.shard != nil:
		for i := range n.shard.entries {
			if !yield(n.shard.entries[i].key, n.shard.entries[i].value) {
				return false
			}
		}
	}
	return true
}
