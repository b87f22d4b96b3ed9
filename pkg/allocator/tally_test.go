package allocator

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

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
	if !requests.recurring {
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
