package deviceclaims

import (
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Reasons of events about pods. Events of one pod, claim, type and reason are counted as one, and show the text of the first of them: so
// what differs in more than numbers has a reason of its own.
const (
	// reasonLostRace: another scheduler, or another pod, was faster. The pod is tried again.
	reasonLostRace = "LostRaceForDevices"
	// reasonClaimChanged: the claim is not what the pod was scheduled with. The pod is tried again.
	reasonClaimChanged = "ClaimChanged"
	// reasonClaimBusy: the claim is being allocated for another pod.
	reasonClaimBusy = "ClaimBeingAllocated"
	// reasonClaimFull: as many pods use the claim as the API allows.
	reasonClaimFull = "ClaimFull"
	// reasonFenceTimeout: it cannot be told whether another scheduler was faster.
	reasonFenceTimeout = "FenceTimeout"
	// reasonDeallocation: the claims of pods that were evicted for the pod are about to be deallocated.
	reasonDeallocation = "WaitingForDeallocation"
	// reasonNotReady: devices that have to be made ready before a pod is bound are not.
	reasonNotReady = "DevicesNotReady"
)

// postponedError says that a pod cannot have its devices now, and will be tried again when it can. The scheduler works as it should, so
// there is one event, of the given type and reason, and no error in the log.
type postponedError struct {
	eventType, reason string
	claim             types.NamespacedName // that it is about; empty if there are several
	err               error
}

func (e *postponedError) Error() string { return e.err.Error() }

func (e *postponedError) Unwrap() error { return e.err }

// postpone is about one claim.
func postpone(reason string, claim *resourceapi.ResourceClaim, err error) error {
	return &postponedError{v1.EventTypeNormal, reason, types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}, err}
}
