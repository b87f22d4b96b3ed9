// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// withGroups makes a slice that is ignored while compatibility groups are not enabled.
func withGroups(s *resourceapi.ResourceSlice) {
	s.Spec.Devices[0].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CompatibilityGroups: []string{"x"}}}
}

func problemsOf(store *Store) []string {
	var out []string
	for problem := range store.View().Problems() {
		out = append(out, problem.String())
	}
	return out
}

// Slices of another node that are ignored hide nothing, of however many higher generations they are. In a pool called after a node they are
// strangers like any other.
func TestIgnoredSlicesOfAnotherNodeHideNothing(t *testing.T) {
	for name, tc := range map[string]struct {
		victim *resourceapi.ResourceSlice
		evil   []string
	}{
		"n0": {
			victim: slice("own", "n0", pool("n0", 1, 1), devices("d")),
			evil:   []string{"pool gpu.example.com/n0 is invalid: the slices of node evil do not count: the pool is whole without them"},
		},
		"fabric": {victim: slice("own", "", pool("fabric", 1, 1), devices("d"), allNodes), evil: []string{"fabric/d"}},
	} {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			store.SetSlice(tc.victim)
			for i := range maxGenerations + 1 {
				store.SetSlice(slice(fmt.Sprint("e", i), "evil", pool(name, int64(i+2), 1), withGroups))
			}
			if diff := cmp.Diff([]string{name + "/d"}, describe(store.View().ForNode(node("n0")))); diff != "" {
				t.Errorf("the pool's node (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.evil, describe(store.View().ForNode(node("evil")))); diff != "" {
				t.Errorf("the other node (-want +got):\n%s", diff)
			}
		})
	}
}

// What is wrong in itself with a slice that another node adds does not take the pool from its nodes, whatever the pool is called. The other node is
// told what it is.
func TestABrokenSliceOfAnotherNodeBreaksNothing(t *testing.T) {
	broken := func(s *resourceapi.ResourceSlice) {
		s.Spec.Devices[0].Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse(neverEnding)}}
	}
	const (
		told     = "pool gpu.example.com/gpus is invalid: slice evil: device evil-device, capacity memory: "
		together = "pool gpu.example.com/gpus is invalid: slice own-b: device own-b-device, capacity memory: "
	)
	tests := map[string]struct {
		slices []*resourceapi.ResourceSlice
		want   map[string]string // the beginning of what a node sees
	}{
		"beside those of one node": {
			slices: []*resourceapi.ResourceSlice{slice("own", "n0", pool("gpus", 1, 1)), slice("evil", "evil", pool("gpus", 1, 1), broken)},
			want:   map[string]string{"n0": "gpus/own-device", "evil": told, "n1": ""},
		},
		"beside those of two nodes": {
			slices: []*resourceapi.ResourceSlice{
				slice("own", "n0", pool("gpus", 1, 1)), slice("other", "n1", pool("gpus", 1, 1)),
				slice("evil", "evil", pool("gpus", 1, 2)), slice("evil-b", "evil", pool("gpus", 1, 2), broken), slice("evil-a", "evil", pool("gpus", 1, 2), broken),
			},
			want: map[string]string{"n0": "gpus/own-device", "n1": "gpus/other-device", "evil": "pool gpu.example.com/gpus is invalid: slice evil-a: "},
		},
		"beside one for all nodes": {
			slices: []*resourceapi.ResourceSlice{slice("own", "", pool("gpus", 1, 1), allNodes), slice("evil", "evil", pool("gpus", 1, 2), broken)},
			want:   map[string]string{"n0": "gpus/own-device", "evil": "gpus/own-device"},
		},
		"the pool's own": {
			slices: []*resourceapi.ResourceSlice{slice("own-a", "n0", pool("gpus", 1, 2)), slice("own-b", "n0", pool("gpus", 1, 2), broken)},
			want:   map[string]string{"n0": together},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			for _, s := range tc.slices {
				store.SetSlice(s)
			}
			for name, want := range tc.want {
				got := strings.Join(describe(store.View().ForNode(node(name))), "; ")
				if !strings.HasPrefix(got, want) || want == "" && got != "" {
					t.Errorf("node %s: %q, want %q", name, got, want)
				}
			}
		})
	}
	// It is told what is wrong with its own, and not with others that are as little for a single node as an ignored one.
	store := newStore()
	for _, s := range []*resourceapi.ResourceSlice{
		slice("own", "n0", pool("n0", 1, 1)), slice("shared", "", pool("n0", 1, 1), allNodes, broken), slice("evil", "evil", pool("n0", 1, 1), withGroups),
	} {
		store.SetSlice(s)
	}
	const want = "pool gpu.example.com/n0 is invalid: the slices of node evil do not count: the pool is whole without them"
	if got := problemsOf(store); !slices.Contains(got, want) {
		t.Errorf("problems %q, want %q among them", got, want)
	}
}

