// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package numa

import (
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/util"
)

// seenBy is the pod as the Topology Manager of the node's kubelet sees it: without the extended resources that the node
// gives to claims (KEP-5004).
func (pl *Plugin) seenBy(node fwk.NodeInfo, pod *v1.Pod) *v1.Pod {
	provided := node.GetAllocatable().GetScalarResources()
	return without(pod, func(name v1.ResourceName) bool {
		return util.IsDRAExtendedResourceName(name) && provided[name] == 0 && pl.classOf(name) != nil
	})
}

// classOf returns the class that stands for an extended resource, nil if there is none. The resolver is the one that
// NodeResourcesFit decides by.
func (pl *Plugin) classOf(name v1.ResourceName) *resourceapi.DeviceClass {
	manager := pl.handle.SharedDRAManager()
	if manager == nil {
		return nil
	}
	return manager.DeviceClassResolver().GetDeviceClass(name)
}

// without returns the pod with what its containers request less some resources. The pod itself is not changed, and
// returned as it is if it has none of them.
func without(pod *v1.Pod, claimed func(v1.ResourceName) bool) *v1.Pod {
	requestsAny := func(containers []v1.Container) bool {
		return slices.ContainsFunc(containers, func(c v1.Container) bool {
			for name := range c.Resources.Requests {
				if claimed(name) {
					return true
				}
			}
			return false
		})
	}
	if !requestsAny(pod.Spec.Containers) && !requestsAny(pod.Spec.InitContainers) {
		return pod
	}
	changed := *pod
	for _, containers := range []*[]v1.Container{&changed.Spec.Containers, &changed.Spec.InitContainers} {
		*containers = slices.Clone(*containers)
		for i := range *containers {
			requests := maps.Clone((*containers)[i].Resources.Requests)
			maps.DeleteFunc(requests, func(name v1.ResourceName, _ resource.Quantity) bool { return claimed(name) })
			(*containers)[i].Resources.Requests = requests
		}
	}
	return &changed
}
