package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/decisions"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// PreBindPreFlight tells whether PreBind has something to do. PreBind runs alone: nothing irreversible, such as
// the provisioning of a volume, may happen beside it, because it may lose its devices.
func (pl *Plugin) PreBindPreFlight(_ context.Context, state fwk.CycleState, _ *v1.Pod, _ string) (*fwk.PreBindPreFlightResult, *fwk.Status) {
	result := &fwk.PreBindPreFlightResult{AllowParallel: false}
	c, err := readCycle(state)
	if err != nil {
		return result, fwk.AsStatus(err)
	}
	if c == nil || len(c.claims) == 0 && !c.changesExtendedClaims() {
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
	c, err := readCycle(state)
	if err != nil {
		return fwk.AsStatus(err)
	}
	if c == nil {
		return nil
	}
	if err := pl.bindClaims(ctx, state, pod, nodeName, c); err != nil {
		c.binding.why = err.Error()
		return statusOfBinding(pod, nodeName, err)
	}
	c.binding.sent = true
	return nil
}

func (pl *Plugin) bindClaims(ctx context.Context, state fwk.CycleState, pod *v1.Pod, nodeName string, c *cycle) error {
	pl.shared.memory.Attempts.PreBind(ctx, pod.UID)
	if err := pl.extended.Create(ctx, pod, c.extended, &c.binding.extended, c.binding.reserved); err != nil {
		return err
	}
	for _, pc := range c.bindingClaims() {
		allocation := c.binding.allocation(pc.Claim)
		w := &binding.Write{Planned: pc.Claim, Allocation: allocation, User: pc.User}
		c.binding.writes = append(c.binding.writes, w)
		if err := pl.binder.Bind(ctx, w); err != nil {
			return fmt.Errorf("claim %s: %w", klog.KObj(pc.Claim), err)
		}
		// The allocation is in the first layer now.
		pl.shared.tracker.Release(pc.Claim.UID, pod.UID)
		pl.shared.books.Places.Leave(pc.Claim.UID, pod.UID)
		if allocation == nil && w.HasReserved() {
			decisions.Log(ctx, decisions.Shared, pod, nodeName, pc.Claim, pc.Claim.Status.Allocation, "the claim is allocated already, and the pod can use it on this node")
		}
	}
	if err := pl.passFence(ctx, state, pod, nodeName, c); err != nil {
		return err
	}
	if err := pl.waitForBindingConditions(ctx, pod, c); err != nil {
		if notReady, ok := errors.AsType[*binding.NotReadyError](err); ok {
			pl.shared.memory.Failed.Add(pod, nodeName, notReady.Devices)
		}
		return err
	}
	return pl.extended.Record(ctx, pod, c.extended, &c.binding.extended)
}

// waitForBindingConditions waits until the devices of all claims are ready.
func (pl *Plugin) waitForBindingConditions(ctx context.Context, pod *v1.Pod, c *cycle) error {
	if !pl.rivals.Features.DeviceBindingConditions {
		return nil
	}
	start := pl.binder.Clock.Now()
	for _, pc := range c.bindingClaims() {
		allocation := c.binding.allocation(pc.Claim)
		if allocation == nil {
			allocation = pc.Claim.Status.Allocation
		}
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

// bindingClaims are the pod's claims as they were when it was reserved, with the one that has been made for its extended resources.
func (c *cycle) bindingClaims() []podclaims.Claim {
	claims := slices.Clone(c.claims)
	for i := range claims {
		if joined := c.binding.joined[claims[i].Claim.UID]; joined != nil {
			claims[i].Claim = joined
		}
	}
	if created := c.binding.extended.Created; created != nil {
		claims = append(claims, podclaims.Claim{Claim: created, User: podclaims.UserOf(c.extended.Pod)})
	}
	return claims
}

// changesExtendedClaims tells whether PreBind has to make or to remove a claim for extended resources.
func (c *cycle) changesExtendedClaims() bool {
	wanted := c.binding.extended.Variant
	return c.extended != nil && (len(c.extended.Leftovers) > 0 || wanted != nil && wanted.Claim != nil)
}
