// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/pkg/usage"
)

// Holding is what is known of one claim, in both layers at one moment.
type Holding struct {
	// Claim is the newest known object, nil if there is none.
	Claim *resourceapi.ResourceClaim
	// InFlight is the allocation that the claim has in flight, nil without one, and Owners the pods with an
	// interest in it, ordered.
	InFlight *resourceapi.AllocationResult
	Owners   []types.UID
	// Group is the pod group that the claim in flight is going to be reserved for, empty if that is its owners.
	Group types.UID
}

// Holding returns what is known of the claim that ref names; of another claim of the same name it returns nothing.
func (t *Tracker) Holding(ref usage.ClaimRef) Holding {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	h := Holding{Claim: t.claims.byUID[ref.UID]}
	if pending := t.inFlight[ref.UID]; pending != nil {
		h.InFlight, h.Group = pending.allocation, pending.group
		h.Owners = sets.List(pending.owners)
	}
	return h
}

// InFlightFor returns the claims with an allocation in flight in which the pod has an interest, in no particular
// order. The cost grows with the number of allocations in flight.
func (t *Tracker) InFlightFor(owner types.UID) []usage.ClaimRef {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	var claims []usage.ClaimRef
	for _, pending := range t.inFlight {
		if pending.owners.Has(owner) {
			claims = append(claims, pending.claim)
		}
	}
	return claims
}
