package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/util/retry"
	"k8s.io/klog/v2"
)

// settlePeriod is how often a claim is read until it is known whether a write took effect.
const settlePeriod = time.Second

// claimWrite is what PreBind does to one claim.
type claimWrite struct {
	// planned is the claim as PreFilter saw it.
	planned *resourceapi.ResourceClaim
	// allocation is to be written, nil for a claim that is allocated already.
	allocation *resourceapi.AllocationResult
	// written is what the API server answered to the write of allocation and reservation.
	written *resourceapi.ResourceClaim
	// uncertain tells that a write may have taken effect although it failed.
	uncertain bool
}

// bindClaim makes sure that the claim has the allocation, the finalizer and the pod's reservation.
func (pl *Plugin) bindClaim(ctx context.Context, pod *v1.Pod, w *claimWrite) error {
	// Benign changes, such as labels, may come in between. Then everything is looked at anew.
	get := pl.known
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		claim, err := get(ctx, w.planned)
		get = pl.read
		if err != nil {
			return err
		}
		if err := checkUnchanged(claim, w, pod); err != nil {
			return err
		}
		return pl.writeBinding(ctx, pod, w, claim.DeepCopy())
	})
	if err != nil {
		return err
	}
	return pl.shared.tracker.Assume(w.written)
}

// checkUnchanged fails if the claim is not any more what the pod was scheduled with.
func checkUnchanged(claim *resourceapi.ResourceClaim, w *claimWrite, pod *v1.Pod) error {
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
	case isReservedFor(claim, pod):
		return nil
	default:
		return checkReservedForLimit(claim)
	}
}

// sameAllocation compares without the time of the allocation, which the writer adds.
func sameAllocation(a, b *resourceapi.AllocationResult) bool {
	return apiequality.Semantic.DeepEqual(a.Devices, b.Devices) && apiequality.Semantic.DeepEqual(a.NodeSelector, b.NodeSelector)
}

// writeBinding changes the claim in the API. claim is a copy.
func (pl *Plugin) writeBinding(ctx context.Context, pod *v1.Pod, w *claimWrite, claim *resourceapi.ResourceClaim) error {
	client := pl.client.ResourceV1().ResourceClaims(claim.Namespace)

	// Before the allocation: an allocated claim must not vanish while devices are prepared for it.
	if w.allocation != nil && !slices.Contains(claim.Finalizers, resourceapi.Finalizer) {
		claim.Finalizers = append(claim.Finalizers, resourceapi.Finalizer)
		updated, err := client.Update(ctx, claim, metav1.UpdateOptions{})
		countWrite(writeFinalizer, err)
		if err != nil {
			return fmt.Errorf("add the finalizer: %w", err)
		}
		claim = updated.DeepCopy()
	}

	changed := false
	if w.allocation != nil && claim.Status.Allocation == nil {
		claim.Status.Allocation = w.allocation.DeepCopy()
		claim.Status.Allocation.AllocationTimestamp = &metav1.Time{Time: pl.clock.Now()}
		changed = true
	}
	if !isReservedFor(claim, pod) {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{
			APIGroup: v1.GroupName, Resource: "pods", Name: pod.Name, UID: pod.UID,
		})
		changed = true
	}
	if !changed {
		// An earlier write of ours has taken effect after all.
		w.written = claim
		return nil
	}
	updated, err := client.UpdateStatus(ctx, claim, metav1.UpdateOptions{})
	countWrite(writeAllocation, err)
	if err != nil {
		w.uncertain = w.uncertain || !isRefusal(err)
		return fmt.Errorf("write allocation and reservation: %w", err)
	}
	w.written = updated
	return nil
}

