// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package decisions writes the log's line about each decision on a claim's devices.
package decisions

import (
	"cmp"
	"context"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// What the scheduler decides about devices is in its log at the default verbosity: one line for each claim, with the claim, its devices,
// the node and why. What others decide, such as kube-controller-manager, is not.
const (
	// Allocated: devices were chosen for a claim.
	Allocated = "Allocated devices"
	// Shared: a pod uses what a claim had already.
	Shared = "Reserved an allocated claim"
	// GivenBack: what was allocated for a pod was taken back, or did not come.
	GivenBack = "Gave devices back"
	// Left: the pod does not use the claim, and the claim keeps its devices.
	Left = "Gave a reservation back"
	// Kept: what would have been taken back was not.
	Kept = "Kept devices"
	// Evicted: a pod is gone that was evicted for others.
	Evicted = "Evicted pod is gone"
)

// Log writes the line about one claim. Without a node it is that of the allocation.
func Log(
	ctx context.Context, line string, pod *v1.Pod, node string,
	claim *resourceapi.ResourceClaim, allocation *resourceapi.AllocationResult, why string,
) {
	if node == "" && allocation != nil && allocation.NodeSelector != nil {
		node = strings.Join(sets.List(podclaims.NodesByName(allocation.NodeSelector)), ",")
	}
	name := klog.KRef(claim.Namespace, cmp.Or(claim.Name, claim.GenerateName)) // one for extended resources is made later
	klog.FromContext(ctx).Info(line, "claim", name, "pod", klog.KObj(pod), "node", node, "devices", DeviceNames(allocation), "why", why)
}

// DeviceNames are the allocated devices as the log has them, driver/pool/device.
func DeviceNames(allocation *resourceapi.AllocationResult) []string {
	if allocation == nil {
		return []string{} // logs show it as a list, too
	}
	names := make([]string, len(allocation.Devices.Results))
	for i, result := range allocation.Devices.Results {
		names[i] = result.Driver + "/" + result.Pool + "/" + result.Device
	}
	return names
}
