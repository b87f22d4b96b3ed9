// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

const driver = "d.example.com"

// inventory has a whole GPU, one with two halves and a whole that share its
// memory, and one of 40Gi that is shared.
func inventory() *Inventory {
	part := func(name, memory string) resourceapi.Device {
		return resourceapi.Device{Name: name, ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
			CounterSet: "mig", Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse(memory)}},
		}}}
	}
	pool := resourceapi.ResourcePool{Name: "p", Generation: 1, ResourceSliceCount: 2}
	return NewInventory([]*resourceapi.ResourceSlice{
		{Spec: resourceapi.ResourceSliceSpec{Driver: driver, Pool: pool, Devices: []resourceapi.Device{
			{Name: "gpu"},
			part("whole", "80Gi"), part("half-0", "40Gi"), part("half-1", "40Gi"),
			{
				Name: "shared", AllowMultipleAllocations: ptr.To(true),
				Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("40Gi")}},
			},
		}}},
		{Spec: resourceapi.ResourceSliceSpec{Driver: driver, Pool: pool, SharedCounters: []resourceapi.CounterSet{{
			Name: "mig", Counters: map[string]resourceapi.Counter{"memory": {Value: resource.MustParse("80Gi")}},
		}}}},
	})
}

func result(device string) resourceapi.DeviceRequestAllocationResult {
	return resourceapi.DeviceRequestAllocationResult{Request: "r", Driver: driver, Pool: "p", Device: device}
}

func share(id, memory string) resourceapi.DeviceRequestAllocationResult {
	r := result("shared")
	r.ShareID = ptr.To(types.UID(id))
	r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)}
	return r
}

func admin(device string) resourceapi.DeviceRequestAllocationResult {
	r := result(device)
	r.AdminAccess = ptr.To(true)
	return r
}

func holder(name string, results ...resourceapi.DeviceRequestAllocationResult) Holder {
	return Holder{Name: name, Results: results}
}

func TestOveruse(t *testing.T) {
	tests := map[string]struct {
		holders []Holder
		want    []Overuse
	}{
		"nobody uses anything": {},
		"each has its own": {
			holders: []Holder{holder("a", result("gpu"), result("half-0")), holder("b", result("half-1"))},
		},
		"two have one device": {
			holders: []Holder{holder("b", result("gpu")), holder("a", result("gpu"))},
			want:    []Overuse{{"d.example.com/p/gpu", []string{"a", "b"}}},
		},
		"one has one device twice": {
			holders: []Holder{holder("a", result("gpu"), result("gpu"))},
			want:    []Overuse{{"d.example.com/p/gpu", []string{"a"}}},
		},
		"admin access does not count": {
			holders: []Holder{holder("a", result("gpu")), holder("b", admin("gpu"))},
		},
		"a partition beside the whole": {
			holders: []Holder{holder("a", result("whole")), holder("b", result("half-1"))},
			want:    []Overuse{{"d.example.com/p/mig, counter memory: 120Gi of 80Gi", []string{"a", "b"}}},
		},
		"shares that fit": {
			holders: []Holder{holder("a", share("1", "10Gi"), share("2", "10Gi")), holder("b", share("3", "20Gi"))},
		},
		"shares that do not fit": {
			holders: []Holder{holder("a", share("1", "10Gi")), holder("b", share("2", "20Gi")), holder("c", share("3", "11Gi"))},
			want:    []Overuse{{"d.example.com/p/shared, capacity memory: 41Gi of 40Gi", []string{"a", "b", "c"}}},
		},
		"the whole of a device beside a share of it": {
			holders: []Holder{holder("a", share("1", "10Gi")), holder("b", result("shared"))},
			want:    []Overuse{{"d.example.com/p/shared", []string{"a", "b"}}},
		},
		"a share of a device that cannot be shared": {
			holders: []Holder{holder("a", result("gpu")), holder("b", func() resourceapi.DeviceRequestAllocationResult {
				r := result("gpu")
				r.ShareID = ptr.To(types.UID("1"))
				return r
			}())},
			want: []Overuse{{"d.example.com/p/gpu", []string{"a", "b"}}},
		},
		"a device that nobody has": {
			holders: []Holder{holder("a", result("none"))},
			want:    []Overuse{{"d.example.com/p/none (not in any slice)", []string{"a"}}},
		},
		"the same device of another pool": {
			holders: []Holder{holder("a", result("gpu")), holder("b", func() resourceapi.DeviceRequestAllocationResult {
				r := result("gpu")
				r.Pool = "q"
				return r
			}())},
			want: []Overuse{{"d.example.com/q/gpu (not in any slice)", []string{"b"}}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, inventory().Overuse(test.holders)); diff != "" {
				t.Errorf("over-use (-want +got):\n%s", diff)
			}
		})
	}
}