// undo takes back what bindClaim wrote: the pod's reservation, and the allocation if nobody else has reserved
// the claim meanwhile.
func (pl *Plugin) undo(ctx context.Context, pod *v1.Pod, w *claimWrite) {
	if w.written == nil && !w.uncertain {
		return
	}
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "pod", klog.KObj(pod), "claim", klog.KObj(w.planned))
	// The scheduling cycle's context may have ended, which may be why the pod is unreserved.
	ctx = klog.NewContext(context.WithoutCancel(ctx), logger)
	if w.written == nil && !pl.settle(ctx, w) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, undoTimeout)
	defer cancel()
	get := pl.known
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		claim, err := get(ctx, w.planned)
		get = pl.read
		if apierrors.IsNotFound(err) {
			return nil
		}
		if err != nil {
			return err
		}
		return pl.writeUndo(ctx, pod, w, claim)
	})
	if err != nil {
		logger.Error(err, "Cannot take back allocation and reservation of a claim, the pod will use them when it is tried again")
	}
}

func (pl *Plugin) writeUndo(ctx context.Context, pod *v1.Pod, w *claimWrite, claim *resourceapi.ResourceClaim) error {
	if claim.UID != w.planned.UID || !isReservedFor(claim, pod) {
		return nil
	}
	claim = claim.DeepCopy()
	claim.Status.ReservedFor = slices.DeleteFunc(claim.Status.ReservedFor, func(ref resourceapi.ResourceClaimConsumerReference) bool {
		return ref.UID == pod.UID
	})
	if w.allocation != nil && len(claim.Status.ReservedFor) == 0 &&
		claim.Status.Allocation != nil && sameAllocation(claim.Status.Allocation, w.allocation) {
		claim.Status.Allocation = nil
		claim.Status.Devices = nil
	}
	updated, err := pl.client.ResourceV1().ResourceClaims(claim.Namespace).UpdateStatus(ctx, claim, metav1.UpdateOptions{})
	countWrite(writeUndo, err)
	if err != nil {
		return err
	}
	pl.assume(ctx, updated)
	return nil
}

// settle reads the claim until it is known whether the write took effect, and makes it known to the tracker.
// Until then the allocation must stay in flight, because the devices may be taken. Without an API server no
// pod can be scheduled, so there is no hurry. It returns false if the scheduler ends before.
func (pl *Plugin) settle(ctx context.Context, w *claimWrite) bool {
	logger := klog.FromContext(ctx)
	err := wait.PollUntilContextCancel(pl.shared.ctx, settlePeriod, true, func(pollCtx context.Context) (bool, error) {
		getCtx, cancel := context.WithTimeout(pollCtx, undoTimeout)
		defer cancel()
		claim, err := pl.read(getCtx, w.planned)
		switch {
		case apierrors.IsNotFound(err):
			return true, nil
		case err != nil:
			logger.Error(err, "Cannot find out whether the write of an allocation took effect, keeping its devices")
			return false, nil
		}
		pl.assume(ctx, claim)
		return true, nil
	})
	return err == nil
}

// known returns the newest object that the tracker knows for the claim's name.
func (pl *Plugin) known(_ context.Context, claim *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, error) {
	return pl.shared.tracker.Get(claim.Namespace, claim.Name)
}

// read returns the object that the API server has for the claim's name.
func (pl *Plugin) read(ctx context.Context, claim *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, error) {
	return pl.client.ResourceV1().ResourceClaims(claim.Namespace).Get(ctx, claim.Name, metav1.GetOptions{})
}

// assume tells the tracker of an object that the API server has sent. What it ignores is known to be outdated.
func (pl *Plugin) assume(ctx context.Context, claim *resourceapi.ResourceClaim) {
	if err := pl.shared.tracker.Assume(claim); err != nil {
		klog.FromContext(ctx).V(4).Info("Claim is outdated", "claim", klog.KObj(claim), "reason", err.Error())
	}
}

// isRefusal tells whether the API server has refused a request, so that it certainly had no effect.
func isRefusal(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	code := status.Status().Code
	return code >= http.StatusBadRequest && code < http.StatusInternalServerError && code != http.StatusRequestTimeout
}
