// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/structured"

	"stowage.dev/stowage/pkg/usage"
)

// usageOf turns upstream's three sets into holders. Upstream knows neither the claims nor what each share takes, so
// one claim holds everything: devices for itself alone, shares by their IDs, and the sum of what all shares of a
// device take as one more share of it.
func usageOf(allocated structured.AllocatedState) usage.View {
	results := make([]resourceapi.DeviceRequestAllocationResult, 0,
		len(allocated.AllocatedDevices)+len(allocated.AllocatedSharedDeviceIDs)+len(allocated.AggregatedCapacity))
	hold := func(id structured.DeviceID, share *types.UID, capacity map[resourceapi.QualifiedName]resource.Quantity) {
		results = append(results, resourceapi.DeviceRequestAllocationResult{
			Driver: id.Driver.String(), Pool: id.Pool.String(), Device: id.Device.String(), ShareID: share, ConsumedCapacity: capacity,
		})
	}
	for id := range allocated.AllocatedDevices {
		hold(id, nil, nil)
	}
	for id := range allocated.AllocatedSharedDeviceIDs {
		share := types.UID(id.ShareID.String())
		hold(id.GetDeviceID(), &share, nil)
	}
	for id, consumed := range allocated.AggregatedCapacity {
		share := types.UID("all shares")
		capacity := make(map[resourceapi.QualifiedName]resource.Quantity, len(consumed))
		for name, quantity := range consumed {
			capacity[name] = quantity.DeepCopy()
		}
		hold(id, &share, capacity)
	}
	index := usage.NewIndex()
	index.Set(usage.ClaimRef{UID: "allocated"}, &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: results},
	}, nil)
	return index.View()
}
