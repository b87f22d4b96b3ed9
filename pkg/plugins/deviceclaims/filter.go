// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
)

// reasonFailed is why a node is refused that would do with what has failed for the pod. The scheduler counts equal strings over all
// nodes, so it says nothing about the node.
const reasonFailed = "node(s) with only devices that could not be made ready for the pod"

// Filter says whether the node can be used for the pod. Nothing that is wrong with one node keeps the pod off
// another one.
//
// A refusal is UnschedulableAndUnresolvable unless pods of lower priority are in the way, see contention.Rivals.Judge.
func (pl *Plugin) Filter(ctx context.Context, state fwk.CycleState, pod *v1.Pod, nodeInfo fwk.NodeInfo) *fwk.Status {
	c, err := cycle.Read(state)
	if err != nil {
		return fwk.AsStatus(err)
	}
	if c == nil {
		return nil
	}
	node := nodeInfo.Node()
	if status := pl.filterAllocated(c, node); status != nil {
		return status
	}
	wanted, status := c.WantedOn(pl.extended, nodeInfo)
	if status != nil {
		return status
	}
	if wanted.Requests == nil {
		c.Findings().Set(node.Name, cycle.NodeResult{Variant: wanted})
		return nil
	}

	input := c.Input(ctx, wanted.Requests, node)
	input.Attempt = c.Budget
	result := allocator.Check(ctx, input)
	held := (*resourceapi.AllocationResult)(nil)
	if result.Fits() {
		if held = pl.extended.HeldUnseen(c.Inventory, nodeInfo); held != nil {
			input.Usage = extended.WithUnseen(input.Usage, held)
			if result = allocator.Check(ctx, input); !result.Fits() && result.Failure.Reason != explain.ReasonUndecided && ctx.Err() == nil {
				c.Findings().SetUnseen(node.Name)
				return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, extended.ReasonUnseen)
			}
		}
	}
	if ctx.Err() != nil {
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, fmt.Sprintf("stopped by the caller: %v", context.Cause(ctx)))
	}
	if result.Fits() {
		c.Findings().Set(node.Name, cycle.NodeResult{Variant: wanted, Score: result.Score, Size: result.Size, Unseen: held})
		if pl.hasFailed(ctx, c, input) {
			c.Findings().Failed.Store(true)
			return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, reasonFailed)
		}
		return nil
	}
	refusal := pl.rivals.Judge(ctx, &c.Situation, pod,
		contention.Refused{Node: nodeInfo, Requests: wanted.Requests, Failure: result.Failure, Time: c.Budget})
	if refusal.Undecided {
		c.Results.Undecided.Store(true)
	}
	c.Findings().Set(node.Name,
		cycle.NodeResult{Variant: wanted, Failure: result.Failure, Evictable: refusal.Code == fwk.Unschedulable && len(refusal.Leaving) == 0})
	if len(refusal.Leaving) > 0 {
		c.Findings().SetLeaving(node.Name, refusal.Leaving)
	}
	if log := klog.FromContext(ctx).V(5); log.Enabled() {
		log.Info("Node refused", "pod", klog.KObj(pod), "node", klog.KObj(node), "reason", result.Failure.Reason, "err", result.Failure.Err)
	}
	return fwk.NewStatus(refusal.Code, result.Failure.Reason.OfNodes())
}

// filterAllocated refuses a node on which a claim that is allocated already cannot be used.
func (pl *Plugin) filterAllocated(c *cycle.State, node *v1.Node) *fwk.Status {
	reason := ""
	for i := range c.Claims {
		if why := pl.refusals.WhyUnusable(&c.Claims[i], node); why != "" {
			reason = why
			c.Findings().SetUnusable(i)
		}
	}
	if reason != "" {
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, reason)
	}
	return nil
}

// PreFilterExtensions returns the plugin: what a node has to offer changes with the pods on it and with those that are
// nominated to it.
func (pl *Plugin) PreFilterExtensions() fwk.PreFilterExtensions { return pl }

// RemovePod takes away what the pod holds, in the state alone. A claim is released when the last pod goes that it is for.
func (pl *Plugin) RemovePod(_ context.Context, state fwk.CycleState, _ *v1.Pod, removed fwk.PodInfo, _ fwk.NodeInfo) *fwk.Status {
	if c, err := cycle.Read(state); err == nil && c != nil {
		c.WhatIf = c.WhatIf.Without(removed.GetPod())
	}
	return nil
}

// AddPod undoes RemovePod, or gives devices to a pod that is nominated to the node and has none yet, in the state
// alone. It never fails: that would end the whole attempt, on all nodes.
func (pl *Plugin) AddPod(_ context.Context, state fwk.CycleState, pod *v1.Pod, added fwk.PodInfo, node fwk.NodeInfo) *fwk.Status {
	c, err := cycle.Read(state)
	if err != nil || c == nil {
		return nil
	}
	if other := added.GetPod(); other.Spec.NodeName == "" && !c.WhatIf.HasRemoved(other) {
		if !pl.rivals.MakesWay(pod, other, node.Node().Name) {
			return nil
		}
	}
	c.WhatIf = c.WhatIf.With(added.GetPod())
	return nil
}