// Counters that are not enabled make a slice one for no node, also of a kubelet. However many generations of them there are, the pool is seen.
func TestSlicesForNoNodeHideNoOlderGeneration(t *testing.T) {
	store := NewStore(Options{})
	store.SetSlice(slice("shared", "", pool("fabric", 1, 1), devices("d"), allNodes))
	for i := range maxGenerations + 1 {
		store.SetSlice(slice(fmt.Sprint("e", i), "evil", pool("fabric", int64(i+2), 1), func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices, s.Spec.SharedCounters = nil, []resourceapi.CounterSet{{Name: "c"}}
		}))
	}
	if diff := cmp.Diff([]string{"fabric/d"}, describe(store.View().ForNode(node("n0")))); diff != "" {
		t.Errorf("what a node sees (-want +got):\n%s", diff)
	}
}

// Nor do a node's own hide from it what it sees of an older generation, as with upstream's allocator. For other nodes they count where the newest has to
// be whole.
func TestSlicesForNoNodeHideNothingFromTheirOwn(t *testing.T) {
	counters := func(s *resourceapi.ResourceSlice) {
		s.Spec.Devices, s.Spec.SharedCounters = nil, []resourceapi.CounterSet{{Name: "c"}}
	}
	store := NewStore(Options{})
	for _, s := range []*resourceapi.ResourceSlice{
		slice("old", "n1", pool("p", 1, 1)), slice("sets", "n1", pool("p", 2, 2), counters), slice("new", "n0", pool("p", 2, 2)),
	} {
		store.SetSlice(s)
	}
	for name, want := range map[string]string{"n1": "p/old-device", "n0": "p/new-device"} {
		if diff := cmp.Diff([]string{want}, describe(store.View().ForNode(node(name)))); diff != "" {
			t.Errorf("what node %s sees (-want +got):\n%s", name, diff)
		}
	}
}

