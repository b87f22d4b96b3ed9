package compat

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/structured"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
)

func inventoryFeatures(f structured.Features) inventory.Features {
	return inventory.Features{
		PartitionableDevices:    f.PartitionableDevices,
		ConsumableCapacity:      f.ConsumableCapacity,
		FractionalCapacityRange: f.FractionalCapacityRange,
		ListTypeAttributes:      f.ListTypeAttributes,
		CompatibilityGroups:     f.CompatibilityGroups,
		// Upstream's callers do that, not its allocator.
		NodeAllocatableResources: true,
	}
}

func allocatorFeatures(f structured.Features) allocator.Features {
	return allocator.Features{
		AdminAccess:             f.AdminAccess,
		PrioritizedList:         f.PrioritizedList,
		DeviceTaints:            f.DeviceTaints,
		DeviceBindingConditions: f.DeviceBindingAndStatus,
	}
}

// delegatedSlice tells whether the slice uses an alpha feature that only upstream's library has: attributes that
// are lists, compatibility groups, or node operations that are left out.
func delegatedSlice(slice *resourceapi.ResourceSlice, f structured.Features) bool {
	if len(slice.Spec.SkipNodeOperations) > 0 {
		return true
	}
	for i := range slice.Spec.Devices {
		device := &slice.Spec.Devices[i]
		if f.CompatibilityGroups {
			for j := range device.ConsumesCounters {
				if len(device.ConsumesCounters[j].CompatibilityGroups) > 0 {
					return true
				}
			}
		}
		if f.ListTypeAttributes {
			for _, attribute := range device.Attributes {
				if len(attribute.IntValues)+len(attribute.BoolValues)+len(attribute.StringValues)+len(attribute.VersionValues) > 0 {
					return true
				}
			}
		}
	}
	return false
}

// delegatedClaims tells whether a claim uses derived attributes, which only upstream's library has.
func delegatedClaims(claims []*resourceapi.ResourceClaim, f structured.Features) bool {
	if !f.DerivedAttributes {
		return false
	}
	for _, claim := range claims {
		for request := range requestsOf(claim) {
			if len(request.derived) > 0 {
				return true
			}
		}
	}
	return false
}
