// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
)

// Write is what PreBind does to one claim.
type Write struct {
	// Planned is the claim as PreFilter saw it.
	Planned *resourceapi.ResourceClaim
	// Allocation is to be written, nil for a claim that is allocated already.
	Allocation *resourceapi.AllocationResult
	// User is whom it is to be reserved for.
	User resourceapi.ResourceClaimConsumerReference
	// Written is the claim as the API server has it with allocation and reservation, nil before that is known.
	Written *resourceapi.ResourceClaim
	// made is what of Written is our doing. Only that is ours to undo: a reservation that stood before may be the one of
	// another scheduler that handles the same pod.
	made made
	// Withdrawn tells that the claim has given way to another one since, at the fence.
	Withdrawn bool
	// joined tells that the claim had users before us, whose leaving should have freed its devices.
	joined bool
	// unanswered is what a write sent whose outcome is not known. The write can take effect as long as the claim
	// has this resource version, and never afterwards.
	unanswered *resourceapi.ResourceClaim
}

// MayStand tells whether something of the write is, or may be, in the claim.
func (w *Write) MayStand() bool { return w.made != made{} || w.unanswered != nil }

// HasReserved tells whether the claim's reservation for the user is this write's doing.
func (w *Write) HasReserved() bool { return w.made.reservation }

// Result is what the claim has allocated when the write is done.
func (w *Write) Result() *resourceapi.AllocationResult {
	return cmp.Or(w.Allocation, w.Planned.Status.Allocation)
}

// bindPauses are how long a write is put off that others get ahead of: kube-controller-manager, which takes out pods that have
// ended, or another scheduler. They come to some three seconds.
var bindPauses = wait.Backoff{Duration: 10 * time.Millisecond, Factor: 1.6, Jitter: 0.5, Steps: 12}

// Bind makes sure that the claim has the allocation, the finalizer and the reservation. Pods of this process that share the claim
// do so one after the other, each on what the one before has written.
func (b *Binder) Bind(ctx context.Context, w *Write) error {
	done, err := b.turns.take(ctx, w.Planned.UID)
	if err != nil {
		return err
	}
	defer done()
	// Benign changes, such as labels, may come in between. Then everything is looked at anew.
	get := b.Known
	err = retry.RetryOnConflict(b.BindPauses, func() error {
		claim, err := get(ctx, w.Planned)
		get = b.Read
		if err != nil {
			return err
		}
		if err := checkUnchanged(claim, w); err != nil {
			return err
		}
		return b.writeBinding(ctx, w, claim.DeepCopy())
	})
	switch {
	case apierrors.IsConflict(err):
		return podevents.Postpone(podevents.ReasonClaimChanged, w.Planned, errors.New("changed again and again while the pod was bound"))
	case apierrors.IsNotFound(err):
		return podevents.Postpone(podevents.ReasonClaimChanged, w.Planned, errors.New("was deleted while the pod was scheduled"))
	case err != nil:
		return err
	}
	return b.claims.Assume(w.Written)
}

// checkUnchanged fails if the claim is not any more what the pod was scheduled with.
func checkUnchanged(claim *resourceapi.ResourceClaim, w *Write) error {
	if err := changeOf(claim, w); err != nil {
		return podevents.Postpone(podevents.ReasonClaimChanged, claim, err)
	}
	if podclaims.IsReservedFor(claim, w.User.UID) {
		return nil
	}
	return checkReservedForLimit(claim, 0)
}

// changeOf says what has changed.
func changeOf(claim *resourceapi.ResourceClaim, w *Write) error {
	switch {
	case claim.UID != w.Planned.UID:
		return fmt.Errorf("was deleted and created again while the pod was scheduled: UID %s instead of %s", claim.UID, w.Planned.UID)
	case claim.DeletionTimestamp != nil:
		return errors.New("is being deleted")
	case w.Allocation != nil && claim.Status.Allocation != nil && !podclaims.SameAllocation(claim.Status.Allocation, w.Allocation):
		return errors.New("was allocated by somebody else while the pod was scheduled")
	case w.Allocation == nil && claim.Status.Allocation == nil:
		return errors.New("lost its allocation while the pod was scheduled")
	case w.Allocation == nil && !podclaims.SameAllocation(claim.Status.Allocation, w.Planned.Status.Allocation):
		return errors.New("got another allocation while the pod was scheduled")
	}
	return nil
}

