// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/tracker"
)

// Explain is why a pod that has been through PreFilter and Filter with the state has no node for its claims, node by node for the first
// perNode nodes by name. It is nil if devices were not the reason, or PreFilter has refused the pod. It decides nothing: a simulation asks.
func Explain(ctx context.Context, pl *Plugin, state fwk.CycleState, pod *v1.Pod, perNode int) (*explain.Explanation, error) {
	c, err := cycle.Read(state)
	if err != nil || c == nil {
		return nil, err
	}
	found := pl.refusals.Missing(ctx, c, pod)
	if wanted := c.Results.MostRefused(); found != nil && perNode > 0 {
		found.PerNode = allocator.ExplainNodes(wanted.Requests, c.Results.FailuresFor(wanted.Requests), perNode)
	}
	return found, nil
}

// WaitForSync waits until the plugin has seen all claims, slices and classes once. Before that PreEnqueue lets pods pass, and leaves them
// to PreFilter. The error is that ctx has ended, or that it took longer than 10 s.
func WaitForSync(ctx context.Context, pl *Plugin) error { return pl.shared.account.WaitForSync(ctx) }

// Reserved is what Reserve has decided for the pod of the state, claim by claim.
func Reserved(state fwk.CycleState) ([]tracker.Reservation, error) {
	c, err := cycle.Read(state)
	if err != nil || c == nil {
		return nil, err
	}
	return slices.Clone(c.Binding.Reserved), nil
}

// Enter enters what Reserve has decided for the pod into a claim, as PreBind does, but writes nothing to the API. From then on others who
// share the claim can use it.
func Enter(pl *Plugin, pod *v1.Pod, claim *resourceapi.ResourceClaim, allocation *resourceapi.AllocationResult) error {
	claim = claim.DeepCopy()
	claim.Status.Allocation = allocation
	if user := podclaims.UserOf(pod); !podclaims.IsReservedFor(claim, user.UID) {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, user)
	}
	version := claim.ResourceVersion
	if _, err := resourceversion.CompareResourceVersion(version, version); err != nil {
		version = "1" // after what cannot be compared comes any
	}
	claim.ResourceVersion = version + "0" // a later one, however many digits it has
	if err := pl.shared.account.Tracker.Assume(claim); err != nil {
		return fmt.Errorf("enter the allocation of claim %s: %w", klog.KObj(claim), err)
	}
	pl.shared.account.Tracker.Release(claim.UID, pod.UID)
	pl.shared.books.Places.Leave(claim.UID, pod.UID)
	return nil
}
