// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package passage brings the claims of a pod that is being bound past the fence (pkg/fence): it waits there, and withdraws
// the pod from claims that must give way to those of other schedulers. What else was done for the pod, it leaves to whoever
// asks.
package passage

import (
	"context"
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/fence"
	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podmemory"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// Passage is that of one profile's pods.
type Passage struct {
	// Fence is nil if it is disabled: then every pod goes on.
	Fence    *fence.Fence
	Claims   *tracker.Tracker
	Pods     corelisters.PodLister
	Binder   *binding.Binder
	Groups   *podclaims.Groups
	Attempts *podmemory.Attempts
	// NameAll tells that claims of other namespaces are named to a pod's user.
	NameAll bool
	// Ended is the context of the scheduler.
	Ended context.Context //nolint:containedctx // of the process
}

// NewFence returns the fence of a profile, nil if it is not wanted.
func NewFence(t *tracker.Tracker, args *config.FenceArgs) *fence.Fence {
	if !*args.Enabled {
		return nil
	}
	return fence.New(t, fence.Options{Timeout: args.Timeout.Duration, Jitter: args.Jitter.Duration})
}

// Pass lets the pod go on if no other scheduler has allocated the pod's devices before. Every claim passes, also
// those that somebody else allocated, or this scheduler before it was started again.
//
// A pod that may not go on withdraws from the claims that must give way, and gets a [RefusedError].
func (p *Passage) Pass(ctx context.Context, pod *v1.Pod, nodeName string, c *cycle.State) error {
	if p.Fence == nil {
		return nil
	}
	err := p.Fence.Pass(ctx, c.BoundClaims(), func(claim *resourceapi.ResourceClaim) usage.View {
		if p.isInUse(claim) {
			// It has passed a fence with the pod that uses it, so whatever was earlier has been taken into account, also what is not known here.
			return p.Claims.Snapshot().Usage
		}
		return c.Binding.DecidedOn(claim)
	})
	if err == nil {
		return p.checkStillReserved(c)
	}
	yields := fence.Yields(err)
	if errors.Is(err, fence.ErrTimeout) {
		err = fmt.Errorf("not bound to node %s, because it cannot be told whether other schedulers use its devices: %w", nodeName, err)
	}
	p.withdraw(ctx, pod, c, yields)
	return &RefusedError{
		Why: err.Error(), told: Tell(p.NameAll, pod, yields, fmt.Errorf("devices taken back, the pod will be tried again: %w", err)),
	}
}

// Pause is what a pod makes that was refused: both schedulers may have given way. It belongs into the goroutine that binds
// the pod, and after its devices are free, so that it holds up nobody.
func (p *Passage) Pause(ctx context.Context) { p.Fence.Pause(ctx) }

// RefusedError says that the pod may not go on: others were first, or that cannot be told. What else was done for the pod is
// still to be undone.
type RefusedError struct {
	// Why names all claims that were first.
	Why string
	// told is for the pod's user.
	told error
}

func (e *RefusedError) Error() string { return e.told.Error() }
func (e *RefusedError) Unwrap() error { return e.told }

// Tell takes the names of other namespaces' claims from the error.
func Tell(nameAll bool, pod *v1.Pod, yields []*fence.YieldError, err error) error {
	if nameAll {
		return err
	}
	text := err.Error()
	for _, yield := range yields {
		text = podevents.WithoutForeign(text, pod.Namespace, yield.Verdict.Other)
	}
	return &podevents.ToldError{Text: text, Err: err}
}

// isInUse tells whether a pod that has a node uses the claim.
func (p *Passage) isInUse(claim *resourceapi.ResourceClaim) bool {
	pods := p.Pods.Pods(claim.Namespace)
	return slices.ContainsFunc(claim.Status.ReservedFor, func(ref resourceapi.ResourceClaimConsumerReference) bool {
		if ref.Resource == "pods" {
			pod, err := pods.Get(ref.Name)
			return err == nil && pod.UID == ref.UID && pod.Spec.NodeName != ""
		}
		all, err := pods.List(labels.Everything())
		return err == nil && slices.ContainsFunc(all, func(pod *v1.Pod) bool {
			return pod.Spec.NodeName != "" && podclaims.GroupOf(pod) == ref.Name && podclaims.Uses(pod, usage.RefOf(claim))
		})
	})
}

// checkStillReserved fails if a claim has changed while the pod waited at the fence.
func (p *Passage) checkStillReserved(c *cycle.State) error {
	for _, bound := range c.BoundClaims() {
		claim, err := p.Claims.Get(bound.Namespace, bound.Name)
		if apierrors.IsNotFound(err) {
			return podevents.Postpone(podevents.ReasonClaimChanged, bound,
				fmt.Errorf("claim %s: was deleted while the pod was bound", klog.KObj(bound)))
		}
		if err != nil {
			return err
		}
		if claim.UID != bound.UID || claim.Status.Allocation == nil ||
			!podclaims.SameAllocation(claim.Status.Allocation, bound.Status.Allocation) || !podclaims.IsReservedFor(claim, c.UserOf(claim.UID)) {
			return podevents.Postpone(podevents.ReasonClaimChanged, bound,
				fmt.Errorf("claim %s: the reservation was lost while the pod was bound", klog.KObj(bound)))
		}
	}
	return nil
}
