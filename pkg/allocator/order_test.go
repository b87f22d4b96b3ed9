// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// withCapacity returns devices with these names and as much of each capacity.
func withCapacity(device resourceapi.Device, amounts map[resourceapi.QualifiedName]string) resourceapi.Device {
	device.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{}
	for name, amount := range amounts {
		device.Capacity[name] = resourceapi.DeviceCapacity{Value: resource.MustParse(amount)}
	}
	return device
}

func memory(name, amount string) resourceapi.Device {
	return withCapacity(resourceapi.Device{Name: name}, map[resourceapi.QualifiedName]string{"memory": amount})
}

func TestSmallestFit(t *testing.T) {
	attachable := func(device resourceapi.Device) resourceapi.Device {
		device.BindingConditions, device.BindingFailureConditions = []string{"attached"}, []string{"failed"}
		return device
	}
	kind := func(device resourceapi.Device, kind string) resourceapi.Device {
		device.Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"kind": {StringValue: &kind}}
		return device
	}
	ofKind := func(kind string) string {
		return `device.attributes["` + driverA + `"].?kind.orValue("") == "` + kind + `"`
	}
	sharedCard := func(name, amount string) resourceapi.Device {
		device := memory(name, amount)
		device.AllowMultipleAllocations = ptr.To(true)
		return device
	}
	cards := []resourceapi.Device{memory("large", "80Gi"), memory("small", "16Gi"), memory("middle", "40Gi"), memory("small-too", "16Gi")}

	for name, tc := range map[string]struct {
		world *world
		want  []string
	}{
		"the smallest": {
			world: rig().node("n1", cards...).claim("c", exactly("gpu", 1)),
			want:  []string{"n1/small"},
		},
		"a ready one before a smaller one that its pod would wait for": {
			world: rig().node("n1", attachable(memory("small", "16Gi")), memory("large", "80Gi"), memory("middle", "40Gi")).claim("c", exactly("gpu", 1)),
			want:  []string{"n1/middle"},
		},
		"the smallest of those that the pod would wait for": {
			world: rig().node("n1", attachable(memory("middle", "40Gi")), attachable(memory("small", "16Gi")), memory("large", "80Gi")).claim("c", exactly("gpu", 2)),
			want:  []string{"n1/large", "n1/small"},
		},
		"the first of equals, then the next larger": {
			world: rig().node("n1", cards...).claim("c", exactly("gpu", 3)),
			want:  []string{"n1/small", "n1/small-too", "n1/middle"},
		},
		"not one that is held": {
			world: rig().node("n1", cards...).hold("n1/small").hold("n1/small-too").claim("c", exactly("gpu", 1)),
			want:  []string{"n1/middle"},
		},
		"the smallest of those that are large enough": {
			world: rig().node("n1", cards...).claim("c", takes(exactly("gpu", 1), "memory", "20Gi")),
			want:  []string{"n1/middle"},
		},
		"what others need is not taken": {
			// The first request may have either of the small ones, the second only one of them.
			world: rig().node("n1", kind(memory("small", "16Gi"), "x"), kind(memory("large", "80Gi"), "y")).
				claim("c", exactly("any", 1), exactly("x", 1, ofKind("x"))),
			want: []string{"n1/large", "n1/small"},
		},
		"devices of which nothing is said beside such of another kind": {
			world: rig().node("n1", kind(resourceapi.Device{Name: "nic"}, "nic"), kind(memory("large", "80Gi"), "gpu"), kind(memory("small", "16Gi"), "gpu")).
				claim("c", exactly("nic", 1, ofKind("nic")), exactly("gpu", 1, ofKind("gpu"))),
			want: []string{"n1/nic", "n1/small"},
		},
		"capacities that only some have do not count": {
			world: rig().node("n1",
				withCapacity(resourceapi.Device{Name: "part-of-large"}, map[resourceapi.QualifiedName]string{"memory": "20Gi", "engines": "1"}),
				memory("small", "16Gi")).claim("c", exactly("gpu", 1)),
			want: []string{"n1/small"},
		},
		"the shared card with the least left": {
			world: rig().node("n1", sharedCard("empty", "16Gi"), sharedCard("in-use", "80Gi")).
				share("n1/in-use", "memory", "70Gi").claim("c", takes(exactly("gpu", 1), "memory", "4Gi")),
			want: []string{"n1/in-use"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := tc.world
			requests, err := Compile(w.claims, w.store().View(), DefaultFeatures())
			if err != nil {
				t.Fatal(err)
			}
			result := Allocate(context.Background(), Input{
				Requests: requests, Node: w.nodes[0], Inventory: w.store().View(), Usage: w.usage(), Policy: SmallestFit,
			})
			if !result.Fits() {
				t.Fatal(result.Failure)
			}
			var got []string
			for _, r := range result.Allocations[0].Devices.Results {
				got = append(got, r.Pool+"/"+r.Device)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}
}

// TestScoring packs and spreads: what is held of the devices that match decides, after the order of alternatives.
func TestScoring(t *testing.T) {
	type score struct{ most, least int64 }
	w := rig().node("n1", gpus(4)...).node("n2", gpus(4)...).node("n3", gpus(8)...).
		hold("n2/gpu-0").hold("n2/gpu-1").hold("n3/gpu-0").hold("n3/gpu-1")
	for name, tc := range map[string]struct {
		claim resourceapi.DeviceRequest
		want  []score // by node
	}{
		"one device": { // one of four, three of four, three of eight
			claim: exactly("gpu", 1), want: []score{{249, 750}, {749, 250}, {374, 625}},
		},
		"two devices": {
			claim: exactly("gpu", 2), want: []score{{499, 500}, {999, 0}, {499, 500}},
		},
		"alternatives count for more": {
			claim: firstOf("gpu", exactly("many", 3), exactly("one", 1)), want: []score{{80749, 80250}, {70749, 70250}, {80624, 80375}},
		},
		"admin access holds nothing": {
			claim: adminAccess(exactly("gpu", 1)), want: []score{{0, 999}, {0, 999}, {0, 999}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := *w
			w.claims = nil
			w.claim("c", tc.claim)
			view := w.store().View()
			requests, err := Compile(w.claims, view, DefaultFeatures())
			if err != nil {
				t.Fatal(err)
			}
			var got []score
			for _, node := range w.nodes {
				in := Input{Requests: requests, Node: node, Inventory: view, Usage: w.usage(), Scoring: MostAllocated}
				most := Check(context.Background(), in)
				if again := Allocate(context.Background(), in); again.Score != most.Score {
					t.Errorf("node %s: Check gives score %d, Allocate %d", node.Name, most.Score, again.Score)
				}
				in.Scoring = LeastAllocated
				got = append(got, score{most.Score, Check(context.Background(), in).Score})
			}
			if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(score{})); diff != "" {
				t.Errorf("scores (-want +got):\n%s", diff)
			}
		})
	}
}
