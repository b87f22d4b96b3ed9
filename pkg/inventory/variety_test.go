// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory/bitset"
)

// kinds fills a store with nodes, one pool of one slice each, of as many kinds: the devices of kind k have k as their number.
func kinds(nodes, kinds int, opts Options) *Store {
	opts.Features = DefaultFeatures()
	store := NewStore(opts)
	for i := range nodes {
		name := fmt.Sprintf("n%d", i)
		store.SetSlice(slice(name, name, pool(name, 1, 1), devices("d0", "d1"), func(s *resourceapi.ResourceSlice) {
			for d := range s.Spec.Devices {
				s.Spec.Devices[d].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"n": {IntValue: ptr.To(int64(i % kinds))}}
			}
		}))
	}
	return store
}

func TestEqualNodesShareWhatIsSaidOfThem(t *testing.T) {
	store := kinds(12, 3, Options{})
	view := store.View()
	fails := matcher(t, view, MatcherSpec{Selectors: []string{`device.attributes["` + driver + `"].missing == 1`}})
	for name, m := range map[string]*Matcher{
		"one kind matches": matcher(t, view, MatcherSpec{Selectors: []string{n + " == 1"}}),
		"none matches":     matcher(t, view, MatcherSpec{Selectors: []string{n + " == 7"}}),
		"a selector fails": fails,
	} {
		t.Run(name, func(t *testing.T) {
			matches, results := map[*PoolMatch]bool{}, map[*exprResult]bool{}
			for i := range 12 {
				p := view.ForNode(node(fmt.Sprintf("n%d", i))).Pools[0]
				r := judged(m, p)
				matches[r], results[m.expressions[0].keptOn(p.Slices[0])] = true, true
				want := 0
				if name == "one kind matches" && i%3 == 1 {
					want = 2
				}
				if r.Match.Count() != want || (r.Errors.Count() == 2) != (m == fails) {
					t.Errorf("node %d: %v match, %v fail", i, members(r.Match), members(r.Errors))
				}
			}
			want := 1
			if name == "one kind matches" {
				want = 2
			}
			if len(matches) != want || len(results) != want {
				t.Errorf("%d matches and %d results are kept, want %d of each", len(matches), len(results), want)
			}
		})
	}
}

func TestWhatIsSaidOfNodesThatDiffer(t *testing.T) {
	tainted := func(key string, device int) *resourceapi.ResourceSlice {
		return slice(key, key, pool(key, 1, 1), devices("d0", "d1"), tainted(device, "lost", resourceapi.DeviceTaintEffectNoSchedule))
	}
	shared := func(name, memory string) *resourceapi.ResourceSlice {
		return slice(name, name, pool(name, 1, 1), devices("d0", "d1"), func(s *resourceapi.ResourceSlice) {
			for d := range s.Spec.Devices {
				s.Spec.Devices[d].AllowMultipleAllocations = ptr.To(true)
				s.Spec.Devices[d].Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse(memory)}}
			}
		})
	}
	store := newStore()
	for _, s := range []*resourceapi.ResourceSlice{
		slice("plain", "plain", pool("plain", 1, 1), devices("d0", "d1")), tainted("first", 0), tainted("second", 1), shared("much", "20"), shared("more", "30"),
	} {
		store.SetSlice(s)
	}
	view := store.View()
	m := matcher(t, view, MatcherSpec{})
	known := map[*PoolMatch]string{}
	for _, name := range []string{"plain", "first", "second", "much", "more"} {
		r := judged(m, view.ForNode(node(name)).Pools[0])
		if other, ok := known[r]; ok {
			t.Errorf("nodes %s and %s share what is said of them", name, other)
		}
		known[r] = name
	}
}

// TestMoreKindsThanHaveNumbers: what is said is right, and kept, however many different nodes there are.
func TestMoreKindsThanHaveNumbers(t *testing.T) {
	const nodes = 20
	for name, setUp := range map[string]func(e *expression){
		"enough": func(*expression) {},
		"no number": func(e *expression) {
			var others []*exprResult // about slices with more devices
			for i := range mostValues {
				others = append(others, &exprResult{expr: e, match: bitset.Set{uint64(i+1) << 8}})
			}
			e.results.known.Store(&others)
		},
		"no id left": func(e *expression) { e.id = 0 },
	} {
		t.Run(name, func(t *testing.T) {
			store := kinds(nodes, nodes, Options{})
			view := store.View()
			m := matcher(t, view, MatcherSpec{Selectors: []string{n + " == 1"}})
			e := m.expressions[0]
			setUp(e)
			for round := range 2 {
				for i := range nodes {
					s := view.ForNode(node(fmt.Sprintf("n%d", i))).Pools[0].Slices[0]
					if kept := e.keptOn(s) != nil; kept != (round > 0) {
						t.Errorf("round %d: a result for node %d is kept: %v", round, i, kept)
					}
					result, err := e.on(context.Background(), s)
					if err != nil {
						t.Fatal(err)
					}
					if got, want := result.match.Count(), map[bool]int{i == 1: 2}[true]; got != want {
						t.Errorf("round %d: %d devices of node %d match, want %d", round, got, i, want)
					}
				}
			}
		})
	}
}

func TestIDsOfExpressionsEnd(t *testing.T) {
	before := expressionIDs.Load()
	defer expressionIDs.Store(before)
	expressionIDs.Store(1<<idBits - 2)
	view := newStore().View()
	var ids []uint32
	for _, text := range []string{"true", "!false", "true && true"} {
		ids = append(ids, matcher(t, view, MatcherSpec{Selectors: []string{text}}).expressions[0].id)
	}
	if diff := cmp.Diff([]uint32{1<<idBits - 1, 0, 0}, ids); diff != "" {
		t.Error(diff)
	}
}

func TestAVarietyGivesEachValueOneNumber(t *testing.T) {
	var v variety[int]
	equal := func(a, b *int) bool { return *a == *b }
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for i := range mostValues + 20 {
				shared, number := v.share(ptr.To(i), equal)
				switch {
				case *shared != i:
					t.Errorf("shared %d for %d", *shared, i)
				case number > 0 && v.value(number) != shared:
					t.Errorf("number %d is of another value than %d", number, i)
				}
			}
		})
	}
	all.Wait()
	if got := len(*v.known.Load()); got != mostValues {
		t.Errorf("%d values have numbers, want %d", got, mostValues)
	}
	if _, number := v.share(ptr.To(1<<20), equal); number != 0 {
		t.Errorf("one value too many has the number %d", number)
	}
}
