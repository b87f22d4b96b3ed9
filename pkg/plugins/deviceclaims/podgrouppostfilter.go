package deviceclaims

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
)

// PodGroupPostFilter helps a group of pods for which no placement was found, as PostFilter helps a single pod: it gives
// up an allocation that keeps its own pod off every node. The framework keeps from it what each pod's attempt found
// out, so each pod of the group is looked at anew.
func (pl *Plugin) PodGroupPostFilter(ctx context.Context, _ fwk.PodGroupCycleState, group fwk.PodGroupInfo, _ fwk.PodGroupSchedulingFunc) (*fwk.PodGroupPostFilterResult, *fwk.Status) {
	for _, pod := range group.GetUnscheduledPods() {
		c := pl.lookAgain(pod)
		if c == nil || pl.hasDevicesSomewhere(ctx, c) {
			continue
		}
		obstacle := pl.obstacle(ctx, c, pod)
		if obstacle == nil {
			continue
		}
		switch err := pl.deallocate(ctx, pod, obstacle.claim); {
		case err == nil:
			return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable,
				fmt.Sprintf("pod %s gave up the allocation of claim %s, %s", klog.KObj(pod), klog.KObj(obstacle.claim), obstacle.reason))
		case apierrors.IsConflict(err), apierrors.IsNotFound(err):
			return nil, fwk.NewStatus(fwk.Unschedulable, fmt.Sprintf("claim %s has changed", klog.KObj(obstacle.claim)))
		default:
			return nil, fwk.AsStatus(fmt.Errorf("give up the allocation of claim %s: %w", klog.KObj(obstacle.claim), err))
		}
	}
	return nil, fwk.NewStatus(fwk.Unschedulable)
}

// lookAgain returns what PreFilter would find out about the pod, nil if it would refuse it or has nothing to do.
func (pl *Plugin) lookAgain(pod *v1.Pod) *cycle {
	names, err := claimNames(pod)
	if err != nil || len(names) == 0 && !pl.needsDevices(pod) {
		return nil
	}
	inv := pl.shared.store.View()
	found, err := pl.ask(pod, names, inv)
	if err != nil {
		return nil
	}
	return &cycle{
		plan:    &plan{claims: found.claims, base: &variant{requests: found.requests}, extended: found.extended, usage: pl.shared.tracker.Snapshot().Usage, inventory: inv, policy: pl.policy, scoring: pl.scoring, stakes: newStakes(pl)},
		results: newResults(nil), binding: &binding{},
	}
}

// hasDevicesSomewhere tells whether on some node all allocated claims of the pod can be used, and the others have
// devices. It notes which claims rule out nodes.
func (pl *Plugin) hasDevicesSomewhere(ctx context.Context, c *cycle) bool {
	nodes, err := pl.handle.SnapshotSharedLister().NodeInfos().List()
	if err != nil {
		return true // nothing is known, so nothing is given up
	}
	for _, info := range nodes {
		node := info.Node()
		if !pl.filterAllocated(c, node).IsSuccess() {
			continue
		}
		wanted, status := pl.requestsOn(c, info)
		if !status.IsSuccess() {
			continue
		}
		if wanted.requests == nil || allocator.Check(ctx, c.input(ctx, wanted.requests, node)).Fits() {
			return true
		}
		if ctx.Err() != nil {
			return true
		}
	}
	return false
}
