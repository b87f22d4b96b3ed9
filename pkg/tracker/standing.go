// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/usage"
)

// standing is what the list and the watch have said about the allocation of one
// claim. Answers to our own writes never change it: only what comes in the order
// of the store tells who was first.
type standing struct {
	claim usage.ClaimRef
	// version is the resource version of the object that was observed last.
	version    string
	allocation *resourceapi.AllocationResult
	order      Order
	// verdict is final once it is Fits: the claims allocated earlier become
	// fewer, never more. The zero Verdict has not been asked for yet.
	verdict Verdict
}

// standings are the claims that have an allocation at the position that list and
// watch have reached, by UID.
type standings map[types.UID]*standing

// event applies a watch event that adds or changes a claim, when everything up to
// position has been observed. It returns the standing if the claim has just been
// allocated.
func (s standings) event(claim *resourceapi.ResourceClaim, position string) *standing {
	if !newer(claim.ResourceVersion, position) {
		return nil // brought again: what came after it is known
	}
	allocation := claim.Status.Allocation
	if allocation == nil {
		delete(s, claim.UID)
		return nil
	}
	if known := s[claim.UID]; known != nil && sameAllocation(known.allocation, allocation) {
		known.version = claim.ResourceVersion
		return nil
	}
	s[claim.UID] = &standing{
		claim: usage.RefOf(claim), version: claim.ResourceVersion, allocation: allocation,
		order: exactly(claim.ResourceVersion),
	}
	return s[claim.UID]
}

// list returns the standings after a list, when everything up to position had
// been observed before. An allocation that is new in it was written after
// position. One that is there as before may still have been taken back and
// written again meanwhile, unless the object is the very same.
//
// If the list is from before position, the API server has lost what we know, and
// nothing can be said about any order.
func (s standings) list(claims []*resourceapi.ResourceClaim, position, version string) standings {
	wentBack := newer(position, version) // or this is the first list, which comes to the same
	next := make(standings, len(s))
	for _, claim := range claims {
		allocation := claim.Status.Allocation
		if allocation == nil {
			continue
		}
		known := s[claim.UID]
		if known != nil && known.version == claim.ResourceVersion && !wentBack {
			next[claim.UID] = known
			continue
		}
		order := Order{NotBefore: position, NotAfter: claim.ResourceVersion}
		switch {
		case wentBack:
			order.NotBefore = ""
		case known != nil && sameAllocation(known.allocation, allocation):
			order.NotBefore = known.order.NotBefore
		}
		next[claim.UID] = &standing{claim: usage.RefOf(claim), version: claim.ResourceVersion, allocation: allocation, order: order}
	}
	return next
}

// holds tells whether a hold on a device is part of the observed allocation.
func (s *standing) holds(device usage.DeviceID, share *types.UID) bool {
	return slices.ContainsFunc(s.allocation.Devices.Results, func(result resourceapi.DeviceRequestAllocationResult) bool {
		return usage.DeviceOf(&result) == device && ptr.Equal(result.ShareID, share)
	})
}

// sameAllocation compares with the time of the allocation.
func sameAllocation(a, b *resourceapi.AllocationResult) bool {
	return amount.Semantic.DeepEqual(a, b)
}
