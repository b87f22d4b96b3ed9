// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"slices"

	v1 "k8s.io/api/core/v1"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/usage"
)

// hasFailed tells whether a node that satisfies the requests does so only with what failed for the pod.
//
// It does not matter to pods of a group, see tryGroupAgain, nor to preemption: devices that failed
// are looked for when nothing else is left, and then whoever has them must be seen to be in the way.
func (pl *Plugin) hasFailed(ctx context.Context, c *cycle.State, in allocator.Input) bool {
	if c.Failed == nil || c.Trial != nil || c.WhatIf.IsDryRun() {
		return false
	}
	if c.Failed.TooOften(in.Node.Name) {
		return true
	}
	pools := contention.PoolsOf(in.Node, c.Inventory)
	if !slices.ContainsFunc(c.Failed.Devices, func(id usage.DeviceID) bool { return slices.Contains(pools, id.PoolID()) }) {
		return false
	}
	in.Usage = c.Failed.Without(in.Usage)
	return !allocator.Check(ctx, in).Fits()
}

// tryAgain ends an attempt for which nothing was left but what had failed for the pod before: that may be tried now. It is
// nil if there is something else to wait for.
func (pl *Plugin) tryAgain(ctx context.Context, c *cycle.State, pod *v1.Pod) *fwk.Status {
	if !c.Results.Failed.Load() {
		return nil
	}
	pl.shared.memory.Failed.Relax(pod.UID)
	tryAtOnce(ctx, pl.handle, pod)
	return fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
		"devices that could not be made ready for the pod are tried again, as there are no others")
}

// tryGroupAgain ends an attempt of a group that would fit if none of its pods avoided what had failed for it before: what such a pod
// took instead may be what another one needs. Those that have found a node forget then. It is nil if that would not help: a group
// that lacks something else is tried again and again, and would meet the same devices once it fits.
func (s *Shared) tryGroupAgain(
	ctx context.Context, pods []*v1.Pod, found *cycle.Group, schedule fwk.PodGroupSchedulingFunc,
) *fwk.Status {
	avoiding := slices.DeleteFunc(slices.Clone(pods), func(pod *v1.Pod) bool {
		c := found.Pods[pod.UID]
		return c == nil || !c.Placed || c.Failed == nil
	})
	if len(avoiding) == 0 {
		return nil
	}
	if !s.common.Trial.Fits(ctx, schedule, nil, true) {
		return nil
	}
	for _, pod := range avoiding {
		s.memory.Failed.Relax(pod.UID)
	}
	return fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
		"devices that could not be made ready for pods of the group are tried again, as it does not fit without them")
}
