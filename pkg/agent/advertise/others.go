// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package advertise

import (
	"regexp"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/podresources"
)

// gpuResource are the names by which device plugins offer NVIDIA's GPUs: whole ones, replicas, MIG devices, and those for virtual machines,
// which KubeVirt's plugin names as pci.ids does (nvidia.com/GA102GL_A10, nvidia.com/2330). NICs have the prefix, too: nvidia.com/hostdev.
var gpuResource = regexp.MustCompile(`^nvidia\.com/(gpu|pgpu|vgpu|mig-|[A-Z0-9])`)

// MayBeGPU tells whether a device of a device plugin can be one of the node's GPUs, by the form of its ID or its resource's name.
func MayBeGPU(device ledger.PluginDevice) bool {
	if gpuResource.MatchString(device.Resource) {
		return true
	}
	_, err := podresources.ParseDeviceID(device.ID)
	return err == nil
}

// OfPlugins returns the resource by which device plugins offer each GPU, by the GPU's name; of several the first in order. A part of
// a GPU, and a replica, is the GPU that it is of. unknown are devices of resources of GPUs of which it cannot be told which one they are:
// each of the node's may be meant. A PCI address is always told.
func OfPlugins(node *discovery.Node, devices []ledger.PluginDevice) (resources map[string]string, unknown []ledger.PluginDevice) {
	resources = map[string]string{}
	names := namesOf(node)
	for _, device := range devices {
		id, err := podresources.ParseDeviceID(device.ID)
		gpu := ""
		if err == nil {
			whole := id
			whole.GPUInstance, whole.ComputeInstance = nil, nil
			at, _ := podresources.Find(names, whole)
			gpu = at.GPU
		} else if gpuResource.MatchString(device.Resource) {
			gpu = ofGroup(node, device.ID)
		}
		switch {
		case gpu == "" && gpuResource.MatchString(device.Resource) && id.PCIBusID == "":
			unknown = append(unknown, device)
		case gpu != "" && (resources[gpu] == "" || device.Resource < resources[gpu]):
			resources[gpu] = device.Resource
		}
	}
	return resources, unknown
}

// ofGroup is the GPU of that IOMMU group, which is the ID that KubeVirt's plugin has; empty if there is none.
func ofGroup(node *discovery.Node, group string) string {
	for i := range node.GPUs {
		if p := node.GPUs[i].Passthrough; p != nil && p.Group != "" && p.Group == group {
			return node.GPUs[i].Name
		}
	}
	return ""
}

// namesOf are the node's GPUs as device plugins name them. The minor number of one that the driver does not have is one of before.
func namesOf(node *discovery.Node) []podresources.GPU {
	names := make([]podresources.GPU, len(node.GPUs))
	for i := range node.GPUs {
		gpu := &node.GPUs[i]
		names[i] = podresources.GPU{Name: gpu.Name, UUID: gpu.UUID, PCIBusID: gpu.PCIBusID, Minor: gpu.Minor}
		if gpu.Bound() || gpu.Unseen() {
			names[i].Minor = -1
		}
		for _, instance := range gpu.MIGInstances {
			for _, device := range instance.Devices {
				names[i].MIG = append(names[i].MIG, podresources.MIGDevice{UUID: device.UUID})
			}
		}
	}
	return names
}
