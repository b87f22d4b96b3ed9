// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat

import (
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
		OptionalNodeOperations:  f.OptionalNodeOperations,
		DerivedAttributes:       f.DerivedAttributes,
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
