// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// counterSetsOf makes a slice one of counter sets.
func counterSetsOf(amount string, names ...string) func(*resourceapi.ResourceSlice) {
	return func(s *resourceapi.ResourceSlice) {
		s.Spec.Devices = nil
		for _, name := range names {
			s.Spec.SharedCounters = append(s.Spec.SharedCounters, resourceapi.CounterSet{
				Name: name, Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse(amount)}},
			})
		}
	}
}

// consuming makes all devices of a slice take of a counter set.
func consuming(set, counter, amount string, groups ...string) func(*resourceapi.ResourceSlice) {
	return func(s *resourceapi.ResourceSlice) {
		for i := range s.Spec.Devices {
			s.Spec.Devices[i].ConsumesCounters = append(s.Spec.Devices[i].ConsumesCounters, resourceapi.DeviceCounterConsumption{
				CounterSet: set, Counters: map[string]resourceapi.Counter{counter: {Value: resource.MustParse(amount)}}, CompatibilityGroups: groups,
			})
		}
	}
}

// perDevice lets the devices of a slice choose their nodes: in turn one node, those with the label, and all.
func perDevice(label string) func(*resourceapi.ResourceSlice) {
	return func(s *resourceapi.ResourceSlice) {
		s.Spec.NodeName, s.Spec.PerDeviceNodeSelection = nil, ptr.To(true)
		for i := range s.Spec.Devices {
			switch device := &s.Spec.Devices[i]; i % 3 {
			case 0:
				device.NodeName = ptr.To("n0")
			case 1:
				device.NodeSelector = labelled(label)
			default:
				device.AllNodes = ptr.To(true)
			}
		}
	}
}

func broken(s *resourceapi.ResourceSlice) {
	if len(s.Spec.Devices) > 0 {
		s.Spec.Devices[0].Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse(neverEnding)}}
	}
}

// drawn has devices or counter sets, perhaps some that contradict those of others.
func drawn(rng *rand.Rand, name, node, pools string, most int) *resourceapi.ResourceSlice {
	s := slice(name, node, pool(pools, int64(1+rng.IntN(most)), int64(1+rng.IntN(most))), devices(fmt.Sprint("d", rng.IntN(6)), name))
	set, amount := string("xy"[rng.IntN(2)]), []string{"8", "9", "-8"}[min(rng.IntN(8), 2)]
	switch rng.IntN(8) {
	case 0:
		counterSetsOf(amount, set)(s)
	case 1, 2:
		consuming(set, []string{"memory", "cores"}[rng.IntN(8)/7], []string{"1", "2", "-1"}[rng.IntN(15)/7])(s)
	case 3:
		consuming(set, "memory", "1", "red")(s)
	case 4:
		broken(s)
	}
	return s
}

// describeAll is describe, with what the devices take of which counters.
func describeAll(d *NodeDevices) []string {
	out := describe(d)
	for _, p := range d.Pools {
		for i := range p.Len() {
			for _, use := range p.Uses(i) {
				c := p.Pool.Counters.All[use.Counter]
				out = append(out, fmt.Sprintf("%s/%s: %v of %s/%s, %v", p.ID().Pool, p.Device(i).Name, use.Amount, c.Set, c.Name, c.Total))
			}
			for _, m := range p.Memberships(i) {
				if len(m.Groups) == 0 {
					continue // also if no device of its set has groups, and one of another has
				}
				out = append(out, fmt.Sprintf("%s/%s: %s of %s", p.ID().Pool, p.Device(i).Name, m.Groups, p.Pool.Counters.SetName(m.Set)))
			}
		}
	}
	return out
}