// Nor do those of another node break a pool. The pool's own are for no node, too, and count where the pool has to be whole.
func TestSlicesForNoNodeOfOtherNodesBreakNothing(t *testing.T) {
	counters := func(s *resourceapi.ResourceSlice) {
		s.Spec.Devices, s.Spec.SharedCounters = nil, []resourceapi.CounterSet{{Name: "c"}}
	}
	stranger := func(pool, node string) []string {
		const told = "pool gpu.example.com/%s is invalid: the slices of node %s do not count: the pool is whole without them"
		return []string{fmt.Sprintf(told, pool, node)}
	}
	for name, tc := range map[string]struct {
		slices []*resourceapi.ResourceSlice
		want   map[string][]string // what a node sees
	}{
		"of the same generation": {
			slices: []*resourceapi.ResourceSlice{
				slice("own", "n0", pool("n0", 1, 1), devices("d")),
				slice("x", "evil", pool("n0", 1, 1), counters), slice("y", "worse", pool("n0", 1, 2), counters),
			},
			want: map[string][]string{"n0": {"n0/d"}, "evil": stranger("n0", "evil"), "worse": stranger("n0", "worse")},
		},
		"of a higher generation": {
			slices: []*resourceapi.ResourceSlice{
				slice("own", "n0", pool("n0", 1, 1), devices("d")), slice("x", "evil", pool("n0", 2, 2), counters),
			},
			want: map[string][]string{"n0": {"n0/d"}, "evil": stranger("n0", "evil")},
		},
		"beside the pool's own counters": {
			slices: []*resourceapi.ResourceSlice{
				slice("own", "n0", pool("n0", 1, 2), devices("d")), slice("own-counters", "n0", pool("n0", 1, 2), counters),
				slice("x", "evil", pool("n0", 1, 2), counters),
			},
			want: map[string][]string{"n0": {"n0/d"}, "evil": stranger("n0", "evil")},
		},
		"in a pool for all nodes": {
			slices: []*resourceapi.ResourceSlice{
				slice("shared", "", pool("fabric", 1, 1), devices("d"), allNodes), slice("x", "evil", pool("fabric", 1, 1), counters),
			},
			want: map[string][]string{"n0": {"fabric/d"}, "evil": {"fabric/d"}},
		},
		"the pool's own are missing": {
			slices: []*resourceapi.ResourceSlice{slice("own", "n0", pool("n0", 1, 2), devices("d"))},
			want:   map[string][]string{"n0": {"pool gpu.example.com/n0 is incomplete: 1 of 2 slices of generation 1"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			store := NewStore(Options{})
			for _, s := range tc.slices {
				store.SetSlice(s)
			}
			for name, want := range tc.want {
				if diff := cmp.Diff(want, describe(store.View().ForNode(node(name)))); diff != "" {
					t.Errorf("what node %s sees (-want +got):\n%s", name, diff)
				}
			}
		})
	}
}

// Nodes that call their pools alike may count generations each for itself, however many these are. In a pool with slices for all nodes, none is newer
// than those.
func TestEachNodeMayCountItsOwnGenerations(t *testing.T) {
	const nodes = 3 * maxGenerations
	for name, extra := range map[string][]*resourceapi.ResourceSlice{
		"alone": nil,
		"beside newer ones for nodes with a label": {slice("fast", "", pool("net", nodes+1, 1), nodesWith("fast"))},
		"beside older ones for all nodes":          {slice("all", "", pool("net", 0, 1), allNodes)},
	} {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			for i := range nodes {
				store.SetSlice(slice(fmt.Sprint("s", i), fmt.Sprint("n", i), pool("net", int64(i+1), 1), devices(fmt.Sprint("d", i))))
			}
			for _, s := range extra {
				store.SetSlice(s)
			}
			all := name == "beside older ones for all nodes"
			for i := range nodes {
				want := fmt.Sprint("net/d", i)
				if all {
					want = "net/all-device"
				}
				if diff := cmp.Diff([]string{want}, describe(store.View().ForNode(node(fmt.Sprint("n", i))))); diff != "" {
					t.Errorf("node %d (-want +got):\n%s", i, diff)
				}
			}
			store.DeleteSlice("s0")
			if got := describe(store.View().ForNode(node("n0"))); (len(got) > 0) != all {
				t.Errorf("the node whose slice is gone sees %v", got)
			}
		})
	}
}

