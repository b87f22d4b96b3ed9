// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// TestACacheIsShared lets owners ask for values in turn, as "owner key" or "owner key bytes", and tells which are kept, of a table of 6
// values and 100 bytes.
func TestACacheIsShared(t *testing.T) {
	// all asks for keys of one owner, in turn.
	all := func(owner string, n int) (asks []string) {
		for i := range n {
			asks = append(asks, fmt.Sprint(owner, " ", owner, i))
		}
		return asks
	}
	var manyAsk []string
	for i := range 100 {
		manyAsk = append(manyAsk, fmt.Sprintf("ns%d a", i), fmt.Sprintf("ns%d b", i), fmt.Sprintf("ns%d c", i))
	}
	for name, tc := range map[string]struct {
		asks []string
		want []string // most recently asked for first
	}{
		"there is room":                               {slices.Concat(all("a", 3), all("b", 3)), []string{"b2", "b1", "b0", "a2", "a1", "a0"}},
		"one alone has all":                           {all("a", 8), []string{"a7", "a6", "a5", "a4", "a3", "a2"}},
		"one that asks for many":                      {slices.Concat(all("b", 2), all("", 1), all("a", 1000)), []string{"a999", "a998", "a997", "0", "b1", "b0"}},
		"one that had all":                            {slices.Concat(all("a", 1000), all("b", 2), all("c", 1)), []string{"c0", "b1", "b0", "a999", "a998", "a997"}},
		"two that ask for many":                       {slices.Concat(all("c", 2), all("a", 100), all("b", 100)), []string{"b99", "b98", "a99", "a98", "c1", "c0"}},
		"more owners than values":                     {slices.Concat(all("a", 1), all("b", 1), all("c", 1), all("d", 1), all("e", 1), all("f", 1), all("g", 1)), []string{"g0", "f0", "e0", "d0", "c0", "b0"}},
		"what is asked for again":                     {append(all("a", 6), "a a0", "a a6"), []string{"a6", "a0", "a5", "a4", "a3", "a2"}},
		"what others ask for, too":                    {slices.Concat(all("a", 6), []string{"b a0"}, all("b", 1)), []string{"b0", "a0", "a5", "a4", "a3", "a2"}},
		"what another asked for first and gives up":   {slices.Concat([]string{"a b0", "b b0"}, all("a", 1000)), []string{"a999", "a998", "a997", "a996", "a995", "b0"}},
		"what another asked for first, among its own": {slices.Concat([]string{"a b0", "a b1", "b b0", "b b1"}, all("a", 2), []string{"b b2"}, all("a", 1000)), []string{"a999", "a998", "a997", "b2", "b1", "b0"}},
		"what another asks for, too":                  {slices.Concat(all("b", 2), []string{"a b0", "a b1"}, all("a", 1000)), []string{"a999", "a998", "a997", "a996", "b1", "b0"}},
		"large, and another asked for it first":       {[]string{"a b0 20", "b b0 20", "a a0 25", "a a1 25", "a a2 25", "a a3 25"}, []string{"a3", "a2", "a1", "b0"}},
		"many ask for the same":                       {manyAsk[:99], []string{"c", "b", "a"}},
		"more than are remembered ask for the same":   {manyAsk, []string{"c", "b", "a"}},
		"what nobody has goes first":                  {append(slices.Clone(manyAsk), all("a", 4)...), []string{"a3", "c", "a2", "a1", "a0", "b"}},
		"what nobody had":                             {slices.Concat(manyAsk, []string{"ns99 a"}, all("a", 4)), []string{"a3", "a", "c", "a2", "a1", "a0"}},
		"few that are large":                          {[]string{"b b0 20", "a a0 25", "a a1 25", "a a2 25", "a a3 25"}, []string{"a3", "a2", "a1", "b0"}},
		"one that is large among many":                {slices.Concat(all("b", 5), []string{"a a0 25"}), []string{"a0", "b4", "b3", "b2", "b1", "b0"}},
		"one that is larger than its share":           {[]string{"b b0 20", "a a0 26"}, []string{"b0"}},
		"large ones of one, a small of many":          {[]string{"a a0 25", "a a1 25", "a a2 25", "a a3 25", "b b0 1", "b b1 1"}, []string{"b1", "b0", "a3", "a2", "a1"}},
	} {
		t.Run(name, func(t *testing.T) {
			table := newSlotTable[int](6, 100)
			table.maxUses = 99
			slots := map[int]string{}
			for _, ask := range tc.asks {
				var owner, key string
				bytes := int64(1)
				if n, _ := fmt.Sscan(ask, &owner, &key, &bytes); n < 2 {
					key, owner = owner, "" // that of classes
				}
				slot, err := table.get(context.Background(), owner, key, func() (made[int], error) {
					return made[int]{bytes, func(slot int) int { return slot }}, nil
				})
				if err != nil {
					t.Fatal(err)
				}
				slots[slot] = key
			}
			var got []string
			var bytes int64
			last, uses := map[*slotEntry[int]]uint64{}, 0
			for _, has := range table.owners {
				uses += len(has.of)
				for entry, e := range has.of {
					last[entry] = max(last[entry], e.Value.(*use[int]).asked)
				}
			}
			kept := slices.SortedFunc(maps.Keys(last), func(a, b *slotEntry[int]) int { return int(last[b]) - int(last[a]) })
			for e := table.unowned.Back(); e != nil; e = e.Prev() {
				kept = append(kept, e.Value.(*slotEntry[int]))
			}
			for _, entry := range kept {
				got, bytes = append(got, entry.key), bytes+entry.bytes
				if slots[entry.slot] != entry.key {
					t.Errorf("%s has slot %d, which was given to %s after it", entry.key, entry.slot, slots[entry.slot])
				}
			}
			if len(got) != len(table.entries) {
				t.Errorf("%d entries are kept, %d of them by somebody or nobody", len(table.entries), len(got))
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("kept (-want +got):\n%s", diff)
			}
			if uses != table.uses || uses > 99 {
				t.Errorf("%d uses are remembered, counted are %d, want at most %d", uses, table.uses, 99)
			}
			if bytes != table.bytes || bytes > 100 {
				t.Errorf("%d bytes are kept, of at most 100; counted are %d", bytes, table.bytes)
			}
		})
	}
}

