// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// Only devices that are not ready are to blame; if one says that it failed, that one.
func TestDevicesThatAreNotReady(t *testing.T) {
	conditions := func(c *resourceapi.ResourceClaim, device, condition string) {
		c.Status.Devices = append(c.Status.Devices, resourceapi.AllocatedDeviceStatus{
			Driver: driver, Pool: "node-b", Device: device, Conditions: []metav1.Condition{{Type: condition, Status: metav1.ConditionTrue}},
		})
	}
	for name, tc := range map[string]struct {
		reported map[string]string // condition by device
		want     []string
	}{
		"nothing is known":        {want: []string{"gpu-0", "gpu-1"}},
		"one is ready":            {reported: map[string]string{"gpu-0": "Attached"}, want: []string{"gpu-1"}},
		"one failed, one is late": {reported: map[string]string{"gpu-1": "Broken"}, want: []string{"gpu-1"}},
	} {
		t.Run(name, func(t *testing.T) {
			c := allocatedOn("node-b", "gpu-0", "gpu-1")
			for i := range c.Status.Allocation.Devices.Results {
				result := &c.Status.Allocation.Devices.Results[i]
				result.BindingConditions, result.BindingFailureConditions = []string{"Attached"}, []string{"Broken"}
			}
			for device, condition := range tc.reported {
				conditions(c, device, condition)
			}
			var got []string
			for _, id := range readinessOf(c, time.Minute).pending {
				got = append(got, id.Device)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}
}

// Two shares of one device are two results with a status each.
func TestEachShareOfADeviceHasAStatusOfItsOwn(t *testing.T) {
	share := func(id types.UID) resourceapi.DeviceRequestAllocationResult {
		return resourceapi.DeviceRequestAllocationResult{
			Driver: driver, Pool: "node-a", Device: "gpu-0", ShareID: &id,
			BindingConditions: []string{"Attached"}, BindingFailureConditions: []string{"Broken"},
		}
	}
	report := func(id, condition string) resourceapi.AllocatedDeviceStatus {
		return resourceapi.AllocatedDeviceStatus{Driver: driver, Pool: "node-a", Device: "gpu-0", ShareID: ptr.To(id), Conditions: []metav1.Condition{
			{Type: condition, Status: metav1.ConditionTrue, Reason: "Fabric", Message: "as it is"},
		}}
	}
	tests := map[string]struct {
		reports []resourceapi.AllocatedDeviceStatus
		ready   bool
		failed  string
		pending int
	}{
		"none is ready":       {pending: 1},
		"the first is ready":  {reports: []resourceapi.AllocatedDeviceStatus{report("one", "Attached")}, pending: 1},
		"the second is ready": {reports: []resourceapi.AllocatedDeviceStatus{report("two", "Attached")}, pending: 1},
		"both are ready":      {reports: []resourceapi.AllocatedDeviceStatus{report("one", "Attached"), report("two", "Attached")}, ready: true},
		"the second has failed": {
			reports: []resourceapi.AllocatedDeviceStatus{report("one", "Attached"), report("two", "Broken")}, pending: 1,
			failed: "device gpu.example.com/node-a/gpu-0: condition Broken: Fabric: as it is",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			c := allocatedOn("node-a")
			c.Status.Allocation.Devices.Results = []resourceapi.DeviceRequestAllocationResult{share("one"), share("two")}
			c.Status.Devices = tc.reports
			r := readinessOf(c, 0)
			if diff := cmp.Diff([]any{tc.ready && tc.failed == "", tc.failed, tc.pending}, []any{len(r.pending) == 0, r.failed, len(r.pending)}); diff != "" {
				t.Errorf("ready, failed, devices differ (-want +got):\n%s", diff)
			}
		})
	}
}

const driver = "gpu.example.com"

// allocatedOn returns a claim that has these devices of a node.
func allocatedOn(node string, devices ...string) *resourceapi.ResourceClaim {
	allocation := &resourceapi.AllocationResult{}
	for _, device := range devices {
		allocation.Devices.Results = append(allocation.Devices.Results, resourceapi.DeviceRequestAllocationResult{
			Request: "gpu", Driver: driver, Pool: node, Device: device,
		})
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: "c", UID: "c-uid"}, Status: resourceapi.ResourceClaimStatus{Allocation: allocation},
	}
}
