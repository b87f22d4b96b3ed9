// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package podevents is about what a pod is told by events: reasons, what they are about, and their texts. Why a
// pod is kept out of the queue is in podclaims.
package podevents

import (
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Reasons of events about pods. Events of one pod, claim, type and reason are counted as one, and show the text of the first of them: so
// what differs in more than numbers has a reason of its own.
const (
	// ReasonLostRace: another scheduler, or another pod, was faster. The pod is tried again.
	ReasonLostRace = "LostRaceForDevices"
	// ReasonClaimChanged: the claim is not what the pod was scheduled with. The pod is tried again.
	ReasonClaimChanged = "ClaimChanged"
	// ReasonClaimBusy: the claim is being allocated for another pod.
	ReasonClaimBusy = "ClaimBeingAllocated"
	// ReasonClaimFull: as many pods use the claim as the API allows.
	ReasonClaimFull = "ClaimFull"
	// ReasonFenceTimeout: it cannot be told whether another scheduler was faster.
	ReasonFenceTimeout = "FenceTimeout"
	// ReasonDeallocation: the claims of pods that were evicted for the pod are about to be deallocated.
	ReasonDeallocation = "WaitingForDeallocation"
	// ReasonNotReady: devices that have to be made ready before a pod is bound are not.
	ReasonNotReady = "DevicesNotReady"
)

// Postponed says that a pod cannot have its devices now, and will be tried again when it can. The scheduler works as it should, so
// there is one event, of the given type and reason, and no error in the log.
type Postponed struct {
	EventType, Reason string
	Claim             types.NamespacedName // that it is about; empty if there are several
	Err               error
}

func (e *Postponed) Error() string { return e.Err.Error() }

func (e *Postponed) Unwrap() error { return e.Err }

// Postpone returns a [Postponed] about one claim.
func Postpone(reason string, claim *resourceapi.ResourceClaim, err error) error {
	return &Postponed{v1.EventTypeNormal, reason, types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}, err}
}
