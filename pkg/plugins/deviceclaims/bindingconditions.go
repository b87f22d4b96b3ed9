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
func (pl *Plugin) bindingBroken(claim *resourceapi.ResourceClaim) bool {
	if !pl.features.DeviceBindingConditions || claim.Status.Allocation == nil {
		return false
	}
	r := readinessOf(claim, pl.bindingTimeout)
	return r.failed != "" || !r.deadline.IsZero() && pl.clock.Now().After(r.deadline)
}

// bindingDeadline is the moment from which on the claim's devices have taken too long, zero if there is none.
func (pl *Plugin) bindingDeadline(claim *resourceapi.ResourceClaim) time.Time {
	if !pl.features.DeviceBindingConditions || claim.Status.Allocation == nil {
		return time.Time{}
	}
	deadline := readinessOf(claim, pl.bindingTimeout).deadline
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

// waitForBindingConditions waits until the devices of all claims are ready.
func (pl *Plugin) waitForBindingConditions(ctx context.Context, pod *v1.Pod, c *cycle) error {
	if !pl.features.DeviceBindingConditions {
		return nil
	}
	start := pl.clock.Now()
	for _, pc := range c.bindingClaims() {
		allocation := c.binding.allocation(pc.claim)
		if allocation == nil {
			allocation = pc.claim.Status.Allocation
		}
		if !slices.ContainsFunc(allocation.Devices.Results, func(result resourceapi.DeviceRequestAllocationResult) bool {
			return len(result.BindingConditions) > 0
		}) {
			continue
		}
		if err := pl.waitForClaim(ctx, pod, pc, start); err != nil {
			return fmt.Errorf("claim %s: wait for binding conditions: %w", klog.KObj(pc.claim), err)
		}
	}
	return nil
}

func (pl *Plugin) waitForClaim(ctx context.Context, pod *v1.Pod, pc podClaim, start time.Time) error {
	claim := pc.claim
	name := types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
	for told := false; ; told = true {
		// Watched before it is looked at, so that no change is missed.
		changed := pl.shared.waiting.watch(name)
		current, err := pl.shared.tracker.Get(claim.Namespace, claim.Name)
		switch {
		case apierrors.IsNotFound(err):
			return postpone(reasonClaimChanged, claim, errors.New("was deleted while the pod was bound"))
		case err != nil:
			return err
		case current.UID != claim.UID || !isReservedFor(current, pc.user.UID) || current.Status.Allocation == nil:
			return postpone(reasonClaimChanged, claim, errors.New("the reservation was lost"))
		}
		r := readinessOf(current, pl.bindingTimeout)
		if r.failed != "" {
			return &notReadyError{r.failed, r.pending}
		}
		if r.ready {
			return nil
		}
		if r.deadline.IsZero() {
			r.deadline = start.Add(pl.bindingTimeout)
		}
		left := r.deadline.Sub(pl.clock.Now())
		if left <= 0 {
			return &notReadyError{r.why(pl.bindingTimeout), r.pending}
		}
		if !told {
			pl.handle.EventRecorder().WithLogger(klog.FromContext(ctx)).Eventf(regarding(pod), claimReference(name), v1.EventTypeNormal, "BindingConditionsPending", "Scheduling",
				"waiting up to %s for the devices of claim %s to become ready", left.Round(time.Second), name)
		}
		timer := pl.clock.NewTimer(left)
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
