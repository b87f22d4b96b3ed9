// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/demand"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/searchtime"
	"stowage.dev/stowage/pkg/wakeup"
)

// errPausing does not say how long: the pod would be written with each attempt.
var errPausing = errors.New("the pod pauses for some seconds: it was refused again and again after its group had been tried")

// PreFilter looks up the pod's claims, refuses the pod where no node could help, compiles the claims that need
// an allocation, and takes the views of inventory and usage on which all nodes are judged.
//
// Claims that are allocated already limit the nodes to those that the allocation can be used on.
//
// A pod that has a node has its devices, too. It is tried because of a resize that its kubelet has deferred (feature gate
// InPlacePodVerticalScalingSchedulerPreemption), for which others may be evicted from its node, and devices do not matter for that.
func (pl *Plugin) PreFilter(ctx context.Context, state fwk.CycleState, pod *v1.Pod, _ []fwk.NodeInfo) (*fwk.PreFilterResult, *fwk.Status) {
	if pod.Spec.NodeName != "" {
		return nil, fwk.NewStatus(fwk.Skip)
	}
	cycle.Forget(state)
	inGroup := state.IsPodGroupSchedulingCycle()
	c, status := pl.newCycle(ctx, pod, inGroup)
	switch {
	case status.IsSkip():
		return nil, status
	case !status.IsSuccess():
		klog.FromContext(ctx).V(5).Info("Pod cannot be scheduled", "pod", klog.KObj(pod), "reason", status.Message())
		return nil, status
	}
	c.Write(state)
	if inGroup {
		if err := cycle.NoteInGroup(state, pod, c); err != nil {
			return nil, fwk.AsStatus(err)
		}
	}
	result := c.PreFilterResult()
	if !result.AllNodes() && len(result.NodeNames) == 0 {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, pl.refusals.Nowhere(c))
	}
	return result, nil
}

// newCycle begins an attempt. With inGroup it is one of several in a cycle of the pod's group. The status is a skip if the pod asks for no
// devices.
func (pl *Plugin) newCycle(ctx context.Context, pod *v1.Pod, inGroup bool) (*cycle.State, *fwk.Status) {
	// 1. Its extended resources and its claims, and which of these are its group's.
	resources := extended.ResourcesOf(pod)
	if len(pod.Spec.ResourceClaims) == 0 && len(resources) == 0 {
		return nil, fwk.NewStatus(fwk.Skip)
	}
	if len(pod.Status.NodeAllocatableResourceClaimStatuses) > 0 {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
			"status.nodeAllocatableResourceClaimStatuses is set: claims for CPU or memory of a node are not supported")
	}
	names, err := podclaims.NamesOf(pod)
	if err != nil {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
	}
	if err := pl.shared.account.WaitForSync(ctx); err != nil {
		return nil, fwk.AsStatus(err)
	}
	ofGroup, err := pl.groups.ClaimsOf(pod)
	if err != nil {
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
	}

	// 2. What its group has been given on trial.
	c := &cycle.State{
		Plan:      &cycle.Plan{Budget: pl.time.Budget(pod), Failed: pl.shared.memory.Failed.Of(pod.UID)},
		Situation: contention.Situation{Facts: &contention.Facts{Search: pl.rivals.Search, Holders: pl.rivals.NewHolders()}},
		Results:   cycle.NewResults(nil), Binding: &cycle.Progress{},
	}
	var given func(types.UID) *resourceapi.AllocationResult
	if inGroup {
		c.Trial = pl.shared.common.Trial
		given = c.Trial.Allocation
		if c.Trial.IsForgetful() {
			c.Failed = nil
		}
		if c.WhatIf, err = c.Trial.WhatIf(pl.handle); err != nil {
			return nil, fwk.AsStatus(err)
		}
	}

	// 3. Noted as waiting before anything is looked at: whatever changes later than that is looked at for the pod. What is tried while the
	// group's attempt ends is none: the pod waits for what the attempt has found.
	attempted := !c.WhatIf.IsDryRun()
	waits := attempted && (len(names) > 0 || len(resources) > 0)
	if waits {
		pl.shared.waiting.Note(pod, names, pl.waits)
	}

	// 4. The views, and what the pod asks for by them.
	snapshot := pl.shared.account.Tracker.Snapshot()
	c.Usage = snapshot.Usage
	c.Inventory = pl.shared.account.Store.View()
	within, done := c.Budget.Evaluate(ctx)
	asked, err := pl.demand.Of(within, pod, names, c.Inventory, given)
	var question *wakeup.Question
	if waits {
		question = pl.waits.Question(within, pod, asked, c.Inventory, err)
	}
	done()
	if waits {
		pl.shared.waiting.Judged(pod.UID, question, wakeup.Seen{Usage: snapshot.Revision, Inventory: c.Inventory.Generation()})
	}

	// 5. Whether it can be tried now.
	var refusal wakeup.Refusal
	pausesUntil := pl.shared.memory.Attempts.PausesUntil(pod.UID)
	switch now := pl.binder.Clock.Now(); {
	case errors.Is(err, demand.ErrEvaluation):
		refusal = wakeup.Refusal{Undecided: true, NotBefore: pl.time.HasTimeAt(pod)}
		err = errors.New(podevents.Join(err.Error(), searchtime.PutOff(pod, refusal.NotBefore, now)))
	case err != nil:
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable).WithError(err)
	case inGroup && now.Before(pausesUntil):
		refusal, err = wakeup.Refusal{NotBefore: pausesUntil}, errPausing
	}
	if err != nil {
		if attempted {
			pl.shared.waiting.Refused(pod.UID, refusal, pl.binder.Clock.Now())
		}
		return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable).WithError(err)
	}
	c.Claims, c.Base, c.Extended = asked.Claims, &extended.Variant{Requests: asked.Requests}, asked.Extended
	for i := range c.Claims {
		pc := &c.Claims[i]
		c.Holders.Own.Insert(pc.Claim.UID)
		if user, ok := ofGroup[pc.Claim.Name]; ok {
			pc.User = user
		}
	}
	return c, nil
}
