// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package binding

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

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
	"stowage.dev/stowage/pkg/usage"
)

// readiness is how far the devices of a claim are from being usable (KEP-5007). Devices without binding
// conditions are ready.
type readiness struct {
	// failed says which binding failure condition is true.
	failed string
	// pending are the devices that are not ready, with a failure the one that failed. None is when all are ready.
	pending []usage.DeviceID
	// deadline is until when the devices may take, zero if they are ready.
	deadline time.Time
}

// readinessOf judges the conditions in an allocated claim's status.
func readinessOf(claim *resourceapi.ResourceClaim, timeout time.Duration) readiness {
	var r readiness
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
			if device := usage.DeviceOf(result); !slices.Contains(r.pending, device) { // once, however many shares of it are not
				r.pending = append(r.pending, device)
			}
		}
	}
	if len(r.pending) > 0 && claim.Status.Allocation.AllocationTimestamp != nil {
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

// WhyBroken says why a claim has to be allocated anew: its allocated devices have failed to become ready, or took too long. It is "" if it
// has not.
func (b *Binder) WhyBroken(claim *resourceapi.ResourceClaim) string {
	if !b.conditions || claim.Status.Allocation == nil {
		return ""
	}
	r := readinessOf(claim, b.Timeout)
	if r.failed == "" && (r.deadline.IsZero() || !b.Clock.Now().After(r.deadline)) {
		return ""
	}
	return r.why(b.Timeout)
}

// Deadline is the moment from which on the claim's devices have taken too long, zero if there is none.
func (b *Binder) Deadline(claim *resourceapi.ResourceClaim) time.Time {
	if !b.conditions || claim.Status.Allocation == nil {
		return time.Time{}
	}
	deadline := readinessOf(claim, b.Timeout).deadline
	if deadline.IsZero() {
		return deadline
	}
	return deadline.Add(time.Nanosecond)
}

// NotReadyError says that devices failed to become ready, or took too long.
type NotReadyError struct {
	reason  string
	Devices []usage.DeviceID
}

func (e *NotReadyError) Error() string { return e.reason }

// WaitUntilReady waits until the claim's devices are ready for the pod. user is whom the claim is reserved for; start is when the waiting
// for all of the pod's claims began, which counts if the claim does not say when it was allocated.
func (b *Binder) WaitUntilReady(ctx context.Context, pod *v1.Pod, claim *resourceapi.ResourceClaim, user types.UID, start time.Time) error {
	name := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
	for again := false; ; again = true {
		// Watched before it is looked at, so that no change is missed.
		changed := b.changed(name)
		current, err := b.claims.Get(claim.Namespace, claim.Name)
		switch {
		case apierrors.IsNotFound(err):
			return podevents.Postpone(podevents.ReasonClaimChanged, claim, errors.New("was deleted while the pod was bound"))
		case err != nil:
			return err
		case current.UID != claim.UID || !podclaims.IsReservedFor(current, user) || current.Status.Allocation == nil:
			return podevents.Postpone(podevents.ReasonClaimChanged, claim, errors.New("the reservation was lost"))
		}
		r := readinessOf(current, b.Timeout)
		if r.failed != "" {
			return &NotReadyError{r.failed, r.pending}
		}
		if len(r.pending) == 0 {
			return nil
		}
		if r.deadline.IsZero() {
			r.deadline = start.Add(b.Timeout)
		}
		left := r.deadline.Sub(b.Clock.Now())
		if left <= 0 {
			return &NotReadyError{r.why(b.Timeout), r.pending}
		}
		if !again {
			b.Events().WithLogger(klog.FromContext(ctx)).Eventf(podevents.Pod(pod), podevents.Claim(name), v1.EventTypeNormal,
				"BindingConditionsPending", "Scheduling",
				"waiting up to %s for the devices of claim %s to become ready", left.Round(time.Second), name)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-b.Clock.After(left):
		case <-changed:
		}
	}
}