// A node sees the newest generation that has slices for it, whether by name or not. But in a pool for more than one node a kubelet cannot make a newer
// one than there is.
func TestANodeSeesTheNewestGenerationThatIsForIt(t *testing.T) {
	for name, tc := range map[string]struct {
		own, all, some int64
		want           string
	}{
		"its own":                        {own: 2, all: 1, some: 3, want: "net/own"},
		"one for all nodes":              {own: 1, all: 2, some: 3, want: "net/all"},
		"its own, newer than all others": {own: 4, all: 2, some: 3, want: "net/all"},
	} {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			store.SetSlice(slice("own", "n1", pool("net", tc.own, 1), devices("own")))
			store.SetSlice(slice("all", "", pool("net", tc.all, 1), devices("all"), allNodes))
			store.SetSlice(slice("new", "", pool("net", tc.some, 1), nodesWith("fast")))
			if diff := cmp.Diff([]string{tc.want}, describe(store.View().ForNode(node("n1")))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Of the generations with slices that are not for one node only so many are looked at, beside the newest of all: those are the newest.
func TestOnlyTheNewestGenerationsAreLookedAt(t *testing.T) {
	store := newStore()
	const generations = 1 + maxGenerations + 5
	for i := range generations {
		store.SetSlice(slice(fmt.Sprint("s", i), "", pool("net", int64(i+1), 1), nodesWith(fmt.Sprint("label", i))))
	}
	for i := range generations {
		devices := describe(store.View().ForNode(node("n", fmt.Sprint("label", i))))
		if want := i >= generations-1-maxGenerations; (len(devices) > 0) != want {
			t.Errorf("generation %d of %d: devices %v, want some: %t", i+1, generations, devices, want)
		}
	}
}

// However many slices kubelets add to a pool for all nodes, it stays for all nodes. Only those whose slices are not looked at are told: a pool with a
// problem refuses all requests for all devices of a node.
func TestKubeletsDoNotTakeASharedPool(t *testing.T) {
	const tooMany = "pool gpu.example.com/fabric is invalid: 7 slices, at most 5 are looked at"
	tests := map[string]struct {
		others []string // one slice each
		shared int
		want   map[string][]string
		more   []string // problems
		modify func(*resourceapi.ResourceSlice)
		off    bool  // PartitionableDevices
		each   int64 // of others, according to them; 9 if it is not said
	}{
		"slices of one other node": {
			others: []string{"evil", "evil", "evil", "evil", "evil", "evil"}, shared: 1,
			want: map[string][]string{"innocent": {"fabric/d0"}, "evil": {"fabric/d0", tooMany}},
		},
		"slices of a node of the pool's name": {
			others: []string{"fabric", "fabric", "fabric", "fabric", "fabric", "fabric"}, shared: 1,
			want: map[string][]string{"innocent": {"fabric/d0"}, "fabric": {"fabric/d0", tooMany}},
		},
		"as many as are looked at of a node of the pool's name": {
			others: []string{"fabric", "fabric", "fabric", "fabric", "fabric", "evil"}, shared: 1,
			want: map[string][]string{"innocent": {"fabric/d0"}, "fabric": {"fabric/d0", tooMany}, "evil": {"fabric/d0", tooMany}},
		},
		"slices with counters while these are not enabled": {
			others: []string{"evil", "evil", "evil", "evil", "evil", "evil"}, shared: 1, off: true,
			modify: func(s *resourceapi.ResourceSlice) {
				s.Spec.Devices, s.Spec.SharedCounters = nil, []resourceapi.CounterSet{{Name: "c"}}
			},
			want: map[string][]string{"innocent": {"fabric/d0"}, "evil": {"fabric/d0", tooMany}},
		},
		"slices of several nodes beside some of a node of the pool's name": {
			others: []string{"evil", "evil", "fabric", "evil", "other"}, shared: 2,
			want: map[string][]string{"innocent": {"fabric/d0", "fabric/d1"}, "evil": {"fabric/d0", "fabric/d1", tooMany}, "other": {"fabric/d0", "fabric/d1", tooMany}},
			more: []string{"pool gpu.example.com/fabric is invalid: the slices of node fabric do not count: they are of a newer generation than those for more than one node, 1"},
		},
		"too many that are for all nodes": {
			others: []string{"evil"}, shared: 6,
			want: map[string][]string{"innocent": {tooMany}, "evil": {tooMany}},
		},
		"none for all nodes": {
			others: []string{"evil", "evil", "evil", "evil", "evil", "evil", "other"}, each: 1,
			want: map[string][]string{"innocent": nil, "evil": {tooMany}, "other": {"fabric/e6-device"}},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			if tc.off {
				store = NewStore(Options{})
			}
			if tc.modify == nil {
				tc.modify = func(*resourceapi.ResourceSlice) {}
			}
			if tc.each == 0 {
				tc.each = 9
			}
			store.View().caches.limits.members = 5
			for i := range tc.shared {
				store.SetSlice(slice(fmt.Sprint("s", i), "", pool("fabric", 1, int64(tc.shared)), devices(fmt.Sprint("d", i)), allNodes))
			}
			for i, other := range tc.others {
				store.SetSlice(slice(fmt.Sprint("e", i), other, pool("fabric", 7, tc.each), tc.modify))
			}
			for name, want := range tc.want {
				if diff := cmp.Diff(want, describe(store.View().ForNode(node(name)))); diff != "" {
					t.Errorf("node %s (-want +got):\n%s", name, diff)
				}
			}
			if diff := cmp.Diff(append([]string{tooMany}, tc.more...), problemsOf(store)); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

// A kubelet may write any slice for its own node, of any pool. In a pool for many nodes, or for several single ones, whatever it writes changes what its
// own node sees, and nobody else's.
func TestAKubeletDoesNotTakeAPoolForManyNodes(t *testing.T) {
	sets := func(amount string, names ...string) func(*resourceapi.ResourceSlice) {
		return func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices, s.Spec.SharedCounters = nil, nil
			for _, name := range names {
				s.Spec.SharedCounters = append(s.Spec.SharedCounters, resourceapi.CounterSet{
					Name: name, Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse(amount)}},
				})
			}
		}
	}
	consuming := func(set, counter, amount string) func(*resourceapi.ResourceSlice) {
		return func(s *resourceapi.ResourceSlice) {
			for i := range s.Spec.Devices {
				s.Spec.Devices[i].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{
					CounterSet: set, Counters: map[string]resourceapi.Counter{counter: {Value: resource.MustParse(amount)}},
				}}
			}
		}
	}
	racks := []*resourceapi.ResourceSlice{
		slice("r1", "", pool("fabric", 1, 2), devices("d1"), nodesWith("rack1")), slice("r2", "", pool("fabric", 1, 2), devices("d2"), nodesWith("rack2")),
	}
	// The pool's own slices are three, one of them of a single node.
	mixed := []*resourceapi.ResourceSlice{
		slice("sets", "", pool("fabric", 1, 3), allNodes, sets("8", "x")), slice("s", "", pool("fabric", 1, 3), allNodes, devices("d"), consuming("x", "memory", "1")),
		slice("own", "n0", pool("fabric", 1, 3), devices("own"), consuming("x", "memory", "2")),
	}
	single := []*resourceapi.ResourceSlice{ // each node has its own
		slice("a-sets", "n0", pool("gpus", 1, 2), sets("8", "x")), slice("a", "n0", pool("gpus", 1, 2), devices("a"), consuming("x", "memory", "1")),
		slice("b-sets", "n1", pool("gpus", 1, 2), sets("9", "x")), slice("b", "n1", pool("gpus", 1, 2), devices("b"), consuming("x", "memory", "2")),
	}
	tests := map[string]struct {
		own, evil []*resourceapi.ResourceSlice
		want      map[string][]string // what nodes see
		told      string              // to the kubelet's node, by what it sees or as a problem
	}{
		"a newer generation in a pool by labels": {
			own: racks, evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("fabric", 9, 1))},
			want: map[string][]string{"n0": {"fabric/d1"}, "n1": {"fabric/d2"}},
			told: "the slices of node evil do not count: they are of a newer generation than those for more than one node, 1",
		},
		"a newer generation that is ignored in a pool by labels": {
			own: racks, evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("fabric", 9, 1), withGroups)},
			want: map[string][]string{"n0": {"fabric/d1"}, "n1": {"fabric/d2"}},
			told: "the slices of node evil do not count: they are of a newer generation than those for more than one node, 1",
		},
		"as many as are missing without them": {
			own: mixed, evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("fabric", 1, 3), consuming("x", "memory", "8"))},
			want: map[string][]string{"n0": {"fabric/own", "fabric/d"}, "evil": {"fabric/e-device", "fabric/d"}, "n1": {"fabric/d"}},
		},
		"a counter set that there is": {
			own: mixed, evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("fabric", 1, 3), sets("8", "x"))},
			want: map[string][]string{"n0": {"fabric/own", "fabric/d"}, "evil": {"fabric/d"}, "n1": {"fabric/d"}},
			told: "duplicate counter set name x",
		},
		"a negative counter": {
			own: mixed, evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("fabric", 1, 3), sets("-8", "y"))},
			want: map[string][]string{"n0": {"fabric/own", "fabric/d"}, "evil": {"fabric/d"}},
			told: "counter memory of counter set y is negative",
		},
		"a use of a set that there is not": {
			own: mixed, evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("fabric", 1, 3), consuming("y", "memory", "1"))},
			want: map[string][]string{"n0": {"fabric/own", "fabric/d"}, "evil": {"fabric/d"}},
			told: "device e-device consumes from counter set y, which does not exist",
		},
		"a use of a counter that there is not": {
			own: mixed, evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("fabric", 1, 3), consuming("x", "cores", "1"))},
			want: map[string][]string{"n0": {"fabric/own", "fabric/d"}, "evil": {"fabric/d"}},
			told: "device e-device consumes counter cores, which counter set x does not have",
		},
		"a use that gives": {
			own: mixed, evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("fabric", 1, 3), consuming("x", "memory", "-1"))},
			want: map[string][]string{"n0": {"fabric/own", "fabric/d"}, "evil": {"fabric/d"}},
			told: "device e-device consumes a negative amount of counter memory of counter set x",
		},
		"a device of the name of one for all nodes": {
			own: mixed, evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("fabric", 1, 3), devices("d"), consuming("x", "memory", "8"))},
			want: map[string][]string{"n0": {"fabric/own", "fabric/d"}, "evil": {"fabric/d"}},
			told: "the slices of node evil have a device d, which is one for more than one node",
		},
		"a device of the name of one for a rack, in an older generation": {
			own: []*resourceapi.ResourceSlice{
				slice("r1", "", pool("fabric", 2, 2), devices("d1"), nodesWith("rack1")), slice("r2", "", pool("fabric", 2, 2), devices("d2"), nodesWith("rack2")),
				slice("old", "n2", pool("fabric", 1, 1), devices("old")),
			},
			evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("fabric", 1, 1), devices("d2", "d1"))},
			want: map[string][]string{"n0": {"fabric/d1"}, "n1": {"fabric/d2"}, "n2": {"fabric/old"}},
			told: "the slices of node evil have a device d1, which is one for more than one node",
		},
		"nothing beside single nodes with a set of one name": {
			own: single, want: map[string][]string{"n0": {"gpus/a"}, "n1": {"gpus/b"}, "evil": nil},
		},
		"a use of another node's set": {
			own: single, evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("gpus", 1, 1), consuming("x", "memory", "1"))},
			want: map[string][]string{"n0": {"gpus/a"}, "n1": {"gpus/b"}},
			told: "device e-device consumes from counter set x, which does not exist",
		},
		"a slice of the generation of another": {
			own:  []*resourceapi.ResourceSlice{slice("a", "n0", pool("gpus", 1, 1), devices("a")), slice("b", "n1", pool("gpus", 2, 1), devices("b"))},
			evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("gpus", 1, 1))},
			want: map[string][]string{"n0": {"gpus/a"}, "n1": {"gpus/b"}, "evil": {"gpus/e-device"}},
		},
		"a broken slice without which the pool is not whole, so it is invalid, as upstream's allocator has it": {
			own:  []*resourceapi.ResourceSlice{slice("a", "n0", pool("gpus", 1, 2), devices("a"))},
			evil: []*resourceapi.ResourceSlice{slice("e", "evil", pool("gpus", 1, 2), consuming("y", "memory", "1"))},
			want: map[string][]string{"n0": {"pool gpu.example.com/gpus is invalid: device e-device consumes from counter set y, which does not exist"}},
			told: "device e-device consumes from counter set y, which does not exist",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			for _, s := range slices.Concat(tc.own, tc.evil) {
				store.SetSlice(s)
			}
			for name, want := range tc.want {
				var labels []string
				if rack, known := map[string]string{"n0": "rack1", "n1": "rack2"}[name]; known {
					labels = append(labels, rack)
				}
				if diff := cmp.Diff(want, describe(store.View().ForNode(node(name, labels...)))); diff != "" {
					t.Errorf("node %s (-want +got):\n%s", name, diff)
				}
			}
			told := strings.Join(append(problemsOf(store), describe(store.View().ForNode(node("evil")))...), "\n")
			if !strings.Contains(told, tc.told) || tc.told == "" && strings.Contains(told, " is in") {
				t.Errorf("told: %q, want %q", told, tc.told)
			}
		})
	}
}

