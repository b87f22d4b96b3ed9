// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"slices"

	v1 "k8s.io/api/core/v1"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
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