// writeBinding changes the claim in the API. claim is a copy.
func (b *Binder) writeBinding(ctx context.Context, w *Write, claim *resourceapi.ResourceClaim) error {
	client := b.Client.ResourceV1().ResourceClaims(claim.Namespace)
	options := metav1.UpdateOptions{FieldManager: b.FieldManager}

	// What looks like a conflict may have been the second try of a write whose first one took effect.
	if w.unanswered != nil && w.unanswered.ResourceVersion != claim.ResourceVersion {
		w.Written, w.made, w.unanswered = claim.DeepCopy(), w.madeIn(claim, b.FieldManager), nil
	}

	// Before the allocation: an allocated claim must not vanish while devices are prepared for it. And before the
	// reservation: what another process has noted of an earlier one is not true of this one.
	prepare := !podclaims.IsReservedFor(claim, w.User.UID) && forgetAdoptions(claim)
	if w.Allocation != nil && !slices.Contains(claim.Finalizers, resourceapi.Finalizer) {
		claim.Finalizers = append(claim.Finalizers, resourceapi.Finalizer)
		prepare = true
	}
	if prepare {
		updated, err := client.Update(ctx, claim, options)
		CountWrite(WriteFinalizer, err)
		if err != nil {
			return fmt.Errorf("add the finalizer: %w", err)
		}
		claim = updated.DeepCopy()
	}

	users := len(claim.Status.ReservedFor)
	now := w.made
	if w.Allocation != nil && claim.Status.Allocation == nil {
		claim.Status.Allocation = w.Allocation.DeepCopy()
		claim.Status.Allocation.AllocationTimestamp = &metav1.Time{Time: b.Clock.Now()}
		now.allocation = true
	}
	if !podclaims.IsReservedFor(claim, w.User.UID) {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, w.User)
		now.reservation = true
		w.joined = users > 0
	}
	switch {
	case now == w.made && !w.made.reservation:
		return b.adopt(ctx, w, claim)
	case now == w.made:
		w.Written = claim
		return nil
	}
	w.unanswered = claim
	updated, err := client.UpdateStatus(ctx, claim, options)
	CountWrite(writeAllocation, err)
	if err != nil {
		if IsRefusal(err) {
			w.unanswered = nil
		}
		return fmt.Errorf("write allocation and reservation: %w", err)
	}
	w.Written, w.made, w.unanswered = updated, now, nil
	return nil
}

// Known returns the newest object that the tracker knows for the claim's name.
func (b *Binder) Known(_ context.Context, claim *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, error) {
	return b.claims.Get(claim.Namespace, claim.Name)
}

// Read returns the object that the API server has for the claim's name.
func (b *Binder) Read(ctx context.Context, claim *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, error) {
	read, err := b.Client.ResourceV1().ResourceClaims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	b.Assume(ctx, read)
	return read, nil
}

// Assume tells the tracker of an object that the API server has sent. What it ignores is known to be outdated.
func (b *Binder) Assume(ctx context.Context, claim *resourceapi.ResourceClaim) {
	if err := b.claims.Assume(claim); err != nil {
		klog.FromContext(ctx).V(4).Info("Claim is outdated", "claim", klog.KObj(claim), "reason", err.Error())
	}
}

// IsRefusal tells whether the API server has refused a request, so that it certainly had no effect. Conflict and
// TooManyRequests do not count: the client tries again by itself when the server asks it to, and it may be that the
// first try took effect and the second one was refused for that.
func IsRefusal(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	switch code := status.Status().Code; code {
	case http.StatusRequestTimeout, http.StatusConflict, http.StatusTooManyRequests:
		return false
	default:
		return code >= http.StatusBadRequest && code < http.StatusInternalServerError
	}
}
