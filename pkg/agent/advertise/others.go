package advertise

import (
	"regexp"
	"strings"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/podresources"
)

// gpuResource are the names by which device plugins offer NVIDIA's GPUs: whole ones, replicas, MIG devices, and those for virtual machines. NICs have
// the prefix nvidia.com, too (nvidia.com/hostdev).
var gpuResource = regexp.MustCompile(`^nvidia\.com/(gpu|pgpu|vgpu|mig-)`)

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
	for _, device := range devices {
		id, err := podresources.ParseDeviceID(device.ID)
		gpu := ""
		if err == nil {
			gpu = gpuOf(node, id)
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

// gpuOf is the name of the GPU with that ID, empty if there is none. The minor number of one that the driver does not have is one of before.
func gpuOf(node *discovery.Node, id podresources.DeviceID) string {
	for i := range node.GPUs {
		gpu := &node.GPUs[i]
		minor := id.Minor != nil && *id.Minor == gpu.Minor && !gpu.Bound() && !gpu.Unseen()
		if minor || id.UUID != "" && id.UUID == gpu.UUID || id.PCIBusID != "" && address(id.PCIBusID) == gpu.PCIBusID {
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

// address is a PCI address as the kernel writes it: nvidia-smi writes the domain with 8 digits, the kernel with 4 unless it needs more.
func address(pci string) string {
	if domain, rest, ok := strings.Cut(pci, ":"); ok {
		return strings.Repeat("0", max(0, 4-len(strings.TrimLeft(domain, "0")))) + strings.TrimLeft(domain, "0") + ":" + rest
	}
	return pci
}
