// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/decisions"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/failures"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/passage"
)

// PreBindPreFlight tells whether PreBind has something to do. PreBind runs alone: nothing irreversible, such as
// the provisioning of a volume, may happen beside it, because it may lose its devices.
func (pl *Plugin) PreBindPreFlight(_ context.Context, state fwk.CycleState, _ *v1.Pod,
	_ string,
) (*fwk.PreBindPreFlightResult, *fwk.Status) {
	result := &fwk.PreBindPreFlightResult{AllowParallel: false}
	c, err := cycle.Read(state)
	if err != nil {
		return result, fwk.AsStatus(err)
	}
	if c == nil || len(c.Claims) == 0 && !c.ChangesExtendedClaims() {
		return result, fwk.NewStatus(fwk.Skip)
	}
	return result, nil
}

// PreBind writes the allocations that Reserve decided, and the pod's reservation, into the claims, one after
// the other in the order of their names, makes sure that no other scheduler was first, and waits until the devices
// are ready to be bound.
//
// Its failures are temporary: the pod is tried again after a pause, and Unreserve undoes what was written.
func (pl *Plugin) PreBind(ctx context.Context, state fwk.CycleState, pod *v1.Pod, nodeName string) *fwk.Status {
	c, err := cycle.Read(state)
	if err != nil {
		return fwk.AsStatus(err)
	}
	if c == nil {
		return nil
	}
	if err := pl.bindClaims(ctx, pod, nodeName, c); err != nil {
		c.Binding.Why = err.Error()
		if refused, ok := errors.AsType[*passage.RefusedError](err); ok {
			c.Binding.Why, c.Binding.GaveWay = refused.Why, ctx.Err() == nil // who is preempted makes way at once
		}
		return failures.StatusOfBinding(pod, nodeName, err)
	}
	c.Binding.Sent = true
	return nil
}

func (pl *Plugin) bindClaims(ctx context.Context, pod *v1.Pod, nodeName string, c *cycle.State) error {
	pl.shared.memory.Attempts.PreBind(ctx, pod.UID)
	if err := pl.extended.Create(ctx, pod, c.Extended, &c.Binding.Extended, c.Binding.Reserved); err != nil {
		return err
	}
	for _, pc := range c.BindingClaims() {
		allocation := c.Binding.Allocation(pc.Claim)
		w := &binding.Write{Planned: pc.Claim, Allocation: allocation, User: pc.User}
		c.Binding.Writes = append(c.Binding.Writes, w)
		if err := pl.binder.Bind(ctx, w); err != nil {
			return fmt.Errorf("claim %s: %w", klog.KObj(pc.Claim), err)
		}
		// The allocation is in the first layer now.
		pl.shared.account.Tracker.Release(pc.Claim.UID, pod.UID)
		pl.shared.books.Places.Leave(pc.Claim.UID, pod.UID)
		if allocation == nil && w.HasReserved() {
			decisions.Log(ctx, decisions.Shared, pod, nodeName, pc.Claim, pc.Claim.Status.Allocation,
				"the claim is allocated already, and the pod can use it on this node")
		}
	}
	if err := pl.passage.Pass(ctx, pod, nodeName, c); err != nil {
		return err
	}
	if err := pl.waitForBindingConditions(ctx, pod, c); err != nil {
		if notReady, ok := errors.AsType[*binding.NotReadyError](err); ok {
			pl.shared.memory.Failed.Add(pod, nodeName, notReady.Devices)
		}
		return err
	}
	return pl.extended.Record(ctx, pod, c.Extended, &c.Binding.Extended)
}

// waitForBindingConditions waits until the devices of all claims are ready.
func (pl *Plugin) waitForBindingConditions(ctx context.Context, pod *v1.Pod, c *cycle.State) error {
	if !pl.rivals.Features.DeviceBindingConditions {
		return nil
	}
	start := pl.binder.Clock.Now()
	for _, pc := range c.BindingClaims() {
		allocation := cmp.Or(c.Binding.Allocation(pc.Claim), pc.Claim.Status.Allocation)
		if !slices.ContainsFunc(allocation.Devices.Results, func(result resourceapi.DeviceRequestAllocationResult) bool {
			return len(result.BindingConditions) > 0
		}) {
			continue
		}
		if err := pl.binder.WaitUntilReady(ctx, pod, pc.Claim, pc.User.UID, start); err != nil {
			return fmt.Errorf("claim %s: wait for binding conditions: %w", klog.KObj(pc.Claim), err)
		}
	}
	return nil
}
