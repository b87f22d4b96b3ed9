package advertise

import (
	"strings"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/podresources"
)

// OfPlugins returns the resource by which device plugins offer each GPU, by the GPU's name; of several the first in order. A part of
// a GPU, and a replica, is the GPU that it is of. unknown are devices of NVIDIA's resources of which it cannot be told which GPU they are:
// each of the node's may be meant.
func OfPlugins(node *discovery.Node, devices []ledger.PluginDevice) (resources map[string]string, unknown []ledger.PluginDevice) {
	resources = map[string]string{}
	for _, device := range devices {
		id, err := podresources.ParseDeviceID(device.ID)
		gpu := ""
		if err == nil {
			gpu = gpuOf(node, id)
		}
		switch {
		case gpu == "" && strings.HasPrefix(device.Resource, "nvidia.com/"):
			unknown = append(unknown, device)
		case gpu != "" && (resources[gpu] == "" || device.Resource < resources[gpu]):
			resources[gpu] = device.Resource
		}
	}
	return resources, unknown
}

// gpuOf is the name of the GPU with that ID, empty if there is none.
func gpuOf(node *discovery.Node, id podresources.DeviceID) string {
	for i := range node.GPUs {
		gpu := &node.GPUs[i]
		if id.UUID != "" && id.UUID == gpu.UUID || id.PCIBusID != "" && id.PCIBusID == gpu.PCIBusID || id.Minor != nil && *id.Minor == gpu.Minor {
			return gpu.Name
		}
		for _, instance := range gpu.MIGInstances {
			for _, device := range instance.Devices {
				if id.UUID != "" && id.UUID == device.UUID {
					return gpu.Name
				}
			}
		}
	}
	return ""
}
