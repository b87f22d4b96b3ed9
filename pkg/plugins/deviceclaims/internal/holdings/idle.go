// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package holdings has pods that wait give up what they hold: what is reserved for them, or for their group, by an attempt
// that came to nothing. It does not find out what is in a pod's way.
//
// A pod that waits holds nothing, see [refusals.Finder.Obstacle]. One that is refused before any node is looked at waits for
// a claim or a class, perhaps for ever, and an earlier attempt, of a scheduler that has ended for one, may have left it
// others of its claims. Nobody could get these devices, whatever the priority: preemption evicts only who has a node.
package holdings

import (
	"context"
	"errors"
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podmemory"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/refusals"
)

// Holdings are those of one profile's pods.
type Holdings struct {
	Claims   podclaims.Getter
	Binder   *binding.Binder
	Groups   *podclaims.Groups
	Extended *extended.Resources
	Attempts *podmemory.Attempts
	// Refusals finds out what is in a pod's way.
	Refusals *refusals.Finder
}

// GiveUpIdle gives up what is reserved for a pod that is tried, and says what that was. What is reserved for the pod's
// group stays for the pods that come, see PodGroupPostFilter.
func (h *Holdings) GiveUpIdle(ctx context.Context, pod *v1.Pod) (given string, err error) {
	return h.giveUpIdle(ctx, pod, func(*resourceapi.ResourceClaim) error { return nil })
}

// giveUpIdle is GiveUpIdle for a pod that may be tried meanwhile. check is asked after a claim has been looked at and before it is written.
func (h *Holdings) giveUpIdle(ctx context.Context, pod *v1.Pod, check func(*resourceapi.ResourceClaim) error) (given string, err error) {
	ctx, cancel := context.WithTimeout(ctx, binding.GiveUpTimeout) // for all, as nobody else may be scheduled meanwhile
	defer cancel()
	names := sets.New(podclaims.NamedBy(pod)...)
	for _, claim := range h.Extended.MadeFor(pod) { // the pod's status may not name it yet
		names.Insert(claim.Name)
	}
	var all []string
	var failed []error
	for _, name := range sets.List(names) {
		claim, err := h.Claims.Get(pod.Namespace, name)
		if err != nil || claim.Status.Allocation == nil || !podclaims.IsReservedFor(claim, pod.UID) {
			continue
		}
		idle := refusals.Idle(claim, pod)
		if err = check(claim); err == nil {
			err = h.Binder.GiveUp(ctx, pod, idle)
		}
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("give up the reservation of claim %s: %w", klog.KObj(claim), err))
			continue
		}
		all = append(all, idle.String())
	}
	return strings.Join(all, "; "), errors.Join(failed...)
}

// errBinding says that a pod has been let in and tried meanwhile.
var errBinding = errors.New("the pod is being bound")

// GiveUpKeptBack gives up what is reserved for a pod that PreEnqueue keeps back. It may be let in and tried meanwhile. If it is to be bound
// then with a claim as it is now, it has been noted in attempts before that, or writes to the claim first, because of the doubt.
func (h *Holdings) GiveUpKeptBack(ctx context.Context, pod *v1.Pod) error {
	_, err := h.giveUpIdle(ctx, pod, func(claim *resourceapi.ResourceClaim) error {
		h.Binder.Doubts.Note(claim, errBinding)
		if h.Attempts.Of(pod.UID) != nil {
			return errBinding
		}
		return nil
	})
	return err
}

// StatusOf says why nothing could be given up for the pod. Who has a node, or is about to get one, needs nobody evicted, so the
// plugins after this one are not asked.
func StatusOf(err error) *fwk.Status {
	var bound *binding.BoundError
	var adopted *binding.AdoptedError
	switch {
	case errors.As(err, &bound):
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, bound.Error())
	case errors.As(err, &adopted):
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, adopted.Error())
	}
	return fwk.AsStatus(err)
}