// Whose counters are wrong is found out in a generation that has no more than is looked at. One with more is invalid, whoever is right.
func TestOfTooManyParticularsNoCountersAreJudged(t *testing.T) {
	var g generation
	for _, name := range []string{"n0", "n1", "n2"} {
		s := slice(name, name, pool("gpus", 1, 1))
		if name != "n0" {
			consuming("y", "memory", "1")(s)
		}
		g.nodes = append(g.nodes, nodeSlices{name, []*Slice{newSlice(s, DefaultFeatures())}})
	}
	for most, want := range map[int][]string{5: {"n1", "n2"}, 4: nil} {
		strangers, judged := g.judge(most, DefaultFeatures())
		if got := slices.Sorted(maps.Keys(strangers)); !slices.Equal(got, want) || !judged {
			t.Errorf("of at most %d: strangers %q, want %q; judged: %t", most, got, want, judged)
		}
	}
}

// While the driver of the node after which a pool is called has not published all its slices, no other node's stands for one of them: neither is what is
// there all that there is, nor are another node's counters those of its devices.
func TestAnotherNodesSliceStandsForNoneOfAPoolsOwn(t *testing.T) {
	const told = "pool gpu.example.com/%s is invalid: the slices of node evil do not count: the pool is called after node n0, and is that node's"
	for _, name := range []string{"n0", "n0/mig"} {
		for filler, fill := range map[string]func(*resourceapi.ResourceSlice){"devices": devices("x"), "counters": counterSetsOf("1000", "x")} {
			t.Run(name+", "+filler, func(t *testing.T) {
				store := newStore()
				store.SetSlice(slice("old", "n0", pool(name, 1, 1), devices("old")))
				store.SetSlice(slice("e", "evil", pool(name, 2, 2), fill))
				own := []*resourceapi.ResourceSlice{
					slice("own", "n0", pool(name, 2, 2), devices("a", "b"), consuming("x", "memory", "5")), slice("sets", "n0", pool(name, 2, 2), counterSetsOf("8", "x")),
				}
				for i, want := range [][]string{
					{name + "/old"},
					{fmt.Sprintf("pool gpu.example.com/%s is incomplete: 1 of 2 slices of generation 2", name)},
					{name + "/a", name + "/b", name + "/a: {0 5000000000} of x/memory, {0 8000000000}", name + "/b: {0 5000000000} of x/memory, {0 8000000000}"},
				} {
					if i > 0 {
						store.SetSlice(own[i-1])
					}
					if diff := cmp.Diff(want, describeAll(store.View().ForNode(node("n0")))); diff != "" {
						t.Errorf("the pool's node, with %d slices (-want +got):\n%s", i, diff)
					}
					if got := describe(store.View().ForNode(node("evil"))); i == 1 && !slices.Equal(got, []string{fmt.Sprintf(told, name)}) {
						t.Errorf("the other node is told %q", got)
					}
				}
			})
		}
	}
}

