// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// TestSizeOfWhatANodeGives ranks nodes by how large the devices are that a claim would take of them.
func TestSizeOfWhatANodeGives(t *testing.T) {
	shared := func(name, amount string) resourceapi.Device {
		device := memory(name, amount)
		device.AllowMultipleAllocations = ptr.To(true)
		return device
	}
	small, middle, large := memory("small", "16Gi"), memory("middle", "40Gi"), memory("large", "80Gi")
	for name, tc := range map[string]struct {
		world *world
		want  []int // rank of each node, the smallest first; -1 if the size is not known
	}{
		"one kind on each node": {
			world: rig().node("n1", large).node("n2", small).node("n3", middle).node("n4", small).claim("c", exactly("gpu", 1)),
			want:  []int{2, 0, 1, 0},
		},
		"the smallest that is free": {
			world: rig().node("n1", small, large).node("n2", small, large).node("n3", middle).hold("n2/small").claim("c", exactly("gpu", 1)),
			want:  []int{0, 2, 1},
		},
		"only devices that match": {
			world: rig().node("n1", small, large).node("n2", middle, large).claim("c", takes(exactly("gpu", 1), "memory", "20Gi")),
			want:  []int{1, 0},
		},
		"the larger one of two": {
			world: rig().node("n1", memory("a", "16Gi"), memory("b", "80Gi"), memory("c", "80Gi")).node("n2", memory("a", "40Gi"), memory("b", "40Gi")).
				claim("c", exactly("gpu", 2)),
			want: []int{1, 0},
		},
		"several requests": {
			world: rig().node("n1", memory("a", "40Gi"), memory("b", "40Gi")).node("n2", memory("a", "80Gi"), memory("b", "80Gi")).
				claim("c", exactly("x", 1), exactly("y", 1)),
			want: []int{0, 1},
		},
		"all of a node": {
			world: rig().node("n1", memory("a", "80Gi"), memory("b", "80Gi")).node("n2", small, middle).claim("c", all("gpu")),
			want:  []int{1, 0},
		},
		"a share takes the same of every card": {
			world: rig().node("n1", shared("a", "80Gi")).node("n2", shared("a", "80Gi")).node("n3", shared("a", "40Gi"), shared("b", "80Gi")).
				share("n1/a", "memory", "70Gi").share("n3/a", "memory", "39Gi").claim("c", takes(exactly("gpu", 1), "memory", "4Gi")),
			want: []int{0, 0, 0},
		},
		"a device of which nothing is said": {
			world: rig().node("n1", resourceapi.Device{Name: "a"}).node("n2", small, resourceapi.Device{Name: "b"}).node("n3", small).claim("c", exactly("gpu", 1)),
			want:  []int{-1, -1, 0},
		},
		"admin access takes nothing": {
			world: rig().node("n1", small).claim("c", adminAccess(exactly("gpu", 1))),
			want:  []int{-1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := tc.world
			view := w.store().View()
			requests, err := Compile(w.claims, view, DefaultFeatures())
			if err != nil {
				t.Fatal(err)
			}
			var sizes []int64
			for _, node := range w.nodes {
				in := Input{Requests: requests, Node: node, Inventory: view, Usage: w.usage(), Policy: SmallestFit, Scoring: LeastAllocated}
				check := Check(context.Background(), in)
				if !check.Fits() {
					t.Fatalf("node %s: %v", node.Name, check.Failure)
				}
				if again := Allocate(context.Background(), in); again.Size != check.Size {
					t.Errorf("node %s: Check gives size %d, Allocate %d", node.Name, check.Size, again.Size)
				}
				sizes = append(sizes, check.Size)
				in.Policy = FirstFit
				if other := Check(context.Background(), in); other.Size != 0 {
					t.Errorf("node %s: in FirstFit the size is %d, want 0", node.Name, other.Size)
				}
				in.Policy, in.Scoring = SmallestFit, NoScoring
				if other := Check(context.Background(), in); other.Size != 0 {
					t.Errorf("node %s: without a Scoring the size is %d, want 0", node.Name, other.Size)
				}
			}
			var ranks []int
			for _, size := range sizes {
				smaller := map[int64]bool{}
				for _, other := range sizes {
					if other < size && other > 0 {
						smaller[other] = true
					}
				}
				if rank := len(smaller); size > 0 {
					ranks = append(ranks, rank)
				} else {
					ranks = append(ranks, -1)
				}
			}
			if diff := cmp.Diff(tc.want, ranks); diff != "" {
				t.Errorf("ranks by size (-want +got):\n%s\nsizes %v", diff, sizes)
			}
		})
	}
}
