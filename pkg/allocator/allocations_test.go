// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !race

// The race detector makes sync.Pool forget at random, so these are run by `make bench-allocator`.

package allocator

import (
	"context"
	"fmt"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
)

// TestFilterAllocatesLittle judges nodes that all fit, for pods of which none like it came before, so that nothing is
// known: at most 2 heap allocations per node, whatever is asked for.
func TestFilterAllocatesLittle(t *testing.T) {
	shared := func(nodes int) *world {
		w := rig()
		for i := range nodes {
			w.node(fmt.Sprintf("node-%d", i), gpus(8, func(_ int, d *resourceapi.Device) {
				d.AllowMultipleAllocations = ptr.To(true)
				d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}}
			})...)
		}
		return w
	}
	const nodes = 100
	root := "a.example.com/root"
	for name, w := range map[string]*world{
		"one GPU":                           benchWorld(nodes, 0).claim("c", exactly("gpu", 1)),
		"two requests":                      benchWorld(nodes, 3).claim("c", exactly("a", 1), exactly("b", 1)),
		"four requests":                     benchWorld(nodes, 0).claim("c", exactly("a", 1), exactly("b", 1), exactly("c", 1), exactly("d", 1)),
		"two claims":                        benchWorld(nodes, 0).claim("c", exactly("a", 1)).claim("d", exactly("b", 1)),
		"two GPUs under matchAttribute":     benchWorld(nodes, 0).claim("c", exactly("gpu", 2)).matchAttribute(root),
		"two requests under matchAttribute": benchWorld(nodes, 0).claim("c", exactly("a", 1), exactly("b", 1)).matchAttribute(root),
		"distinctAttribute":                 benchWorld(nodes, 0).claim("c", exactly("a", 1), exactly("b", 1)).distinct("root"),
		"alternatives":                      benchWorld(nodes, 0).claim("c", firstOf("gpu", exactly("many", 9), exactly("one", 1))),
		"alternatives and another request":  benchWorld(nodes, 0).claim("c", firstOf("a", exactly("four", 4), exactly("one", 1)), exactly("b", 1)),
		"shared devices":                    shared(nodes).claim("c", exactly("a", 1), exactly("b", 1)),
		"partitions":                        hardPartitions(4, 1, 1, 1).copies(nodes),
	} {
		t.Run(name, func(t *testing.T) {
			view, held := w.store().View(), w.usage()
			for _, policy := range []Policy{FirstFit, SmallestFit} {
				var pods []*Requests
				for range 4 {
					requests, err := Compile(w.claims, view, DefaultFeatures())
					if err != nil {
						t.Fatal(err)
					}
					if requests.compiled.Recurring {
						t.Fatal("such a pod came before")
					}
					pods = append(pods, requests)
					for i := range inventory.MaxNumbers {
						view.NumberOf(w.claims[0].Namespace, fmt.Sprint("another pod ", i))
					}
				}
				filter := func() {
					requests := pods[0]
					if len(pods) > 1 {
						pods = pods[1:]
					}
					for _, node := range w.nodes {
						result := Check(context.Background(), Input{Requests: requests, Node: node, Inventory: view, Usage: held, Policy: policy})
						if !result.Fits() {
							t.Fatal(result.Failure)
						}
					}
				}
				filter() // selectors are evaluated
				if n := testing.AllocsPerRun(2, filter) / nodes; n > 2 {
					t.Errorf("policy %v: %.1f allocations per node", policy, n)
				} else {
					t.Logf("policy %v: %.2f allocations per node", policy, n)
				}
			}
		})
	}
}