// While the driver of a pool for more than one node has not published all its slices, a node's slice may stand for one of them. But no device for more
// than one node takes of counters that another node than the one after which the pool is called has written: claims would get more than there is.
func TestDevicesForMoreThanOneNodeTakeOfNoSingleNodesCounters(t *testing.T) {
	const told = "pool gpu.example.com/%s is invalid: device a, which is one for more than one node, consumes from counter set x, which is node evil's"
	takes := func(name, device, all string) string {
		return fmt.Sprintf("%s/%s: {0 5000000000} of x/memory, {0 %s000000000}", name, device, all)
	}
	for kind, is := range map[string]func(*resourceapi.ResourceSlice){"all nodes": allNodes, "nodes with a label": nodesWith("rack1"), "devices choose": perDevice("rack1")} {
		for _, name := range []string{"fabric", "n0/fabric"} {
			t.Run(name+", "+kind, func(t *testing.T) {
				store := newStore()
				devicesOf := func(generation int64) *resourceapi.ResourceSlice {
					return slice(fmt.Sprint("devices-", generation), "", pool(name, generation, 2), devices("a", "b"), consuming("x", "memory", "5"), is)
				}
				store.SetSlice(devicesOf(1))
				store.SetSlice(slice("sets", "", pool(name, 1, 2), counterSetsOf("8", "x"), allNodes))
				store.SetSlice(slice("e", "evil", pool(name, 2, 2), counterSetsOf("1000", "x"))) // before the driver publishes anew
				usable := []string{name + "/a", name + "/b", takes(name, "a", "8"), takes(name, "b", "8")}
				for i, want := range [][]string{usable, {fmt.Sprintf(told, name)}, usable} {
					switch i {
					case 1:
						store.SetSlice(devicesOf(2))
					case 2:
						store.SetSlice(slice("sets", "", pool(name, 2, 2), counterSetsOf("8", "x"), allNodes))
					}
					if diff := cmp.Diff(want, describeAll(store.View().ForNode(node("n0", "rack1")))); diff != "" {
						t.Errorf("with %d slices of the newest generation (-want +got):\n%s", i, diff)
					}
				}
			})
		}
	}
	store := newStore()
	store.SetSlice(slice("devices", "", pool("n0", 1, 2), devices("a"), consuming("x", "memory", "5"), allNodes))
	store.SetSlice(slice("sets", "n0", pool("n0", 1, 2), counterSetsOf("8", "x")))
	if diff := cmp.Diff([]string{"n0/a", takes("n0", "a", "8")}, describeAll(store.View().ForNode(node("n1")))); diff != "" {
		t.Errorf("of the node after which the pool is called (-want +got):\n%s", diff)
	}
}

