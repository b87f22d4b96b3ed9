package discovery

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// Attributes and capacity of a GPU, in the driver's domain: the names that
// NVIDIA's DRA driver publishes, and two of ours for NVLink. Beside them stand
// resource.kubernetes.io/{pciBusID,pcieRoot,numaNode}.
const (
	AttributeType                  resourceapi.QualifiedName = "type"                  // "gpu"
	AttributeUUID                  resourceapi.QualifiedName = "uuid"                  // string
	AttributeProductName           resourceapi.QualifiedName = "productName"           // string
	AttributeBrand                 resourceapi.QualifiedName = "brand"                 // string
	AttributeArchitecture          resourceapi.QualifiedName = "architecture"          // string
	AttributeCUDAComputeCapability resourceapi.QualifiedName = "cudaComputeCapability" // version
	AttributeDriverVersion         resourceapi.QualifiedName = "driverVersion"         // version
	AttributeCUDADriverVersion     resourceapi.QualifiedName = "cudaDriverVersion"     // version
	AttributeNVLinkDomain          resourceapi.QualifiedName = "nvlinkDomain"          // string, see NVLink.Domain
	AttributeNVLinkClique          resourceapi.QualifiedName = "nvlinkClique"          // string, see NVLink.Clique
	CapacityMemory                 resourceapi.QualifiedName = "memory"                // bytes

	typeGPU = "gpu"
)

// DriverResources returns what the node's GPUs look like to the scheduler: one
// pool with a slice for each offered GPU, so that a change of one rewrites no
// other, in order of their PCI addresses. Without any it is one empty slice,
// which tells that the driver runs.
func (n *Node) DriverResources(pool string) resourceslice.DriverResources {
	var slices []resourceslice.Slice
	for i := range n.GPUs {
		if gpu := &n.GPUs[i]; gpu.NotOffered == "" {
			slices = append(slices, resourceslice.Slice{Devices: []resourceapi.Device{n.device(gpu)}})
		}
	}
	if len(slices) == 0 {
		slices = []resourceslice.Slice{{}}
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{pool: {Slices: slices}}}
}

func (n *Node) device(gpu *GPU) resourceapi.Device {
	attributes := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
		AttributeType:                  stringValue(typeGPU),
		AttributeUUID:                  stringValue(gpu.UUID),
		AttributeProductName:           stringValue(gpu.ProductName),
		AttributeBrand:                 stringValue(gpu.Brand),
		AttributeArchitecture:          stringValue(gpu.Architecture),
		AttributeCUDAComputeCapability: versionValue(gpu.CUDAComputeCapability),
		AttributeDriverVersion:         versionValue(n.DriverVersion),
		AttributeCUDADriverVersion:     versionValue(n.CUDADriverVersion),

		deviceattribute.StandardDeviceAttributePCIBusID: stringValue(gpu.PCIBusID),
	}
	if gpu.PCIeRoot != "" {
		attributes[deviceattribute.StandardDeviceAttributePCIeRoot] = stringValue(gpu.PCIeRoot)
	}
	if gpu.NUMANode != nil {
		node := int64(*gpu.NUMANode)
		attributes[deviceattribute.StandardDeviceAttributeNUMANode] = resourceapi.DeviceAttribute{IntValue: &node}
	}
	if gpu.NVLink != nil && gpu.NVLink.Domain != "" {
		attributes[AttributeNVLinkDomain] = stringValue(gpu.NVLink.Domain)
	}
	if gpu.NVLink != nil && gpu.NVLink.Clique != "" {
		attributes[AttributeNVLinkClique] = stringValue(gpu.NVLink.Clique)
	}
	return resourceapi.Device{
		Name:       gpu.Name,
		Attributes: attributes,
		Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
			CapacityMemory: {Value: *resource.NewQuantity(int64(gpu.MemoryBytes), resource.BinarySI)},
		},
	}
}

// stringValue cuts what is longer than the API allows, at a character: a GPU
// with a very long product name is published all the same.
func stringValue(s string) resourceapi.DeviceAttribute {
	for len(s) > resourceapi.DeviceAttributeMaxValueLength {
		_, size := utf8.DecodeLastRuneInString(s)
		s = s[:len(s)-size]
	}
	return resourceapi.DeviceAttribute{StringValue: &s}
}

// versionValue makes a semantic version (semver.org 2.0.0, which the API
// requires) of up to three numbers: "570.172.08" becomes 570.172.8 and "9.0"
// becomes 9.0.0. What is no such version is published as a string.
func versionValue(s string) resourceapi.DeviceAttribute {
	parts := strings.Split(s, ".")
	if len(parts) > 3 {
		return stringValue(s)
	}
	var numbers [3]uint64
	for i, part := range parts {
		n, err := strconv.ParseUint(part, 10, 64)
		if err != nil {
			return stringValue(s)
		}
		numbers[i] = n
	}
	version := fmt.Sprintf("%d.%d.%d", numbers[0], numbers[1], numbers[2])
	return resourceapi.DeviceAttribute{VersionValue: &version}
}
