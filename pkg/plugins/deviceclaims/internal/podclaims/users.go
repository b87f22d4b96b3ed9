// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podclaims

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// RemoveUser takes a pod or a group out of those that the claim is reserved for.
func RemoveUser(claim *resourceapi.ResourceClaim, user types.UID) {
	claim.Status.ReservedFor = slices.DeleteFunc(claim.Status.ReservedFor, func(ref resourceapi.ResourceClaimConsumerReference) bool {
		return ref.UID == user
	})
}

// IsReservedFor tells whether the claim is reserved for a pod or a group.
func IsReservedFor(claim *resourceapi.ResourceClaim, user types.UID) bool {
	return slices.ContainsFunc(claim.Status.ReservedFor, func(ref resourceapi.ResourceClaimConsumerReference) bool { return ref.UID == user })
}

// UsedOnlyBy tells whether the claim is reserved for nobody else.
func UsedOnlyBy(claim *resourceapi.ResourceClaim, users ...types.UID) bool {
	return !slices.ContainsFunc(claim.Status.ReservedFor, func(ref resourceapi.ResourceClaimConsumerReference) bool {
		return !slices.Contains(users, ref.UID)
	})
}

// SameAllocation compares without the time of the allocation, which the writer adds.
func SameAllocation(a, b *resourceapi.AllocationResult) bool {
	return amount.Semantic.DeepEqual(a.Devices, b.Devices) && apiequality.Semantic.DeepEqual(a.NodeSelector, b.NodeSelector)
}
