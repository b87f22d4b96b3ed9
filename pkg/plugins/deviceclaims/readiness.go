package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/usage"
)

// readiness is how far the devices of a claim are from being usable (KEP-5007). Devices without binding
// conditions are ready.
type readiness struct {
	ready bool
	// failed says which binding failure condition is true.
	failed string
	// pending are the devices that are not ready, with a failure the one that failed.
	pending []usage.DeviceID
	// deadline is until when the devices may take, zero if they are ready.
	deadline time.Time
}

// readinessOf judges the conditions in an allocated claim's status.
func readinessOf(claim *resourceapi.ResourceClaim, timeout time.Duration) readiness {
	r := readiness{ready: true}
	for i := range claim.Status.Allocation.Devices.Results {
		result := &claim.Status.Allocation.Devices.Results[i]
		if len(result.BindingConditions) == 0 {
			continue
		}
		status := deviceStatus(claim, result)
		for _, name := range result.BindingFailureConditions {
			if status != nil && apimeta.IsStatusConditionTrue(status.Conditions, name) {
				condition := apimeta.FindStatusCondition(status.Conditions, name)
				device := usage.DeviceOf(result)
				return readiness{
					failed:  fmt.Sprintf("device %s: condition %s: %s: %s", device, name, condition.Reason, condition.Message),
					pending: []usage.DeviceID{device},
				}
			}
		}
		if status == nil || slices.ContainsFunc(result.BindingConditions, func(name string) bool {
			return !apimeta.IsStatusConditionTrue(status.Conditions, name)
		}) {
			r.ready = false
			if device := usage.DeviceOf(result); !slices.Contains(r.pending, device) { // once, however many shares of it are not
				r.pending = append(r.pending, device)
			}
		}
	}
	if !r.ready && claim.Status.Allocation.AllocationTimestamp != nil {
		r.deadline = claim.Status.Allocation.AllocationTimestamp.Add(timeout)
	}
	return r
}

// why says why devices that failed, or took too long, are not ready.
func (r *readiness) why(timeout time.Duration) string {
	if r.failed != "" {
		return r.failed
	}
	more := ""
	if n := len(r.pending) - 1; n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("device %s%s not ready within the bindingTimeout of %s after the allocation", r.pending[0], more, timeout)
}

// deviceStatus returns what the device's driver reports in the claim, nil if nothing.
func deviceStatus(claim *resourceapi.ResourceClaim, result *resourceapi.DeviceRequestAllocationResult) *resourceapi.AllocatedDeviceStatus {
	for i := range claim.Status.Devices {
		status := &claim.Status.Devices[i]
		share := (*string)(result.ShareID)
		if status.Driver == result.Driver && status.Pool == result.Pool && status.Device == result.Device && ptr.Equal(status.ShareID, share) {
			return status
		}
	}
	return nil
}

// bindingBroken tells whether the allocated devices of a claim have failed to become ready, or took too long.
// Then the claim has to be allocated anew.
func (b *binder) bindingBroken(claim *resourceapi.ResourceClaim) bool {
	return b.whyBroken(claim) != ""
}

// whyBroken says why, "" if that is not so.
func (b *binder) whyBroken(claim *resourceapi.ResourceClaim) string {
	if !b.conditions || claim.Status.Allocation == nil {
		return ""
	}
	r := readinessOf(claim, b.timeout)
	if r.failed == "" && (r.deadline.IsZero() || !b.clock.Now().After(r.deadline)) {
		return ""
	}
	return r.why(b.timeout)
}

// bindingDeadline is the moment from which on the claim's devices have taken too long, zero if there is none.
func (b *binder) bindingDeadline(claim *resourceapi.ResourceClaim) time.Time {
	if !b.conditions || claim.Status.Allocation == nil {
		return time.Time{}
	}
	deadline := readinessOf(claim, b.timeout).deadline
	if deadline.IsZero() {
		return deadline
	}
	return deadline.Add(time.Nanosecond)
}

// notReadyError says that devices failed to become ready, or took too long.
type notReadyError struct {
	reason  string
	devices []usage.DeviceID
}

func (e *notReadyError) Error() string { return e.reason }

// waitUntilReady waits until the claim's devices are ready for the pod. user is whom the claim is reserved for; start is when the waiting for all
// of the pod's claims began, which counts if the claim does not say when it was allocated.
func (b *binder) waitUntilReady(ctx context.Context, pod *v1.Pod, claim *resourceapi.ResourceClaim, user types.UID, start time.Time) error {
	name := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
	for told := false; ; told = true {
		// Watched before it is looked at, so that no change is missed.
		changed := b.changed(name)
		current, err := b.claims.Get(claim.Namespace, claim.Name)
		switch {
		case apierrors.IsNotFound(err):
			return postpone(reasonClaimChanged, claim, errors.New("was deleted while the pod was bound"))
		case err != nil:
			return err
		case current.UID != claim.UID || !isReservedFor(current, user) || current.Status.Allocation == nil:
			return postpone(reasonClaimChanged, claim, errors.New("the reservation was lost"))
		}
		r := readinessOf(current, b.timeout)
		if r.failed != "" {
			return &notReadyError{r.failed, r.pending}
		}
		if r.ready {
			return nil
		}
		if r.deadline.IsZero() {
			r.deadline = start.Add(b.timeout)
		}
		left := r.deadline.Sub(b.clock.Now())
		if left <= 0 {
			return &notReadyError{r.why(b.timeout), r.pending}
		}
		if !told {
			b.events().WithLogger(klog.FromContext(ctx)).Eventf(regarding(pod), claimReference(name), v1.EventTypeNormal, "BindingConditionsPending", "Scheduling",
				"waiting up to %s for the devices of claim %s to become ready", left.Round(time.Second), name)
		}
		timer := b.clock.NewTimer(left)
		select {
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C():
		case <-changed:
			timer.Stop()
		}
	}
}