// A kubelet may write any slice for its own node. In a pool that others have published as a driver does, whatever it writes changes nothing for them: in
// one called after a node, also while that node's driver is at it; in one for more than one node; in one where each node has its own; and in one with
// both, of several nodes. So it is if what one of these nodes has is broken.
func TestWhateverAKubeletWritesOthersSeeTheSame(t *testing.T) {
	const draws = 500
	nodes := []*v1.Node{node("n0", "rack1"), node("n1", "rack2"), node("n2")}
	kinds := map[string]struct {
		pool string
		of   func(rng *rand.Rand) []*resourceapi.ResourceSlice
	}{
		"of one node": {pool: "n0", of: func(rng *rand.Rand) []*resourceapi.ResourceSlice {
			return ofNode(rng, "n0", "n0", 2, 1+rng.IntN(3), 0)
		}},
		"of one node, one of its pools": {pool: "n0/mig", of: func(rng *rand.Rand) []*resourceapi.ResourceSlice {
			all := ofNode(rng, "n0", "n0/mig", 2, 3, 0)
			return all[rng.IntN(len(all)):] // it is not ready
		}},
		"for more than one": {pool: "fabric", of: func(rng *rand.Rand) []*resourceapi.ResourceSlice {
			return append(forMany(rng, "new", "fabric", 2, 0), forMany(rng, "old", "fabric", 1, 0)[rng.IntN(3):]...)
		}},
		"of each node its own": {pool: "gpus", of: func(rng *rand.Rand) []*resourceapi.ResourceSlice {
			var all []*resourceapi.ResourceSlice
			generations := 1 + rng.IntN(2)
			for i := range 1 + rng.IntN(2) {
				all = append(all, ofNode(rng, fmt.Sprint("n", i), "gpus", int64(1+rng.IntN(generations)), 1+rng.IntN(3), 0)...)
			}
			if last := len(all) - 1; generations == 1 && *all[last].Spec.NodeName == "n1" && rng.IntN(4) == 0 {
				broken(all[last])
			}
			return all
		}},
		"for more than one, and of each node its own": {pool: "gpus", of: func(rng *rand.Rand) []*resourceapi.ResourceSlice {
			own := 1 + rng.IntN(3)
			all := forMany(rng, "all", "gpus", 2, own)
			for i := range 2 {
				all = append(all, ofNode(rng, fmt.Sprint("n", i), "gpus", 2, own, 3)...)
			}
			if last := len(all) - 1; rng.IntN(4) == 0 {
				broken(all[last])
			}
			return all
		}},
	}
	for name, kind := range kinds {
		for _, groups := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, compatibility groups %t", name, groups), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(3, 4))
				features := DefaultFeatures()
				features.CompatibilityGroups = groups
				for range draws {
					own := kind.of(rng)
					var evil []*resourceapi.ResourceSlice
					for i := range 1 + rng.IntN(4) {
						evil = append(evil, drawn(rng, fmt.Sprint(string("az"[rng.IntN(2)]), i), "evil", kind.pool, 4))
					}
					without, with := NewStore(Options{Features: features}), NewStore(Options{Features: features})
					for _, s := range own {
						without.SetSlice(s)
					}
					all := slices.Concat(own, evil)
					rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
					for _, s := range all {
						with.SetSlice(s)
					}
					for _, n := range nodes {
						want, got := describeAll(without.View().ForNode(n)), describeAll(with.View().ForNode(n))
						if diff := cmp.Diff(want, got); diff != "" {
							t.Fatalf("node %s sees with the other's slices (-without, +with):\n%s%s", n.Name, diff, textOf(all))
						}
					}
				}
			})
		}
	}
}

// ofNode are a node's slices of a pool, beside so many for more than one node.
func ofNode(rng *rand.Rand, node, pools string, generation int64, n, beside int) []*resourceapi.ResourceSlice {
	sets := n > 1 && rng.IntN(2) == 0
	var all []*resourceapi.ResourceSlice
	for i := range n {
		s := slice(fmt.Sprint("m-", node, i), node, pool(pools, generation, int64(n+beside)), devices(fmt.Sprint("d", i), fmt.Sprint(node, "-", i)))
		switch {
		case sets && i == 0 && beside == 0:
			counterSetsOf("8", "x")(s)
		case sets && beside == 0, beside > 0:
			consuming("x", "memory", "1")(s)
		}
		all = append(all, s)
	}
	return all
}

