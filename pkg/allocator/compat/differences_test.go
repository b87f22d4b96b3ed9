// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// Where upstream answers and ours does otherwise there is a case here, with both answers.

// given lists the devices that the allocator gives each node, in the order of nodes, asked in the order given; "" where it
// refuses.
func (w *world) given(t *testing.T, a structured.Allocator, order ...int) []string {
	t.Helper()
	names := make([]string, len(w.nodes))
	for _, i := range order {
		allocations, err := within(upstreamLimit, a, w.nodes[i], w.claims)
		if err != nil {
			t.Fatalf("%s: %v", w.nodes[i].Name, err)
		}
		names[i] = strings.Join(devicesOf(allocations), " ")
	}
	return names
}

// TestAShareOfADeviceThatIsNotSharedAnyMore has a device that was shared when a share of it was given, and is not now. Upstream
// gives it to a request that leaves enough of its capacity for the share. The API says that such a device is for one claim
// alone, so ours does not.
func TestAShareOfADeviceThatIsNotSharedAnyMore(t *testing.T) {
	memory := func(amount string) map[resourceapi.QualifiedName]resource.Quantity {
		return map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(amount)}
	}
	w := fuzzWorld(resourceapi.Device{Name: "whole", Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("4")}}})
	w.claims[0].Spec.Devices.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{Requests: memory("2")}
	w.held = []resourceapi.AllocationResult{{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
		Request: "r", Driver: driverA, Pool: "pool", Device: "whole", ShareID: ptr.To(types.UID("share")), ConsumedCapacity: memory("1"),
	}}}}}
	if !isShareOfWhole(w.slices, &w.held[0].Devices.Results[0]) {
		t.Error("the draws do not leave this out")
	}
	if diff := cmp.Diff([]string{"whole"}, w.given(t, w.upstream(t), 0)); diff != "" {
		t.Errorf("upstream (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{""}, w.given(t, w.ours(t), 0)); diff != "" {
		t.Errorf("ours (-want +got):\n%s", diff)
	}
}

// TestUpstreamDependsOnWhichNodeAsksFirst has pools that look different from two nodes. Upstream computes once what is left of a
// pool's counters, and which compatibility groups are in use, as they look to the node that asks first. Ours looks from each
// node. So that this does not count as a difference elsewhere, upstream gets a new allocator for each node there.
func TestUpstreamDependsOnWhichNodeAsksFirst(t *testing.T) {
	for name, tc := range map[string]struct {
		world *world
		// what the nodes get when they ask in order, and in the other order.
		upstream, upstreamReversed []string
		ours                       []string
	}{
		// No allocator makes such holders: a driver has to change groups that are in use. What may be used beside them depends on
		// which of the two counts first, which is that on the node.
		"holders whose groups contradict each other": {
			twoNodes(1, part{"held-0", "1", nil}, part{"free-0", "1", nil}, part{"held-1", "1", []string{"a"}}, part{"free-1", "1", []string{"a"}}),
			[]string{"free-0", ""},
			[]string{"", "free-1"},
			[]string{"free-0", "free-1"},
		},
		// Node 1 sees only what is outdated. Its holders do not hold the counters of the other generation: upstream would give what
		// is in use.
		"an outdated generation": {
			twoNodes(2, part{"held-0", "2", nil}, part{"free-0", "4", nil}, part{"free-1", "4", nil}),
			[]string{"", ""},
			[]string{"free-0", "free-1"},
			[]string{"", "free-1"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := tc.world
			if diff := cmp.Diff(tc.upstream, w.given(t, w.upstream(t), 0, 1)); diff != "" {
				t.Errorf("upstream (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.upstreamReversed, w.given(t, w.upstream(t), 1, 0)); diff != "" {
				t.Errorf("upstream, node 1 first (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.ours, w.given(t, w.ours(t), 0, 1)); diff != "" {
				t.Errorf("ours (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.ours, w.given(t, w.ours(t), 1, 0)); diff != "" {
				t.Errorf("ours, node 1 first (-want +got):\n%s", diff)
			}
			for i, node := range w.nodes {
				if diff := cmp.Diff(tc.ours[i], w.given(t, w.upstream(t), i)[i]); diff != "" {
					t.Errorf("upstream, a new allocator for %s (-want +got):\n%s", node.Name, diff)
				}
			}
		})
	}
}

// part is a device that takes so many slots of four. Its name begins with the use, and ends with the node.
type part struct {
	name, slots string
	groups      []string
}

// twoNodes has a slice for each node, with counters of its own if the first node's pool is of a later generation.
func twoNodes(generation int64, parts ...part) *world {
	w := fuzzWorld()
	w.features.CompatibilityGroups = true
	w.nodes, w.slices = nil, nil
	add := func(name string, generation int64) *resourceapi.ResourceSliceSpec {
		slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name}}
		slice.Spec.Driver, slice.Spec.Pool = driverA, resourceapi.ResourcePool{Name: "pool", Generation: generation}
		w.slices = append(w.slices, slice)
		return &slice.Spec
	}
	sets := []resourceapi.CounterSet{{Name: "set", Counters: map[string]resourceapi.Counter{"slots": {Value: resource.MustParse("4")}}}}
	for i, generation := range []int64{generation, 1} {
		name := fmt.Sprintf("node-%d", i)
		w.nodes = append(w.nodes, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}})
		slice := add("devices-"+name, generation)
		slice.NodeName = &name
		for _, part := range parts {
			if !strings.HasSuffix(part.name, fmt.Sprint(i)) {
				continue
			}
			slice.Devices = append(slice.Devices, resourceapi.Device{Name: part.name, ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
				CounterSet: "set", Counters: map[string]resourceapi.Counter{"slots": {Value: resource.MustParse(part.slots)}}, CompatibilityGroups: part.groups,
			}}})
			if strings.HasPrefix(part.name, "held") {
				w.held = append(w.held, resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
					Request: "r", Driver: driverA, Pool: "pool", Device: part.name,
				}}}})
			}
		}
		if generation == 2 || i == 1 {
			slice := add("counters-"+name, generation)
			slice.SharedCounters = sets
			if generation == 1 && w.slices[0].Spec.Pool.Generation == 1 {
				slice.AllNodes = ptr.To(true)
			} else {
				slice.NodeName = &name
			}
		}
	}
	for _, slice := range w.slices {
		for _, other := range w.slices {
			if other.Spec.Pool.Generation == slice.Spec.Pool.Generation {
				slice.Spec.Pool.ResourceSliceCount++
			}
		}
	}
	return w
}