// TestAFullCacheMakesRoomInFewSteps counts how often it is asked how much an owner has, in each request. All requests for a cache wait for it.
func TestAFullCacheMakesRoomInFewSteps(t *testing.T) {
	for _, limit := range []int{64, 128, MaxNumbers} {
		for _, owners := range []int{1, 60, 500, 2000, 20000} {
			t.Run(fmt.Sprint(limit, " entries, ", owners, " owners"), func(t *testing.T) {
				table := newSlotTable[int](limit, 1<<20)
				steps, most := 0, 0
				for _, r := range []*ranking[int]{&table.byEntries, &table.byBytes} {
					size := r.size
					r.size = func(has *holding[int]) int64 {
						steps++
						return size(has)
					}
				}
				get := func(owner, key string, bytes int64) {
					steps = 0
					if _, err := table.get(context.Background(), owner, key, func() (made[int], error) {
						return made[int]{bytes, func(slot int) int { return slot }}, nil
					}); err != nil {
						t.Fatal(err)
					}
					most = max(most, steps)
				}
				for _, last := range []int64{1, 1 << 18} { // one needs an entry, one bytes
					for i := range max(20000, limit) {
						get(fmt.Sprint("ns", i%owners), fmt.Sprint("k", (i+i/owners)%limit), (1<<20)/int64(limit))
					}
					get("new", fmt.Sprint("new", last), last)
				}
				if most > 100_000 {
					t.Errorf("one request took %d steps", most)
				}
				t.Logf("%d steps at most", most)
			})
		}
	}
}

// TestACacheCountsWhatItHas asks for anything by anybody. After each request all counts are those of what is there, within the limits.
func TestACacheCountsWhatItHas(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const limit, maxBytes = 6, 100
		table := newSlotTable[int](limit, maxBytes)
		table.maxUses = rapid.IntRange(limit, 30).Draw(t, "maxUses")
		for range rapid.IntRange(1, 200).Draw(t, "requests") {
			owner := fmt.Sprint("ns", rapid.IntRange(0, 8).Draw(t, "owner"))
			key := fmt.Sprint(rapid.IntRange(0, 12).Draw(t, "key"))
			bytes := rapid.Int64Range(1, 30).Draw(t, "bytes")
			slot, err := table.get(context.Background(), owner, key, func() (made[int], error) {
				return made[int]{bytes, func(slot int) int { return slot }}, nil
			})
			if entry := table.entries[key]; err != nil || entry == nil && slot != limit || entry != nil && entry.slot != slot {
				t.Fatalf("%s: slot %d, %v", key, slot, err)
			}
			checkCounts(t, table)
		}
	})
}