// forMany are three slices for more than one node, beside so many of each node.
func forMany(rng *rand.Rand, name, pools string, generation int64, beside int) []*resourceapi.ResourceSlice {
	is := func() func(*resourceapi.ResourceSlice) {
		return []func(*resourceapi.ResourceSlice){allNodes, nodesWith("rack1"), nodesWith("rack2"), perDevice("rack1")}[rng.IntN(4)]
	}
	sets := []func(*resourceapi.ResourceSlice){allNodes, nodesWith("rack1")}[rng.IntN(2)]
	count := int64(3 + beside)
	return []*resourceapi.ResourceSlice{
		slice("m-"+name+"-0", "", pool(pools, generation, count), counterSetsOf("8", "x"), sets),
		slice("m-"+name+"-1", "", pool(pools, generation, count), devices(name+"-0", name+"-1", name+"-2"), consuming("x", "memory", "2"), is()),
		slice("m-"+name+"-2", "", pool(pools, generation, count), devices(name+"-3", name+"-4", name+"-5"), is()),
	}
}

func textOf(all []*resourceapi.ResourceSlice) (text string) {
	for _, s := range slices.SortedFunc(slices.Values(all), func(a, b *resourceapi.ResourceSlice) int { return strings.Compare(a.Name, b.Name) }) {
		var what []string
		for i := range s.Spec.Devices {
			what = append(what, fmt.Sprint(s.Spec.Devices[i].Name, s.Spec.Devices[i].ConsumesCounters))
		}
		text += fmt.Sprintf("%s: node %q, %+v, devices %q, sets %v\n", s.Name, ptr.Deref(s.Spec.NodeName, ""), s.Spec.Pool, what, s.Spec.SharedCounters)
	}
	return text
}

// Who has slices and no Store counts the same ones, in whatever order they come: each that a node sees is one of a whole, but for those that nodes see
// only because the newest for more than one node are not for them.
func TestCountingAgreesWithTheStore(t *testing.T) {
	const draws = 500
	rng := rand.New(rand.NewPCG(5, 6))
	nodes := []*v1.Node{node("n0"), node("n1", "fast"), node("n2"), node("n3", "fast")}
	seen, counted := 0, 0
	for range draws {
		name := []string{"gpus", "n0", "n1/mig"}[rng.IntN(3)]
		var all []*resourceapi.ResourceSlice
		for i := range 1 + rng.IntN(6) {
			s := drawn(rng, fmt.Sprint("s", i), fmt.Sprint("n", rng.IntN(4)), name, 3)
			if is := rng.IntN(8); is < 3 {
				[]func(*resourceapi.ResourceSlice){allNodes, nodesWith("fast"), perDevice("fast")}[is](s)
			}
			all = append(all, s)
		}
		store := NewStore(Options{Features: Features{PartitionableDevices: true, CompatibilityGroups: true}})
		for _, s := range all {
			store.SetSlice(s)
		}
		counts := Counting(all)
		counted += len(counts)
		rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		if again := Counting(all); !maps.EqualFunc(counts, again, func(a, b *PoolProblem) bool { return a == b || a != nil && b != nil && *a == *b }) {
			t.Fatalf("in another order %v count, not %v:\n%s", again, counts, textOf(all))
		}
		shared := int64(0)
		for s := range counts {
			if s.Spec.NodeName == nil {
				shared = max(shared, s.Spec.Pool.Generation)
			}
		}
		for _, n := range nodes {
			for _, p := range store.View().ForNode(n).Pools {
				for _, s := range p.Slices {
					seen++
					if problem, counts := counts[s.Object]; generationOf(s) >= shared && (!counts || problem != nil) {
						t.Fatalf("node %s sees slice %s, which does not count:\n%s", n.Name, s.Object.Name, textOf(all))
					}
				}
			}
		}
	}
	if seen < draws/4 || counted < draws {
		t.Errorf("%d slices were seen and %d counted: this test looks at nothing", seen, counted)
	}
}
