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
		versions := []version{{want: map[int]int{}}}
		for range rapid.IntRange(1, 40).Draw(t, "changes") {
			from := rapid.SampledFrom(versions).Draw(t, "version")
			next := version{want: maps.Clone(from.want)}
			key := rapid.IntRange(0, 3000).Draw(t, "key")
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
			if diff := cmp.Diff(v.want, maps.Collect(v.m.All())); diff != "" || v.m.Len() != len(v.want) {
				t.Fatalf("%d entries (-want, +got):\n%s", v.m.Len(), diff)
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
		if other := SlotOf(key); other != slot && m.Mark(other) != changed.Mark(other) {
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
