// Package sharded has an immutable map for many readers and single changes: a lookup costs a hash and a few reads of
// memory whatever the size, and a change copies one small shard and what leads to it.
//
// A persistent tree has cheaper changes and far dearer lookups; here one change (an event about a claim or a slice) is
// followed by a lookup for each of thousands of nodes. What it is not: a map for millions of entries.
package sharded

import (
	"hash/maphash"
	"iter"
)

// There are fan × fan shards, in two levels, so that a change copies little: up to some ten thousand entries a shard
// stays so small that it is searched in a few lines of cache.
const fan = 32

var seed = maphash.MakeSeed()

// Map is an immutable map. The zero Map is empty. Copies share everything.
type Map[K comparable, V any] struct {
	rows *[fan]*row[K, V]
	len  int
}

type row[K comparable, V any] [fan]shard[K, V]

type shard[K comparable, V any] []entry[K, V]

type entry[K comparable, V any] struct {
	hash  uint64
	key   K
	value V
}

// Slot says in which shard a key is, for all maps with keys of that type in this process.
type Slot uint32

// SlotOf returns the key's slot.
func SlotOf[K comparable](key K) Slot { return slotOf(maphash.Comparable(seed, key)) }

func slotOf(hash uint64) Slot { return Slot(hash % (fan * fan)) }

// Mark stands for the content of one shard. As long as nothing in it changes, maps derived from each other have the
// same mark there, so a mark tells whether what was once looked up still holds.
type Mark[K comparable, V any] struct {
	first *entry[K, V]
}

// Len returns the number of entries.
func (m Map[K, V]) Len() int { return m.len }

// Mark returns the mark of the shard in a slot.
func (m Map[K, V]) Mark(slot Slot) Mark[K, V] {
	if s := m.shard(slot); len(s) > 0 {
		return Mark[K, V]{&s[0]}
	}
	return Mark[K, V]{}
}

func (m Map[K, V]) shard(slot Slot) shard[K, V] {
	if m.rows == nil {
		return nil
	}
	row := m.rows[slot/fan]
	if row == nil {
		return nil
	}
	return row[slot%fan]
}

// Get returns the key's value.
func (m Map[K, V]) Get(key K) (value V, ok bool) {
	hash := maphash.Comparable(seed, key)
	s := m.shard(slotOf(hash))
	if i := s.find(hash, key); i >= 0 {
		return s[i].value, true
	}
	return value, false
}

func (s shard[K, V]) find(hash uint64, key K) int {
	for i := range s {
		if s[i].hash == hash && s[i].key == key {
			return i
		}
	}
	return -1
}

// Set returns a map in which the key has the value.
func (m Map[K, V]) Set(key K, value V) Map[K, V] {
	hash := maphash.Comparable(seed, key)
	old := m.shard(slotOf(hash))
	at, n := old.find(hash, key), len(old)
	if at < 0 {
		at = n
		n++
		m.len++
	}
	s := make(shard[K, V], n)
	copy(s, old)
	s[at] = entry[K, V]{hash, key, value}
	return m.with(slotOf(hash), s)
}

// Delete returns a map without the key.
func (m Map[K, V]) Delete(key K) Map[K, V] {
	hash := maphash.Comparable(seed, key)
	old := m.shard(slotOf(hash))
	at := old.find(hash, key)
	if at < 0 {
		return m
	}
	m.len--
	s := append(append(make(shard[K, V], 0, len(old)-1), old[:at]...), old[at+1:]...)
	return m.with(slotOf(hash), s)
}

// with replaces one shard.
func (m Map[K, V]) with(slot Slot, s shard[K, V]) Map[K, V] {
	rows := new([fan]*row[K, V])
	if m.rows != nil {
		*rows = *m.rows
	}
	changed := new(row[K, V])
	if old := rows[slot/fan]; old != nil {
		*changed = *old
	}
	changed[slot%fan] = s
	rows[slot/fan] = changed
	m.rows = rows
	return m
}

// All yields all entries in no particular order.
func (m Map[K, V]) All() iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		if m.rows == nil {
			return
		}
		for _, row := range m.rows {
			if row == nil {
				continue
			}
			for _, s := range row {
				for i := range s {
					if !yield(s[i].key, s[i].value) {
						return
					}
				}
			}
		}
	}
}
