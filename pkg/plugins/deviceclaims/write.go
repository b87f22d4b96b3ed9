package deviceclaims

import (
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
)

// claimWrite is what PreBind does to one claim.
type claimWrite struct {
	// planned is the claim as PreFilter saw it.
	planned *resourceapi.ResourceClaim
	// allocation is to be written, nil for a claim that is allocated already.
	allocation *resourceapi.AllocationResult
	// user is whom it is to be reserved for.
	user resourceapi.ResourceClaimConsumerReference
	// written is the claim as the API server has it with allocation and reservation, nil before that is known.
	written *resourceapi.ResourceClaim
	// made is what of written is our doing. Only that is ours to undo: a reservation that stood before may be the one of
	// another scheduler that handles the same pod.
	made made
	// withdrawn tells that the claim has given way to another one since, see withdraw.
	withdrawn bool
	// joined tells that the claim had users before us, whose leaving should have freed its devices.
	joined bool
	// unanswered is what a write sent whose outcome is not known. The write can take effect as long as the claim
	// has this resource version, and never afterwards.
	unanswered *resourceapi.ResourceClaim
}

// mayStand tells whether something of the write is, or may be, in the claim.
func (w *claimWrite) mayStand() bool { return w.made != made{} || w.unanswered != nil }

// hasReserved tells whether the claim's reservation for the user is this write's doing.
func (w *claimWrite) hasReserved() bool { return w.made.reservation }

// result is what the claim has allocated when the write is done.
func (w *claimWrite) result() *resourceapi.AllocationResult {
	if w.allocation != nil {
		return w.allocation
	}
	return w.planned.Status.Allocation
}

// bindPauses are how long a write is put off that others get ahead of: kube-controller-manager, which takes out pods that have
// ended, or another scheduler. They come to some three seconds.
var bindPauses = wait.Backoff{Duration: 10 * time.Millisecond, Factor: 1.6, Jitter: 0.5, Steps: 12}

// bindClaim makes sure that the claim has the allocation, the finalizer and the reservation. Pods of this process that share the claim
// do so one after the other, each on what the one before has written.
func (b *binder) bindClaim(ctx context.Context, w *claimWrite) error {
	done, err := b.turns.take(ctx, w.planned.UID)
	if err != nil {
		return err
	}
	defer done()
	// Benign changes, such as labels, may come in between. Then everything is looked at anew.
	get := b.known
	err = retry.RetryOnConflict(b.bindPauses, func() error {
		claim, err := get(ctx, w.planned)
		get = b.read
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
		return postpone(reasonClaimChanged, w.planned, errors.New("changed again and again while the pod was bound"))
	case apierrors.IsNotFound(err):
		return postpone(reasonClaimChanged, w.planned, errors.New("was deleted while the pod was scheduled"))
	case err != nil:
		return err
	}
	return b.claims.Assume(w.written)
}

// checkUnchanged fails if the claim is not any more what the pod was scheduled with.
func checkUnchanged(claim *resourceapi.ResourceClaim, w *claimWrite) error {
	if err := changeOf(claim, w); err != nil {
		return postpone(reasonClaimChanged, claim, err)
	}
	if isReservedFor(claim, w.user.UID) {
		return nil
	}
	return checkReservedForLimit(claim, 0)
}

// changeOf says what has changed.
func changeOf(claim *resourceapi.ResourceClaim, w *claimWrite) error {
	switch {
	case claim.UID != w.planned.UID:
		return fmt.Errorf("was deleted and created again while the pod was scheduled: UID %s instead of %s", claim.UID, w.planned.UID)
	case claim.DeletionTimestamp != nil:
		return errors.New("is being deleted")
	case w.allocation != nil && claim.Status.Allocation != nil && !sameAllocation(claim.Status.Allocation, w.allocation):
		return errors.New("was allocated by somebody else while the pod was scheduled")
	case w.allocation == nil && claim.Status.Allocation == nil:
		return errors.New("lost its allocation while the pod was scheduled")
	case w.allocation == nil && !sameAllocation(claim.Status.Allocation, w.planned.Status.Allocation):
		return errors.New("got another allocation while the pod was scheduled")
	}
	return nil
}

// writeBinding changes the claim in the API. claim is a copy.
func (b *binder) writeBinding(ctx context.Context, w *claimWrite, claim *resourceapi.ResourceClaim) error {
	client := b.client.ResourceV1().ResourceClaims(claim.Namespace)
	options := metav1.UpdateOptions{FieldManager: b.fieldManager}

	// What looks like a conflict may have been the second try of a write whose first one took effect.
	if w.unanswered != nil && w.unanswered.ResourceVersion != claim.ResourceVersion {
		w.written, w.made, w.unanswered = claim.DeepCopy(), w.madeIn(claim, b.fieldManager), nil
	}

	// Before the allocation: an allocated claim must not vanish while devices are prepared for it. And before the
	// reservation: what another process has noted of an earlier one is not true of this one.
	prepare := !isReservedFor(claim, w.user.UID) && forgetAdoptions(claim)
	if w.allocation != nil && !slices.Contains(claim.Finalizers, resourceapi.Finalizer) {
		claim.Finalizers = append(claim.Finalizers, resourceapi.Finalizer)
		prepare = true
	}
	if prepare {
		updated, err := client.Update(ctx, claim, options)
		countWrite(writeFinalizer, err)
		if err != nil {
			return fmt.Errorf("add the finalizer: %w", err)
		}
		claim = updated.DeepCopy()
	}

	users := len(claim.Status.ReservedFor)
	now := w.made
	if w.allocation != nil && claim.Status.Allocation == nil {
		claim.Status.Allocation = w.allocation.DeepCopy()
		claim.Status.Allocation.AllocationTimestamp = &metav1.Time{Time: b.clock.Now()}
		now.allocation = true
	}
	if !isReservedFor(claim, w.user.UID) {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, w.user)
		now.reservation = true
		w.joined = users > 0
	}
	switch {
	case now == w.made && !w.made.reservation:
		return b.adopt(ctx, w, claim)
	case now == w.made:
		w.written = claim
		return nil
	}
	w.unanswered = claim
	updated, err := client.UpdateStatus(ctx, claim, options)
	countWrite(writeAllocation, err)
	if err != nil {
		if isRefusal(err) {
			w.unanswered = nil
		}
		return fmt.Errorf("write allocation and reservation: %w", err)
	}
	w.written, w.made, w.unanswered = updated, now, nil
	return nil
}

// known returns the newest object that the tracker knows for the claim's name.
func (b *binder) known(_ context.Context, claim *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, error) {
	return b.claims.Get(claim.Namespace, claim.Name)
}

// read returns the object that the API server has for the claim's name.
func (b *binder) read(ctx context.Context, claim *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, error) {
	read, err := b.client.ResourceV1().ResourceClaims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	b.assume(ctx, read)
	return read, nil
}

// assume tells the tracker of an object that the API server has sent. What it ignores is known to be outdated.
func (b *binder) assume(ctx context.Context, claim *resourceapi.ResourceClaim) {
	if err := b.claims.Assume(claim); err != nil {
		klog.FromContext(ctx).V(4).Info("Claim is outdated", "claim", klog.KObj(claim), "reason", err.Error())
	}
}

// isRefusal tells whether the API server has refused a request, so that it certainly had no effect. Conflict and
// TooManyRequests do not count: the client tries again by itself when the server asks it to, and it may be that the
// first try took effect and the second one was refused for that.
func isRefusal(err error) bool {
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
