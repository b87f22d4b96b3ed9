package deviceclaims

import (
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourcehelper "k8s.io/component-helpers/resource"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/util"
)

// extendedResources returns the names under which a pod asks for extended resources that a DeviceClass may
// stand for (KEP-5004), ordered.
func extendedResources(pod *v1.Pod) []v1.ResourceName {
	var names []v1.ResourceName
	for name, quantity := range resourcehelper.PodRequests(pod, resourcehelper.PodResourcesOptions{}) {
		if !quantity.IsZero() && util.IsDRAExtendedResourceName(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// checkExtendedResources refuses a node on which a DeviceClass stands for an extended resource of the pod.
//
// NodeResourcesFit leaves such resources, on nodes without a device plugin for them, to the plugin that
// allocates claims. This plugin makes no claims for them: without a check the pod would be bound and find no
// device. The resolver is the one that NodeResourcesFit decides by.
func (pl *Plugin) checkExtendedResources(names []v1.ResourceName, node fwk.NodeInfo) *fwk.Status {
	if len(names) == 0 {
		return nil
	}
	manager := pl.handle.SharedDRAManager()
	if manager == nil {
		return nil // then NodeResourcesFit leaves nothing to others
	}
	resolver := manager.DeviceClassResolver()
	allocatable := node.GetAllocatable().GetScalarResources()
	for _, name := range names {
		if allocatable[name] > 0 {
			continue // there is a device plugin
		}
		if class := resolver.GetDeviceClass(name); class != nil {
			return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, fmt.Sprintf(
				"extended resource %s is provided by device class %s, and %s does not serve extended resources: use a ResourceClaim", name, class.Name, Name))
		}
	}
	return nil
}
