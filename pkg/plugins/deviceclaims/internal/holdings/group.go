// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package holdings

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// GiveUpFor gives up what keeps a pod of the group off nodes. It returns nil if there is nothing of that kind.
func (h *Holdings) GiveUpFor(ctx context.Context, c *cycle.State, pod *v1.Pod) *fwk.Status {
	if status := h.giveUpExtended(ctx, pod, c.Extended.Made()); status != nil {
		return status
	}
	if obstacle := h.Refusals.Obstacle(ctx, c, pod); obstacle != nil {
		return h.giveUpObstacle(ctx, pod, obstacle)
	}
	return nil
}

// giveUpExtended removes what an earlier attempt made for the extended resources of a pod of the group.
func (h *Holdings) giveUpExtended(ctx context.Context, pod *v1.Pod, made []*resourceapi.ResourceClaim) *fwk.Status {
	switch removed, err := h.Extended.GiveUp(ctx, pod, made); {
	case err != nil:
		return StatusOf(fmt.Errorf("pod %s: remove what an earlier attempt made for its extended resources: %w", klog.KObj(pod), err))
	case len(removed) > 0:
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
			fmt.Sprintf("pod %s: removed claim %s, which an earlier attempt made for its extended resources", klog.KObj(pod),
				strings.Join(removed, ", ")))
	}
	return nil
}

// giveUpObstacle gives up what is in the way of a pod of the group.
func (h *Holdings) giveUpObstacle(ctx context.Context, pod *v1.Pod, obstacle *binding.GivenUp) *fwk.Status {
	switch err := h.Binder.GiveUp(ctx, pod, obstacle); {
	case err == nil && obstacle.Shared:
		return fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf("pod %s %s", klog.KObj(pod), obstacle))
	case err == nil:
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, fmt.Sprintf("pod %s %s", klog.KObj(pod), obstacle))
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf("claim %s has changed", klog.KObj(obstacle.Claim)))
	default:
		return StatusOf(fmt.Errorf("give up the allocation of claim %s: %w", klog.KObj(obstacle.Claim), err))
	}
}

// GiveUpKept gives up what is reserved for the group, or by a scheduler before for pods of it that fit with it, or were not
// tried, as those after the first one without which the group cannot be are not. It returns nil if there is nothing of that kind.
//
// The queue keeps a group out while one of its pods waits for a claim, and the group keeps what is reserved for it. It does so also if it
// is tried, because PreEnqueue did not know the claims yet, as when a scheduler starts.
func (h *Holdings) GiveUpKept(ctx context.Context, pods []*v1.Pod) (status *fwk.Status) {
	ctx, cancel := context.WithTimeout(ctx, binding.GiveUpTimeout) // for all, as nobody else is scheduled meanwhile: the next attempt goes on
	defer cancel()
	waits := slices.ContainsFunc(pods, func(pod *v1.Pod) bool {
		_, err := podclaims.Usable(h.Claims, pod)
		return err != nil
	})
	for _, pod := range pods {
		names, err := podclaims.NamesOf(pod)
		if err != nil {
			continue // a claim is not made yet, so nothing has been reserved for the pod
		}
		users, err := h.Groups.ClaimsOf(pod)
		if err != nil {
			return moreOf(status, fwk.AsStatus(fmt.Errorf("pod %s: %w", klog.KObj(pod), err)))
		}
		for _, name := range names {
			claim, err := podclaims.Get(h.Claims, pod, name)
			if err != nil {
				continue
			}
			user := podclaims.UserOf(pod)
			if !waits {
				user = cmp.Or(users[name.Name], user)
			}
			if kept := h.Refusals.Kept([]podclaims.Claim{{Claim: claim, User: user}}, pod); kept != nil {
				status = moreOf(status, h.giveUpObstacle(ctx, pod, kept))
			}
		}
		status = moreOf(status, h.giveUpExtended(ctx, pod, h.Extended.MadeFor(pod)))
		if status.Code() == fwk.Error {
			break
		}
	}
	return status
}

// moreOf returns the status that says more about what becomes of the group: an error, that it is tried
// again, that it is left to others, nothing.
func moreOf(a, b *fwk.Status) *fwk.Status {
	order := []fwk.Code{fwk.Success, fwk.Unschedulable, fwk.UnschedulableAndUnresolvable, fwk.Error}
	if slices.Index(order, b.Code()) > slices.Index(order, a.Code()) {
		return b
	}
	return a
}