// Where nodes of one pool have sets of the same name, a device takes of its own node's.
func TestADeviceTakesOfItsOwnNodesCounters(t *testing.T) {
	counted := func(amounts ...string) map[string]resourceapi.Counter {
		all := map[string]resourceapi.Counter{}
		for i, amount := range amounts {
			all[fmt.Sprint("c", i)] = resourceapi.Counter{Value: resource.MustParse(amount)}
		}
		return all
	}
	store := newStore()
	for i, have := range []string{"8", "16"} {
		name := fmt.Sprint("n", i)
		store.SetSlice(slice(name+"-sets", name, pool("gpus", 1, 2), devices(), func(s *resourceapi.ResourceSlice) {
			s.Spec.SharedCounters = []resourceapi.CounterSet{{Name: "x", Counters: counted(have, "1")}}
		}))
		store.SetSlice(slice(name, name, pool("gpus", 1, 2), devices("same", name), func(s *resourceapi.ResourceSlice) {
			for j := range s.Spec.Devices {
				s.Spec.Devices[j].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{CounterSet: "x", Counters: counted(fmt.Sprint(i + 1))}}
			}
		}))
	}
	for i, have := range []string{"8", "16"} {
		devices := store.View().ForNode(node(fmt.Sprint("n", i)))
		for _, name := range []string{"same", fmt.Sprint("n", i)} {
			uses := devices.Pools[0].Uses(devices.Pools[0].Index(name))
			if len(uses) != 1 {
				t.Fatalf("node %d, device %s: uses %v", i, name, uses)
			}
			counter := devices.Pools[0].Pool.Counters.All[uses[0].Counter]
			want := Counter{Node: fmt.Sprint("n", i), Set: "x", Name: "c0", Total: amount.Of(resource.MustParse(have))}
			if counter != want || uses[0].Amount != amount.Of(resource.MustParse(fmt.Sprint(i+1))) {
				t.Errorf("node %d, device %s takes %v of %v, want of %v", i, name, uses[0].Amount, counter, want)
			}
		}
	}
}

