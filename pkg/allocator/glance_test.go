// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"weak"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
)

// zoned is a cluster in which one pool is for all nodes of the zone east, and has one device.
func zoned(t *testing.T) (*inventory.Store, *Requests) {
	t.Helper()
	w := rig().node("pool", gpus(1)...).claim("c", exactly("gpu", 1))
	w.slices[0].Spec.NodeName = nil
	w.slices[0].Spec.NodeSelector = &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchExpressions: []v1.NodeSelectorRequirement{{
		Key: "zone", Operator: v1.NodeSelectorOpIn, Values: []string{"east"},
	}}}}}
	store := w.store()
	return store, compileTwice(t, store.View(), w)
}

func nodeIn(zone string, number int) *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("node-%d", number), Labels: map[string]string{"zone": zone}}}
}

// TestEachNodeIsSeenAsItIs looks at many more nodes than the table of glances has places at first, from several
// goroutines, and at nodes that are replaced by others of their name.
func TestEachNodeIsSeenAsItIs(t *testing.T) {
	const many = 40 * leastGlances
	store, requests := zoned(t)
	view := store.View()
	nodes := make([][2]*v1.Node, many)
	for i := range nodes {
		nodes[i] = [2]*v1.Node{nodeIn("east", i), nodeIn("west", i)}
	}
	var all sync.WaitGroup
	for start := range 4 {
		all.Go(func() {
			for round := range 6 {
				for i := range nodes {
					zone := (i + round) % 2
					node := nodes[(i+start*many/4)%many][zone]
					result := Check(context.Background(), Input{Requests: requests, Node: node, Inventory: view})
					if result.Fits() != (zone == 0) {
						t.Errorf("%s in zone %s: fits is %v", node.Name, node.Labels["zone"], result.Fits())
						return
					}
				}
			}
		})
	}
	all.Wait()
	table := view.Attached().Load().(*glances)
	if len(table.places) < 2*leastGlances {
		t.Errorf("the table has %d places for %d nodes", len(table.places), many)
	}
}

func TestGlanceStats(t *testing.T) {
	store, requests := zoned(t)
	view := store.View()
	before := GlanceStats(view)
	if before.Entries != 0 || before.Limit != mostGlances {
		t.Errorf("before any node was looked at: %+v", before)
	}
	check := func(number int) {
		Check(context.Background(), Input{Requests: requests, Node: nodeIn("east", number), Inventory: view})
	}
	check(0)
	if got := GlanceStats(view); got.Entries != 1 || got.Evicted != before.Evicted {
		t.Errorf("after one node: %+v", got)
	}
	for i := range 2 * leastGlances { // twice what there is room for
		check(i)
	}
	if got := GlanceStats(view); got.Entries > leastGlances || int(got.Evicted-before.Evicted) < leastGlances {
		t.Errorf("after more nodes than there is room for: %+v, before any %+v", got, before)
	}
}

// TestANodeIsSeenAnewWhenTheInventoryChanges changes what the same node can reach.
func TestANodeIsSeenAnewWhenTheInventoryChanges(t *testing.T) {
	store, requests := zoned(t)
	node := nodeIn("west", 0)
	fits := func() bool {
		return Check(context.Background(), Input{Requests: requests, Node: node, Inventory: store.View()}).Fits()
	}
	if fits() {
		t.Fatal("the node is in another zone")
	}
	store.SetSlice(&resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "own"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: driverA, NodeName: ptr.To(node.Name), Devices: gpus(1),
			Pool: resourceapi.ResourcePool{Name: node.Name, Generation: 1, ResourceSliceCount: 1},
		},
	})
	if !fits() {
		t.Error("the node has a device of its own now")
	}
	store.DeleteSlice("own")
	if fits() {
		t.Error("the node's device is gone")
	}
}

// TestANodeThatIsReplacedIsForgotten replaces all nodes again and again, as each report of their status does, while the
// inventory stays as it is: there is one entry for each node, however often that is, and nothing holds on to what nodes were.
func TestANodeThatIsReplacedIsForgotten(t *testing.T) {
	const many, times = 100, 50
	store, requests := zoned(t)
	view := store.View()
	check := func(node *v1.Node) {
		if result := Check(context.Background(), Input{Requests: requests, Node: node, Inventory: view}); !result.Fits() {
			t.Errorf("%s does not fit", node.Name)
		}
	}
	var replaced []weak.Pointer[v1.Node]
	var all sync.WaitGroup
	for range 4 { // each has objects of its own of all nodes
		var nodes []*v1.Node
		for range times {
			for i := range many {
				nodes = append(nodes, nodeIn("east", i))
			}
		}
		for _, node := range nodes {
			replaced = append(replaced, weak.Make(node))
		}
		all.Go(func() {
			for _, node := range nodes {
				check(node)
				check(node)
			}
		})
	}
	all.Wait()
	if entries := GlanceStats(view).Entries; entries > many {
		t.Errorf("%d entries for %d nodes", entries, many)
	}
	runtime.GC()
	runtime.GC()
	alive := 0
	for _, node := range replaced {
		if node.Value() != nil {
			alive++
		}
	}
	if alive > many {
		t.Errorf("%d objects of %d nodes are held on to", alive, many)
	}
	runtime.KeepAlive(view)
}
