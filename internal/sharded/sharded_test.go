// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharded

import (
	"maps"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestItBehavesLikeAMapAndNoVersionEverChanges(t *testing.T) {
	type version struct {
		m    Map[int, int]
		want map[int]int
	}
	rapid.Check(t, func(t *rapid.T) {
		// One shard, one that is about to be split, many, and more than one level of branches.
		first := version{want: map[int]int{}}
		for key := range rapid.SampledFrom([]int{0, most, most + 1, 600, 3000}).Draw(t, "size") {
			first.m, first.want[key] = first.m.Set(key, key), key
		}
		versions := []version{first}
		for range rapid.IntRange(1, 40).Draw(t, "changes") {
			from := rapid.SampledFrom(versions).Draw(t, "version")
			next := version{want: maps.Clone(from.want)}
			key := rapid.OneOf(rapid.IntRange(0, 20), rapid.IntRange(0, 3000)).Draw(t, "key")
			if rapid.IntRange(0, 2).Draw(t, "delete") == 2 {
				next.m = from.m.Delete(key)
				delete(next.want, key)
			} else {
				value := rapid.Int().Draw(t, "value")
				next.m = from.m.Set(key, value)
				next.want[key] = value
			}
			versions = append(versions, next)
		}
		for _, v := range versions {
			if got := maps.Collect(v.m.All()); !maps.Equal(v.want, got) || v.m.Len() != len(v.want) {
				t.Fatalf("%d entries (-want, +got):\n%s", v.m.Len(), cmp.Diff(v.want, got))
			}
			for key := range 3001 {
				want, there := v.want[key]
				if got, ok := v.m.Get(key); ok != there || got != want {
					t.Fatalf("key %d: %d, %v; want %d, %v", key, got, ok, want, there)
				}
			}
		}
	})
}

func TestAMarkStaysTheSameExactlyAsLongAsNothingInItChanges(t *testing.T) {
	var m Map[int, string]
	for i := range 5000 {
		m = m.Set(i, "old")
	}
	slot := SlotOf(7)
	changed := m.Set(7, "new")
	if m.Mark(slot) == changed.Mark(slot) {
		t.Error("a changed shard has its old mark")
	}
	for key := range 5000 {
		if other := SlotOf(key); m.Mark(other) != m.Mark(slot) && m.Mark(other) != changed.Mark(other) {
			t.Fatalf("the shard of key %d has a new mark, but only key 7 changed", key)
		}
	}
	if removed := m.Delete(7); m.Mark(slot) == removed.Mark(slot) {
		t.Error("a shard from which something was removed has its old mark")
	}
	if m.Delete(5000).Mark(SlotOf(5000)) != m.Mark(SlotOf(5000)) {
		t.Error("a shard has a new mark, but what was deleted was not there")
	}
}

func TestStoppingTheIterationStopsIt(t *testing.T) {
	var m Map[int, int]
	for i := range 10 {
		m = m.Set(i, i)
	}
	n := 0
	for range m.All() {
		n++
		break
	}
	if n != 1 {
		t.Errorf("%d iterations", n)
	}
}

// TestAChangeCopiesAsLittleInALargeMap looks at what a change has to copy: the shard, and one branch for each level above.
func TestAChangeCopiesAsLittleInALargeMap(t *testing.T) {
	var m Map[int, int]
	const size = 100_000
	for i := range size {
		m = m.Set(i, i)
	}
	var look func(n *node[int, int], level int)
	look = func(n *node[int, int], level int) {
		if n.shard != nil && (len(n.shard.entries) > most || level > 5) {
			t.Fatalf("a shard of %d entries on level %d", len(n.shard.entries), level)
		}
		if n.branch != nil {
			for i := range n.branch {
				look(&n.branch[i], level+1)
			}
		}
	}
	look(&m.root, 0)
	for i := range size {
		m = m.Delete(i)
	}
	if m.root.branch != nil || m.root.shard != nil {
		t.Errorf("something is left of an empty map: %+v", m.root)
	}
}

// TestEqualHashes makes sure that entries that no branch can tell apart stay in one shard.
func TestEqualHashes(t *testing.T) {
	var n node[int, int]
	for key := range 3 * most {
		n = n.with(&entry[int, int]{hash: 7, key: key, value: key}, 0)
	}
	if s := n.find(7).entries; len(s) != 3*most {
		t.Fatalf("%d of %d entries", len(s), 3*most)
	}
	for key := range 3 * most {
		n = n.without(7, key, 0)
	}
	if n.branch != nil || n.shard != nil {
		t.Errorf("something is left: %+v", n)
	}
}
