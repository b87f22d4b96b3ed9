// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker_test

import (
	"errors"
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// Two pods are decided on the same snapshot, and want the same GPU. The first has it; the second is told that its snapshot is outdated.
func ExampleTracker_Reserve() {
	t := tracker.New(klog.Background())
	claim := func(name string) *resourceapi.ResourceClaim {
		c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name), ResourceVersion: "1"}}
		if err := t.Store().Add(c); err != nil { // what the watch does
			fmt.Println(err)
		}
		return c
	}
	gpu := &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
		{Request: "gpu", Driver: "gpu.example.com", Pool: "node-1", Device: "gpu-0"},
	}}}
	first, second := claim("first"), claim("second")

	decidedOn := t.Snapshot().Usage
	err := t.Reserve(decidedOn, "pod-1", []tracker.Reservation{{Claim: first, Allocation: gpu}})
	fmt.Println("first:", err)
	err = t.Reserve(decidedOn, "pod-2", []tracker.Reservation{{Claim: second, Allocation: gpu}})
	fmt.Println("second is outdated:", errors.Is(err, tracker.ErrStale))

	id := usage.DeviceID{Driver: "gpu.example.com", Pool: "node-1", Device: "gpu-0"}
	fmt.Println("holders now:", t.Snapshot().Usage.Device(id).Count())
	t.Release("first", "pod-1") // the pod was not bound
	fmt.Println("held after that:", t.Snapshot().Usage.Device(id) != nil)
	// Output:
	// first: <nil>
	// second is outdated: true
	// holders now: 1
	// held after that: false
}