// A kubelet that adds as many slices as a generation may have takes the pool from nobody: its own do not count.
func TestManySlicesOfOneNodeTakeNoPool(t *testing.T) {
	own := func(name, node string, generation int64, modify ...func(*resourceapi.ResourceSlice)) *resourceapi.ResourceSlice {
		return slice(name, node, append(modify, pool("gpus", generation, 1), devices(name))...)
	}
	const told = "pool gpu.example.com/gpus is invalid: the slices of node evil are more of a generation than there is room for beside others, at most 4"
	tests := map[string]struct {
		own        []*resourceapi.ResourceSlice
		evil       int
		generation int64
		want       map[string][]string
	}{
		"with room for all": {
			own: []*resourceapi.ResourceSlice{own("a", "n0", 1)}, evil: 3, generation: 1,
			want: map[string][]string{"n0": {"gpus/a"}, "evil": {"gpus/e0", "gpus/e1", "gpus/e2"}},
		},
		"with room for all in another generation": {
			own: []*resourceapi.ResourceSlice{own("a", "n0", 1), own("b", "n1", 1)}, evil: 4, generation: 2,
			want: map[string][]string{"n0": {"gpus/a"}, "n1": {"gpus/b"}, "evil": {"gpus/e0", "gpus/e1", "gpus/e2", "gpus/e3"}},
		},
		"beside one node": {
			own: []*resourceapi.ResourceSlice{own("a", "n0", 1)}, evil: 4, generation: 1,
			want: map[string][]string{"n0": {"gpus/a"}, "evil": {told}},
		},
		"more than may be, beside nodes with more devices": {
			own: []*resourceapi.ResourceSlice{own("a", "n0", 1), slice("b", "n1", pool("gpus", 1, 1), devices("b", "c", "d", "e", "f", "g"))}, evil: 5, generation: 1,
			want: map[string][]string{"n0": {"gpus/a"}, "n1": {"gpus/b", "gpus/c", "gpus/d", "gpus/e", "gpus/f", "gpus/g"}, "evil": {told}},
		},
		"beside one for all nodes": {
			own: []*resourceapi.ResourceSlice{own("a", "", 1, allNodes)}, evil: 4, generation: 1,
			want: map[string][]string{"n0": {"gpus/a"}, "evil": {"gpus/a"}},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			store.View().caches.limits.slices = 4
			for i := range tc.evil {
				store.SetSlice(slice(fmt.Sprint("e", i), "evil", pool("gpus", tc.generation, int64(tc.evil)), devices(fmt.Sprint("e", i))))
			}
			for _, s := range tc.own {
				store.SetSlice(s)
			}
			for name, want := range tc.want {
				if diff := cmp.Diff(want, describe(store.View().ForNode(node(name)))); diff != "" {
					t.Errorf("node %s (-want +got):\n%s", name, diff)
				}
			}
		})
	}
}
