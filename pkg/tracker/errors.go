// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"errors"
	"fmt"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/usage"
)

// ErrStale says that a decision was made on usage that has changed since. Take
// another snapshot, decide again for the same node, and try again.
var ErrStale = errors.New("usage has changed since the decision")

// StaleError is an ErrStale that names the pool that changed.
type StaleError struct {
	Pool usage.PoolID
}

func (e *StaleError) Error() string {
	return fmt.Sprintf("pool %s: %v", e.Pool, ErrStale)
}

// Is makes a StaleError an ErrStale.
func (e *StaleError) Is(target error) bool { return target == ErrStale }

// Reasons of a ClaimError. None of them goes away by deciding again: the pod's
// claims have to be looked at anew.
var (
	// ErrClaimGone: no claim of that name exists any more.
	ErrClaimGone = errors.New("claim does not exist any more")
	// ErrClaimRecreated: the name belongs to a claim with another UID now.
	ErrClaimRecreated = errors.New("claim was deleted and created again")
	// ErrClaimDeleting: the claim has a deletion timestamp.
	ErrClaimDeleting = errors.New("claim is being deleted")
	// ErrClaimAllocated: the claim has an allocation.
	ErrClaimAllocated = errors.New("claim is allocated already")
	// ErrClaimInFlight: an allocation of the claim has been decided and not been
	// written yet. See Tracker.Share.
	ErrClaimInFlight = errors.New("claim has an allocation in flight already")
	// ErrClaimVersion: the resource version cannot be compared with others.
	ErrClaimVersion = errors.New("resource version is not a positive decimal number")
)

// ClaimError says why a claim could not be reserved or assumed. errors.Is finds
// the reason.
type ClaimError struct {
	Claim  usage.ClaimRef
	Reason error
	// Found is what was found instead: another UID for ErrClaimRecreated, the
	// resource version for ErrClaimVersion. Else empty.
	Found string
}

func (e *ClaimError) Error() string {
	if e.Found != "" {
		return fmt.Sprintf("claim %s (UID %s): %v: found %q", e.Claim, e.Claim.UID, e.Reason, e.Found)
	}
	return fmt.Sprintf("claim %s (UID %s): %v", e.Claim, e.Claim.UID, e.Reason)
}

func (e *ClaimError) Unwrap() error { return e.Reason }

// HeldError says that an allocation takes a device that somebody holds, on usage
// that has not changed since the decision. That is a mistake in the decision,
// and the last wall before a device is handed out twice.
type HeldError struct {
	Claim  usage.ClaimRef
	Device usage.DeviceID
	Holder usage.ClaimRef
}

func (e *HeldError) Error() string {
	return fmt.Sprintf("claim %s (UID %s): device %s is held by claim %s (UID %s)", e.Claim, e.Claim.UID, e.Device, e.Holder, e.Holder.UID)
}

// claimError returns a ClaimError as an error.
func claimError(claim usage.ClaimRef, reason error) error {
	return &ClaimError{Claim: claim, Reason: reason}
}

// recreatedError returns a ClaimError for a name that belongs to another UID.
func recreatedError(claim usage.ClaimRef, found types.UID) error {
	return &ClaimError{Claim: claim, Reason: ErrClaimRecreated, Found: string(found)}
}
