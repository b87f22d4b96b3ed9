// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

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

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// adoptedPrefix begins the annotations that say which process uses a reservation that another one made. The name is that of
// the user's UID. The value has the name of the process, see newFieldManager, and since when it has been binding the user.
const adoptedPrefix = "adopted.stowage.dev/"

// AdoptionRenewal is how old a note may be for another attempt of the same process to rely on it.
const AdoptionRenewal = time.Minute

// AdoptionKey is the name of the annotation about the user's reservation.
func AdoptionKey(user types.UID) string { return adoptedPrefix + string(user) }

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
func (b *Binder) adopt(ctx context.Context, w *Write, claim *resourceapi.ResourceClaim) error {
	now := b.Clock.Now()
	known := AdoptionOf(claim, w.User.UID)
	if w.User.Resource == "pods" && known.By == b.FieldManager && now.Sub(known.At).Abs() < AdoptionRenewal && !b.Doubts.about(claim) {
		w.Written = claim
		return nil
	}
	if now.Equal(known.At) {
		now = known.At.Add(1) // only a write that changes something moves the version
	}
	forgetAdoptions(claim)
	metav1.SetMetaDataAnnotation(&claim.ObjectMeta, AdoptionKey(w.User.UID), Adoption{b.FieldManager, now}.String())
	updated, err := b.Client.ResourceV1().ResourceClaims(claim.Namespace).
		Update(ctx, claim, metav1.UpdateOptions{FieldManager: b.FieldManager})
	CountWrite(writeAdoption, err)
	if err != nil {
		return fmt.Errorf("take over the reservation: %w", err)
	}
	w.Written = updated
	return nil
}

// Adoption is a note that a process uses a reservation.
type Adoption struct {
	By string
	At time.Time
}

func (a Adoption) String() string { return a.By + " " + a.At.UTC().Format(time.RFC3339Nano) }

// AdoptionOf returns the note about the user's reservation, empty if there is none. A note without a legible time is as old as can be.
func AdoptionOf(claim *resourceapi.ResourceClaim, user types.UID) Adoption {
	by, since, _ := strings.Cut(claim.Annotations[AdoptionKey(user)], " ")
	at, _ := time.Parse(time.RFC3339Nano, since) // zero with an error
	return Adoption{by, at}
}

// forgetAdoptions drops what was noted of reservations that are not there any more, and tells whether that was anything.
func forgetAdoptions(claim *resourceapi.ResourceClaim) bool {
	noted := len(claim.Annotations)
	maps.DeleteFunc(claim.Annotations, func(key, _ string) bool {
		user, is := strings.CutPrefix(key, adoptedPrefix)
		return is && !podclaims.IsReservedFor(claim, types.UID(user))
	})
	return len(claim.Annotations) < noted
}

// IsAdopted tells whether another process than the manager uses the reservation.
func IsAdopted(claim *resourceapi.ResourceClaim, user types.UID, manager string) bool {
	by := AdoptionOf(claim, user).By
	return by != "" && by != manager
}

// AdoptedUntil is until when another process may be binding one of the users with its reservation, zero if none is. It is the longest
// binding after the note: a process that has ended does not take its notes back.
func (b *Binder) AdoptedUntil(claim *resourceapi.ResourceClaim, users ...types.UID) time.Time {
	var until time.Time
	lasts := AdoptionRenewal + b.Timeout
	for _, user := range users {
		a := AdoptionOf(claim, user)
		// the clock may be another one
		if !IsAdopted(claim, user, b.FieldManager) || !podclaims.IsReservedFor(claim, user) || b.Clock.Since(a.At).Abs() >= lasts {
			continue
		}
		if end := a.At.Add(lasts); end.After(until) {
			until = end
		}
	}
	return until
}

// AdoptedError says that another process may be binding the pod with the claim.
type AdoptedError struct{ claim klog.ObjectRef }

func (e *AdoptedError) Error() string {
	return fmt.Sprintf("claim %s is in use by another scheduler, which may be binding the pod with it", e.claim)
}

// CheckNotAdopted fails with an AdoptedError if another process may be binding one of the users with the claim.
func (b *Binder) CheckNotAdopted(claim *resourceapi.ResourceClaim, users ...types.UID) error {
	if !b.AdoptedUntil(claim, users...).IsZero() {
		return &AdoptedError{klog.KObj(claim)}
	}
	return nil
}

// IsUsedLastBy tells whether the manager is the last process to have used the reservation: it has taken it over, or made it and nobody has
// taken it over since.
func IsUsedLastBy(claim *resourceapi.ResourceClaim, user types.UID, manager string) bool {
	if by := AdoptionOf(claim, user).By; by != "" {
		return by == manager
	}
	return ownedStatus(claim, manager)["f:reservedFor"].has(reservationKey(user))
}
