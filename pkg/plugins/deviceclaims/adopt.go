package deviceclaims

import (
	"context"
	"fmt"
	"maps"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
)

// adoptedPrefix begins the annotations that say which process uses a reservation that another one made. The name is that of
// the user's UID. The value has the name of the process, see newFieldManager, and since when it has been binding the user.
const adoptedPrefix = "adopted.stowage.dev/"

// adoptionRenewal is how old a note may be for another attempt of the same process to rely on it.
const adoptionRenewal = time.Minute

func adoptedKey(user types.UID) string { return adoptedPrefix + string(user) }

// adopt says in the claim that this process uses the reservation that it has found there, before it binds the pod with it.
//
// Whoever made the reservation may still be at work: a leader that was frozen and goes on although there is another one. When it
// undoes what it wrote, the claim has another resource version, so that it looks again, and the annotation tells it to leave the
// reservation alone. Was it faster, this write fails, and the pod is not bound.
//
// Usually that process has ended, and this is one write more for a pod that was being bound when it did.
//
// The reservation of a group is taken over by each of its pods, also within one process, and each time the claim's version moves: whoever
// finds that none of them uses it any more, and takes it back, meets a conflict if one has come meanwhile.
func (b *binder) adopt(ctx context.Context, w *claimWrite, claim *resourceapi.ResourceClaim) error {
	now := b.clock.Now()
	known := adoptionOf(claim, w.user.UID)
	if w.user.Resource == "pods" && known.by == b.fieldManager && now.Sub(known.at).Abs() < adoptionRenewal && !b.doubts.about(claim) {
		w.written = claim
		return nil
	}
	if now.Equal(known.at) {
		now = known.at.Add(1) // only a write that changes something moves the version
	}
	forgetAdoptions(claim)
	metav1.SetMetaDataAnnotation(&claim.ObjectMeta, adoptedKey(w.user.UID), adoption{b.fieldManager, now}.String())
	updated, err := b.client.ResourceV1().ResourceClaims(claim.Namespace).Update(ctx, claim, metav1.UpdateOptions{FieldManager: b.fieldManager})
	countWrite(writeAdoption, err)
	if err != nil {
		return fmt.Errorf("take over the reservation: %w", err)
	}
	w.written = updated
	return nil
}

// adoption is a note that a process uses a reservation.
type adoption struct {
	by string
	at time.Time
}

func (a adoption) String() string { return a.by + " " + a.at.UTC().Format(time.RFC3339Nano) }

// adoptionOf returns the note about the user's reservation, empty if there is none. A note without a legible time is as old as can be.
func adoptionOf(claim *resourceapi.ResourceClaim, user types.UID) adoption {
	by, since, _ := strings.Cut(claim.Annotations[adoptedKey(user)], " ")
	at, err := time.Parse(time.RFC3339Nano, since)
	if err != nil {
		at = time.Time{}
	}
	return adoption{by, at}
}

// forgetAdoptions drops what was noted of reservations that are not there any more, and tells whether that was anything.
func forgetAdoptions(claim *resourceapi.ResourceClaim) bool {
	noted := len(claim.Annotations)
	maps.DeleteFunc(claim.Annotations, func(key, _ string) bool {
		user, is := strings.CutPrefix(key, adoptedPrefix)
		return is && !isReservedFor(claim, types.UID(user))
	})
	return len(claim.Annotations) < noted
}

// isAdopted tells whether another process than the manager uses the reservation.
func isAdopted(claim *resourceapi.ResourceClaim, user types.UID, manager string) bool {
	by := adoptionOf(claim, user).by
	return by != "" && by != manager
}

// adoptedUntil is until when another process may be binding one of the users with its reservation, zero if none is. It is the longest
// binding after the note: a process that has ended does not take its notes back.
func (b *binder) adoptedUntil(claim *resourceapi.ResourceClaim, users ...types.UID) time.Time {
	var until time.Time
	lasts := adoptionRenewal + b.timeout
	for _, user := range users {
		a := adoptionOf(claim, user)
		if !isAdopted(claim, user, b.fieldManager) || !isReservedFor(claim, user) || b.clock.Since(a.at).Abs() >= lasts { // the clock may be another one
			continue
		}
		if end := a.at.Add(lasts); end.After(until) {
			until = end
		}
	}
	return until
}

// adoptedError says that another process may be binding the pod with the claim.
type adoptedError struct{ claim klog.ObjectRef }

func (e *adoptedError) Error() string {
	return fmt.Sprintf("claim %s is in use by another scheduler, which may be binding the pod with it", e.claim)
}

// checkNotAdopted fails with an adoptedError if another process may be binding one of the users with the claim.
func (b *binder) checkNotAdopted(claim *resourceapi.ResourceClaim, users ...types.UID) error {
	if !b.adoptedUntil(claim, users...).IsZero() {
		return &adoptedError{klog.KObj(claim)}
	}
	return nil
}

// isUsedLastBy tells whether the manager is the last process to have used the reservation: it has taken it over, or made it and nobody has
// taken it over since.
func isUsedLastBy(claim *resourceapi.ResourceClaim, user types.UID, manager string) bool {
	if by := adoptionOf(claim, user).by; by != "" {
		return by == manager
	}
	return ownedStatus(claim, manager).child("f:reservedFor").has(reservationKey(user))
}
