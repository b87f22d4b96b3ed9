// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compiled

// Features are the optional parts of the API, named after the Kubernetes feature gates without their "DRA"
// prefix. What a disabled feature means is what it means for upstream's allocator. The features that change
// which slices count are options of the inventory.
type Features struct {
	// AdminAccess permits requests with adminAccess; without it they are refused.
	AdminAccess bool
	// PrioritizedList permits firstAvailable; without it such requests are refused.
	PrioritizedList bool
	// DeviceTaints makes NoSchedule and NoExecute taints count; without it taints are ignored.
	DeviceTaints bool
	// DeviceBindingConditions permits devices with binding conditions; without it they are never chosen.
	DeviceBindingConditions bool
}

// DefaultFeatures are those on by default in Kubernetes 1.37.
func DefaultFeatures() Features {
	return Features{AdminAccess: true, PrioritizedList: true, DeviceTaints: true, DeviceBindingConditions: true}
}