func checkCounts(t *rapid.T, table *slotTable[int]) {
	bytes, uses, owned, slots := int64(0), 0, map[*slotEntry[int]]int{}, slices.Clone(table.free)
	for name, has := range table.owners {
		var theirs int64
		for e := has.recent.Front(); e != nil; e = e.Next() {
			entry := e.Value.(*use[int]).entry
			owned[entry]++
			theirs += entry.bytes
			if has.of[entry] != e {
				t.Fatalf("%s does not find its %s", name, entry.key)
			}
		}
		uses += len(has.of)
		if has.owner != name || has.bytes != theirs || has.recent.Len() != len(has.of) || len(has.of) == 0 {
			t.Fatalf("%s has %d entries in a list of %d, of %d bytes, counted are %d", name, len(has.of), has.recent.Len(), theirs, has.bytes)
		}
	}
	unowned := 0
	for key, entry := range table.entries {
		bytes += entry.bytes
		slots = append(slots, entry.slot)
		if entry.unowned != nil {
			unowned++
		}
		if entry.key != key || entry.owners != owned[entry] || (entry.unowned != nil) != (entry.owners == 0) {
			t.Fatalf("%s is had by %d, counted are %d", key, owned[entry], entry.owners)
		}
	}
	slices.Sort(slots)
	if diff := cmp.Diff([]int{0, 1, 2, 3, 4, 5}, slots); diff != "" {
		t.Fatalf("slots (-want +got):\n%s", diff)
	}
	if len(owned)+unowned != len(table.entries) || unowned != table.unowned.Len() {
		t.Fatalf("of %d entries %d are owned, %d are not, counted are %d", len(table.entries), len(owned), unowned, table.unowned.Len())
	}
	if bytes != table.bytes || bytes > table.maxBytes || uses != table.uses || uses > table.maxUses || len(table.entries) > table.limit {
		t.Fatalf("%d bytes, counted are %d; %d uses, counted are %d; %d entries", bytes, table.bytes, uses, table.uses, len(table.entries))
	}
	for _, r := range []*ranking[int]{&table.byEntries, &table.byBytes} {
		for i, has := range r.owners {
			if table.owners[has.owner] != has || has.at[r.number] != i || r.Less(i, 0) {
				t.Fatalf("ranking %d: %s is at %d, counted is %d", r.number, has.owner, i, has.at[r.number])
			}
		}
		if len(r.owners) != len(table.owners) {
			t.Fatalf("ranking %d has %d of %d owners", r.number, len(r.owners), len(table.owners))
		}
	}
}

// TestNobodyWaitsForAValueOfAnother makes two values, each while the other is being made, and one of them for two who want it.
func TestNobodyWaitsForAValueOfAnother(t *testing.T) { synctest.Test(t, testNobodyWaits) }

func testNobodyWaits(t *testing.T) {
	table := newSlotTable[string](6, 100)
	get := func(ctx context.Context, key string, create func()) (string, error) {
		return table.get(ctx, "ns", key, func() (made[string], error) {
			create()
			return made[string]{1, func(int) string { return key }}, nil
		})
	}
	var wg sync.WaitGroup
	slow, started := make(chan struct{}), make(chan struct{})
	wg.Go(func() {
		if _, err := get(context.Background(), "slow", func() {
			close(started)
			<-slow
		}); err != nil {
			t.Error(err)
		}
	})
	<-started
	for range 2 {
		wg.Go(func() {
			if value, err := get(context.Background(), "slow", func() { t.Error("made again") }); value != "slow" || err != nil {
				t.Errorf("%q, %v", value, err)
			}
		})
	}
	if value, err := get(context.Background(), "other", func() {}); value != "other" || err != nil {
		t.Errorf("%q, %v", value, err)
	}
	synctest.Wait() // until both wait for it
	close(slow)
	wg.Wait()

	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if value, err := get(ended, "slow", func() {}); value != "slow" || err != nil {
		t.Errorf("what is there takes time: %q, %v", value, err)
	}
	if _, err := get(ended, "new", func() { t.Error("made without time") }); !errors.Is(err, context.Canceled) {
		t.Errorf("without time: %v", err)
	}
	if value, err := get(context.Background(), "new", func() {}); value != "new" || err != nil {
		t.Errorf("with time after that: %q, %v", value, err)
	}
}
