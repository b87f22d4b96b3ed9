// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"

	v1 "k8s.io/api/core/v1"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/demand"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/gate"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// ReasonWaitingForClaim is the reason of the condition PodScheduled while a pod is kept out of the scheduling queue for want of a claim.
const ReasonWaitingForClaim = gate.ReasonWaitingForClaim

// PreEnqueue keeps a pod out of the queue until all its claims exist, are its own where they were made from a
// template, and are not being deleted. Nothing of that would be seen on the pod, so its condition says it, see
// [gate.Pods]. A pod that has a node, see PreFilter, has got them.
func (pl *Plugin) PreEnqueue(ctx context.Context, pod *v1.Pod) *fwk.Status {
	if len(pod.Spec.ResourceClaims) == 0 || pod.Spec.NodeName != "" {
		return nil
	}
	names, err := podclaims.NamesOf(pod)
	if err != nil {
		// The update of the pod's status that brings the name is an event for the pod itself.
		return pl.keepBack(pod, err)
	}
	if !pl.shared.account.Tracker.HasSynced() {
		return nil // PreFilter waits and looks
	}
	if _, err := podclaims.Usable(pl.shared.account.Tracker, pod); err == nil {
		pl.shared.gated.LetIn(pod)
		return nil
	}
	// Looked at again after the pod has been noted as waiting: a change in between would wake nobody.
	pl.shared.waiting.Note(pod, names, pl.waits)
	_, err = podclaims.Usable(pl.shared.account.Tracker, pod)
	pl.shared.waiting.Judged(pod.UID, pl.waits.Question(ctx, pod, &demand.Asked{}, nil, err), pl.shared.waiting.SeenNow())
	if err != nil {
		return pl.keepBack(pod, err)
	}
	pl.shared.gated.LetIn(pod)
	return nil
}

// keepBack keeps a pod out of the queue, unless it is gone.
func (pl *Plugin) keepBack(pod *v1.Pod, err error) *fwk.Status {
	if !pl.shared.gated.Keep(pod, err) {
		return nil
	}
	return fwk.NewStatus(fwk.UnschedulableAndUnresolvable).WithError(err)
}
