// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator_test

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// A claim for one GPU, on a node with two. The one that is held is left alone, and a claim for both does not fit.
func Example() {
	store := inventory.NewStore(inventory.Options{Features: inventory.DefaultFeatures()})
	store.SetClass(&resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}})
	store.SetSlice(&resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "node-1-gpus"},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: "gpu.example.com", NodeName: ptr.To("node-1"),
			Pool:    resourceapi.ResourcePool{Name: "node-1", Generation: 1, ResourceSliceCount: 1},
			Devices: []resourceapi.Device{{Name: "gpu-0"}, {Name: "gpu-1"}},
		},
	})
	held := usage.View{}.With(usage.ClaimRef{Namespace: "default", Name: "other", UID: "other"}, &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
			{Request: "gpu", Driver: "gpu.example.com", Pool: "node-1", Device: "gpu-0"},
		}},
	})

	for _, count := range []int64{1, 2} {
		claim := &resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "mine", UID: "mine"},
			Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{Requests: []resourceapi.DeviceRequest{{
				Name: "gpu",
				Exactly: &resourceapi.ExactDeviceRequest{
					DeviceClassName: "gpu", AllocationMode: resourceapi.DeviceAllocationModeExactCount, Count: count,
				},
			}}}},
		}
		requests, err := allocator.Compile([]*resourceapi.ResourceClaim{claim}, store.View(), allocator.DefaultFeatures())
		if err != nil {
			fmt.Println(err)
			return
		}
		result := allocator.Allocate(context.Background(), allocator.Input{
			Requests: requests, Node: &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}, Inventory: store.View(), Usage: held,
		})
		fmt.Printf("%d: fits %v", count, result.Fits())
		for _, allocation := range result.Allocations {
			for _, device := range allocation.Devices.Results {
				fmt.Print(", ", device.Device)
			}
		}
		fmt.Println()
	}
	// Output:
	// 1: fits true, gpu-1
	// 2: fits false
}
