// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/usage"
)

// inFlight is an entry of layer 2: an allocation that has been decided and is not
// known to be written.
type inFlight struct {
	claim      usage.ClaimRef
	allocation *resourceapi.AllocationResult
	// owners are the pods that have an interest in the allocation.
	owners sets.Set[types.UID]
	// group is the pod group that the claim is going to be reserved for, empty if that is its owners.
	group types.UID
}

// Reservation is an allocation to be put in flight.
type Reservation struct {
	// Claim is the claim as it was when the allocation was decided. Without a
	// resource version it is unborn: not in the API yet, with a UID of the caller's
	// making. Once it has been created, Move gives the allocation to it.
	Claim *resourceapi.ResourceClaim
	// Allocation is what was decided for it, never nil.
	Allocation *resourceapi.AllocationResult
	// Group is the pod group that the claim is going to be reserved for, empty
	// if that is the pod.
	Group types.UID
}

// Reserve puts allocations in flight for a pod, all of them or, with an error,
// none. From then on the devices are held. view is the usage on which the
// allocations were decided: of every pool that they touch it must still be the
// present one.
//
// The error is a *StaleError (ErrStale), a *ClaimError, or a *HeldError.
func (t *Tracker) Reserve(view usage.View, owner types.UID, reservations []Reservation) error {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	if err := t.checkReservations(view, reservations); err != nil {
		countConflict(err)
		return err
	}
	for _, r := range reservations {
		claim := usage.RefOf(r.Claim)
		t.inFlight[claim.UID] = &inFlight{claim: claim, allocation: r.Allocation, owners: sets.New(owner), group: r.Group}
		t.refold(claim)
		t.revision++
		t.logger.V(5).Info("Allocation in flight", "claim", klog.KRef(claim.Namespace, claim.Name), "claimUID", claim.UID, "pod", owner)
	}
	inFlightAllocations.Set(float64(len(t.inFlight)))
	return nil
}

// checkReservations says why reservations cannot be put in flight as things are.
func (t *Tracker) checkReservations(view usage.View, reservations []Reservation) error {
	for i, r := range reservations {
		if err := t.checkClaim(r.Claim); err != nil {
			return err
		}
		if slices.ContainsFunc(reservations[:i], func(other Reservation) bool { return other.Claim.UID == r.Claim.UID }) {
			return claimError(usage.RefOf(r.Claim), ErrClaimInFlight)
		}
	}

	present := t.index.View()
	taken := map[usage.DeviceID][]usage.Holder{} // by the reservations checked so far
	for _, r := range reservations {
		claim := usage.RefOf(r.Claim)
		for i := range r.Allocation.Devices.Results {
			result := &r.Allocation.Devices.Results[i]
			if ptr.Deref(result.AdminAccess, false) {
				continue
			}
			device := usage.DeviceOf(result)
			if pool := device.PoolID(); present.Pool(pool) != view.Pool(pool) {
				return &StaleError{Pool: pool}
			}
			for _, holders := range [][]usage.Holder{present.Device(device).Holders(), taken[device]} {
				for _, holder := range holders {
					if holder.ShareID == nil || result.ShareID == nil {
						return &HeldError{Claim: claim, Device: device, Holder: holder.Claim}
					}
				}
			}
			taken[device] = append(taken[device], usage.Holder{Claim: claim, ShareID: result.ShareID})
		}
	}
	return nil
}

// checkClaim says why a claim cannot get an allocation in flight.
func (t *Tracker) checkClaim(claim *resourceapi.ResourceClaim) error {
	ref := usage.RefOf(claim)
	known := t.claims.get(nameOf(claim))
	unborn := claim.ResourceVersion == ""
	switch {
	case unborn && t.inFlight[claim.UID] != nil:
		return claimError(ref, ErrClaimInFlight)
	case unborn:
		return nil
	case known == nil:
		return claimError(ref, ErrClaimGone)
	case known.UID != claim.UID:
		return recreatedError(ref, known.UID)
	case known.DeletionTimestamp != nil:
		return claimError(ref, ErrClaimDeleting)
	case known.Status.Allocation != nil:
		return claimError(ref, ErrClaimAllocated)
	case t.inFlight[claim.UID] != nil:
		return claimError(ref, ErrClaimInFlight)
	default:
		return nil
	}
}

// Move gives the allocation that an unborn claim has in flight to the claim that
// has been created in its place. Its devices are held by the one or the other in
// every snapshot. The error is a *ClaimError: the unborn claim has nothing in
// flight (ErrClaimGone), or the created one has (ErrClaimInFlight).
func (t *Tracker) Move(unborn types.UID, created *resourceapi.ResourceClaim) error {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	ref := usage.RefOf(created)
	pending := t.inFlight[unborn]
	switch {
	case pending == nil:
		return claimError(ref, ErrClaimGone)
	case t.inFlight[created.UID] != nil:
		return claimError(ref, ErrClaimInFlight)
	}
	before := pending.claim
	moved := *pending
	moved.claim = ref
	t.inFlight[created.UID] = &moved
	t.refold(ref)
	delete(t.inFlight, unborn)
	t.refold(before)
	t.changed(Event{Kind: AllocationMoved, Claim: before})
	return nil
}

// Pending returns the allocation that a claim has in flight, and the number of
// pods that share it; nil and 0 if there is none.
func (t *Tracker) Pending(claim types.UID) (allocation *resourceapi.AllocationResult, sharers int) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	pending := t.inFlight[claim]
	if pending == nil {
		return nil, 0
	}
	return pending.allocation, len(pending.owners)
}

// Share makes a pod one of the owners of an allocation in flight, which so stays
// until that pod releases it too, and returns the allocation. Without one, ok is
// false. Sharing twice is sharing once.
func (t *Tracker) Share(claim, owner types.UID) (allocation *resourceapi.AllocationResult, ok bool) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	pending := t.inFlight[claim]
	if pending == nil {
		return nil, false
	}
	pending.owners.Insert(owner)
	return pending.allocation, true
}

// Release ends a pod's interest in an allocation in flight: after its write has
// been assumed, or because the pod goes elsewhere. With the last owner the
// allocation leaves layer 2, and its devices are free unless layer 1 has them;
// last tells whether that happened. Releasing what is not owned does nothing.
//
// A pod whose write may or may not have taken effect must read the claim and
// Assume what it read before it releases.
func (t *Tracker) Release(claim, owner types.UID) (last bool) {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	pending := t.inFlight[claim]
	if pending == nil {
		return false
	}
	pending.owners.Delete(owner)
	if len(pending.owners) > 0 {
		return false
	}
	delete(t.inFlight, claim)
	inFlightAllocations.Set(float64(len(t.inFlight)))
	freed := t.refold(pending.claim)
	t.changed(Event{Kind: AllocationReleased, Claim: pending.claim, Freed: freed})
	t.logger.V(5).Info("Allocation no longer in flight", "claim", klog.KRef(pending.claim.Namespace, pending.claim.Name), "claimUID", claim,
		"pod", owner, "freed", len(freed))
	return true
}
