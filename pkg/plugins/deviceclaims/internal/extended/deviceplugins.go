// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package extended

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	resourcehelper "k8s.io/component-helpers/resource"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/twopaths"
	"stowage.dev/stowage/pkg/usage"
)

// pluginIsLeaving tells whether a node has turned from a device plugin to claims while pods of the device plugin
// are still there. Nobody but the kubelet knows which devices those hold. The kubelet keeps the resource in the
// node's status, with zero, once there has been a device plugin.
func (r *Resources) pluginIsLeaving(node fwk.NodeInfo, name v1.ResourceName) bool {
	if _, known := node.GetAllocatable().GetScalarResources()[name]; !known {
		return false
	}
	return slices.ContainsFunc(node.GetPods(), func(info fwk.PodInfo) bool { return r.hasFromPlugin(info.GetPod(), name) })
}

// hasFromPlugin tells whether a pod with a node has devices of an extended resource from a device plugin, or is about to get some.
func (r *Resources) hasFromPlugin(pod *v1.Pod, name v1.ResourceName) bool {
	return HoldsFromPlugin(pod, name) && len(r.MadeFor(pod)) == 0 && len(r.Claims.InFlightFor(pod.UID)) == 0
}

// HoldsFromPlugin tells whether a pod with a node asks for an extended resource and its status names no claim for
// it. A pod that is being bound just now may have a claim all the same.
func HoldsFromPlugin(pod *v1.Pod, name v1.ResourceName) bool {
	asks := func(c v1.Container) bool { return quantityOf(&c, name) > 0 }
	if !slices.ContainsFunc(pod.Spec.Containers, asks) && !slices.ContainsFunc(pod.Spec.InitContainers, asks) {
		return false
	}
	status := pod.Status.ExtendedResourceClaimStatus
	return status == nil || !slices.ContainsFunc(status.RequestMappings, func(m v1.ContainerExtendedResourceRequest) bool {
		return m.ResourceName == string(name)
	})
}

// pluginsOn are the devices that device plugins of the node have, nil if none can be a device of its pools.
func (r *Resources) pluginsOn(node fwk.NodeInfo, pools []*inventory.NodePool) twopaths.Plugins {
	var plugins twopaths.Plugins
	// The kubelet keeps a resource in the node's status, with zero, once there has been a device plugin.
	for name, n := range node.GetAllocatable().GetScalarResources() {
		if !slices.ContainsFunc(pools, func(p *inventory.NodePool) bool { return twopaths.IsOf(p.ID().Driver, string(name)) }) {
			continue
		}
		count := twopaths.Offer(n, amount.Int64(node.Node().Status.Capacity[name]))
		for _, info := range node.GetPods() {
			if pod := info.GetPod(); r.hasFromPlugin(pod, name) {
				count.Hold(amount.Int64(resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{ExcludeOverhead: true})[name]))
			}
		}
		if plugins == nil {
			plugins = twopaths.Plugins{}
		}
		plugins[name] = count
	}
	return plugins
}

// unseen is who has the devices that pods may have from a device plugin, in a view made to decide without them.
var unseen = usage.ClaimRef{UID: "pods-of-a-device-plugin"}

// WithUnseen returns the view as if claims had these devices, which pods may have from device plugins.
func WithUnseen(view usage.View, held *resourceapi.AllocationResult) usage.View {
	return view.With(unseen, held)
}

// HeldUnseen are the devices of the node's pools that pods may have from device plugins: of these pools all, as long as the agent has not
// told which. Nil if there are none.
func (r *Resources) HeldUnseen(inv *inventory.View, node fwk.NodeInfo) *resourceapi.AllocationResult {
	if len(node.GetAllocatable().GetScalarResources()) == 0 {
		return nil // as most nodes are: the inventory is not asked
	}
	var held *resourceapi.AllocationResult
	pools := inv.ForNode(node.Node()).Pools
	plugins := r.pluginsOn(node, pools)
	if plugins == nil {
		return nil
	}
	for _, pool := range pools {
		driver := pool.ID().Driver
		if !plugins.KeepFromClaims(driver, pool) {
			continue
		}
		if held == nil {
			held = &resourceapi.AllocationResult{}
		}
		for i := range pool.Len() {
			held.Devices.Results = append(held.Devices.Results,
				resourceapi.DeviceRequestAllocationResult{Driver: driver, Pool: pool.ID().Pool, Device: pool.Device(i).Name})
		}
	}
	return held
}

// mayBeClaimed tells whether a claim has a device that the node's device plugin for the resource may give to a pod, too: one that the agent
// says it offers or, as long as the agent has not seen all, any.
func (r *Resources) mayBeClaimed(q Question, name v1.ResourceName) bool {
	devices := q.Inventory.ForNode(q.Node.Node())
	untold := []usage.PoolID{{Driver: twopaths.DriverOf(string(name)), Pool: q.Node.Node().Name}}
	for _, problem := range devices.Problems {
		if twopaths.IsOf(problem.Pool.Driver, string(name)) {
			untold = append(untold, usage.PoolID(problem.Pool))
		}
	}
	for _, pool := range devices.Pools {
		id := usage.PoolID(pool.ID())
		if !twopaths.IsOf(id.Driver, string(name)) {
			continue
		}
		untold = slices.DeleteFunc(untold, func(u usage.PoolID) bool { return u == id })
		held := q.Usage().Pool(id)
		if held.Len() > 0 &&
			r.pluginsOn(q.Node, devices.Pools).KeepFromPods(id.Driver, pool, func(device string) bool { return held.Device(device) != nil }) {
			return true
		}
	}
	// A kubelet that starts deletes the node's slices. Until they are back nobody says which devices are whose.
	return slices.ContainsFunc(untold, func(id usage.PoolID) bool { return q.Usage().Pool(id).Len() > 0 })
}
