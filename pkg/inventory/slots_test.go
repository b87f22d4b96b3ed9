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
		"more than are remembered ask for the same":   {manyAsk, []string{"c"}},
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
			for _, entry := range slices.SortedFunc(maps.Values(table.entries), func(a, b *slotEntry[int]) int { return int(last[b]) - int(last[a]) }) {
				got, bytes = append(got, entry.key), bytes+entry.bytes
				if slots[entry.slot] != entry.key {
					t.Errorf("%s has slot %d, which was given to %s after it", entry.key, entry.slot, slots[entry.slot])
				}
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
