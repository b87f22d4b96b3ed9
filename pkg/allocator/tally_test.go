// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// TestCountsFollowUsage makes sure that nothing that is kept on a pool outlives what it was made from: with so many
// pools several share a mark, and views of different ages, and of another index, are looked at in turn.
func TestCountsFollowUsage(t *testing.T) {
	const nodes, gpusPerNode = 2500, 2
	w := rig()
	for i := range nodes {
		w.node(fmt.Sprintf("node-%d", i), gpus(gpusPerNode)...)
	}
	view := w.store().View()
	// One kind is decided by counting. The others are searched for, and what is found is kept: for two equal requests, and,
	// as they do not have the same number, for two that want more.
	kinds := map[int]*Requests{
		0: compileTwice(t, view, rig().claim("c", exactly("gpu", 1))),
		1: compileTwice(t, view, rig().claim("c", exactly("gpu", 1), exactly("more", 1)).matchAttribute(driverA+"/root")),
		2: compileTwice(t, view, rig().claim("c", exactly("gpu", 1), exactly("more", 1))),
	}
	wanted := map[int]int{0: 1, 1: 2, 2: 2}

	type state struct {
		usage usage.View
		held  map[int]int // devices held, by node
	}
	indexes := [2]*usage.Index{usage.NewIndex(), usage.NewIndex()}
	latest := [2]state{{held: map[int]int{}}, {held: map[int]int{}}}
	seen := []state{latest[0]}
	random := rand.New(rand.NewPCG(1, 1))
	for range 1500 {
		which := random.IntN(2)
		node := random.IntN(60) // few nodes change, often
		held := random.IntN(gpusPerNode + 1)
		allocation := &resourceapi.AllocationResult{}
		for i := range held {
			allocation.Devices.Results = append(allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
				Request: "r", Driver: driverA, Pool: fmt.Sprintf("node-%d", node), Device: fmt.Sprintf("gpu-%d", i),
			})
		}
		indexes[which].Set(usage.ClaimRef{UID: types.UID(fmt.Sprint(node))}, allocation, nil)
		next := state{usage: indexes[which].View(), held: map[int]int{node: held}}
		for n, held := range latest[which].held {
			if n != node {
				next.held[n] = held
			}
		}
		latest[which] = next
		seen = append(seen, next)

		for range 4 {
			s := seen[random.IntN(len(seen))]
			for _, n := range []int{node, random.IntN(60), random.IntN(nodes)} {
				for kind, requests := range kinds {
					in := Input{Requests: requests, Node: w.nodes[n], Inventory: view, Usage: s.usage}
					if got, want := Check(context.Background(), in).Fits(), s.held[n] <= gpusPerNode-wanted[kind]; got != want {
						t.Fatalf("node %d, of which %d of %d devices are held, for requests of kind %d: fits is %v", n, s.held[n], gpusPerNode, kind, got)
					}
				}
			}
		}
	}
}

// compileTwice compiles the claims as those of the second pod of a template.
func compileTwice(t *testing.T, view *inventory.View, w *world) *Requests {
	t.Helper()
	var requests *Requests
	for range 2 {
		var err error
		if requests, err = Compile(w.claims, view, DefaultFeatures()); err != nil {
			t.Fatal(err)
		}
	}
	if !requests.compiled.Recurring {
		t.Fatal("the second pod is not known to be one")
	}
	return requests
}

func TestACountIsUnpackedAsItWasPacked(t *testing.T) {
	for _, c := range []count{{}, {free: 1}, {free: 128 * 1000, dependent: true}, {free: 7, errors: true}, {dependent: true, errors: true}} {
		packed := c.pack(1<<32 - 1)
		if got := unpack(packed); got != c || packed>>32 != 1<<32-1 {
			t.Errorf("%+v became %+v, with number %d", c, got, packed>>32)
		}
	}
}

// countedBy are two slices of a node in a pool of many: a counter set with so much, devices each of which takes so much of it, and one that takes
// of another set.
func countedBy(node, total, takes string, devices ...string) []*resourceapi.ResourceSlice {
	spec := resourceapi.ResourceSliceSpec{Driver: driverA, NodeName: ptr.To(node), Pool: resourceapi.ResourcePool{Name: "gpus", ResourceSliceCount: 2}}
	sets := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node + "-sets"}, Spec: spec}
	for name, total := range map[string]string{"set": total, "spare": "1"} {
		counters := map[string]resourceapi.Counter{"slots": {Value: resource.MustParse(total)}}
		sets.Spec.SharedCounters = append(sets.Spec.SharedCounters, resourceapi.CounterSet{Name: name, Counters: counters})
	}
	list := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: node}, Spec: spec}
	list.Spec.Devices = []resourceapi.Device{{Name: node + "-spare"}}
	consumes("spare", "slots", "1")(0, &list.Spec.Devices[0])
	for _, name := range devices {
		device := resourceapi.Device{Name: name}
		consumes("set", "slots", takes)(0, &device)
		list.Spec.Devices = append(list.Spec.Devices, device)
	}
	return []*resourceapi.ResourceSlice{sets, list}
}

// The node of whose counters too much is taken gives out no device that takes of any. The pool's other nodes do.
func TestCountersOfOtherNodesAreNotOverdrawn(t *testing.T) {
	tests := map[string]struct {
		other []*resourceapi.ResourceSlice
		held  []string
		fits  map[string]bool
	}{
		"nothing is overdrawn": {
			other: countedBy("other", "4", "1", "e0", "e1"), held: []string{"d0", "e0"},
			fits: map[string]bool{"n1": true, "other": true},
		},
		"by a device of the name of one that is held": {
			other: countedBy("other", "1", "2", "d0", "e1"), held: []string{"d0"},
			fits: map[string]bool{"n1": true, "other": false},
		},
		"by a held device that has come to take more": {
			other: countedBy("other", "3", "4", "e0", "e1"), held: []string{"d0", "e0"},
			fits: map[string]bool{"n1": true, "other": false},
		},
		"by one's own": {
			other: countedBy("other", "4", "1", "e0", "e1"), held: []string{"d0", "d1", "d2", "d3", "d4"},
			fits: map[string]bool{"n1": false, "other": true},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := rig().claim("c", exactly("gpu", 1))
			w.slices = append(countedBy("n1", "4", "1", "d0", "d1", "d2", "d3", "d4"), tc.other...)
			for _, name := range tc.held {
				w.held = append(w.held, usage.DeviceID{Driver: driverA, Pool: "gpus", Device: name})
			}
			_, in := w.compile(t)
			for name, fits := range tc.fits {
				in.Node = &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
				if r := Allocate(context.Background(), in); r.Fits() != fits {
					t.Errorf("node %s fits: %t (%v), want %t", name, r.Fits(), r.Failure, fits)
				}
			}
		})
	}
}
