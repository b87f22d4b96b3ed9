// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"

	v1 "k8s.io/api/core/v1"
	fwk "k8s.io/kube-scheduler/framework"
)

// SignPod says whether the answer for a pod may be used for equal pods (KEP-5598). Pods with claims, or with extended
// resources for which a claim may be made, are never equal: each one's claims take devices from the next. For other pods nothing needs to
// be added to what the plugin for resource requests signs.
func (pl *Plugin) SignPod(_ context.Context, pod *v1.Pod) ([]fwk.SignFragment, *fwk.Status) {
	if len(pod.Spec.ResourceClaims) > 0 {
		return nil, fwk.NewStatus(fwk.Unschedulable, "pods with resource claims are scheduled one by one")
	}
	if pl.extended.NeedsDevices(pod) {
		return nil, fwk.NewStatus(fwk.Unschedulable, "pods with extended resources that a device class stands for are scheduled one by one")
	}
	return nil, nil
}
