// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"stowage.dev/stowage/pkg/agent/config"
)

// Attributes and capacity of a GPU, in the driver's domain: the names that
// NVIDIA's DRA driver publishes, and ours for NVLink and sharing. Beside them stand
// resource.kubernetes.io/{pciBusID,pcieRoot,numaNode}.
const (
	AttributeType                  resourceapi.QualifiedName = "type"                  // "gpu", "mig" or "vfio"
	AttributeUUID                  resourceapi.QualifiedName = "uuid"                  // string
	AttributeProductName           resourceapi.QualifiedName = "productName"           // string
	AttributeBrand                 resourceapi.QualifiedName = "brand"                 // string
	AttributeArchitecture          resourceapi.QualifiedName = "architecture"          // string
	AttributeCUDAComputeCapability resourceapi.QualifiedName = "cudaComputeCapability" // version
	AttributeDriverVersion         resourceapi.QualifiedName = "driverVersion"         // version
	AttributeCUDADriverVersion     resourceapi.QualifiedName = "cudaDriverVersion"     // version
	AttributeAddressingMode        resourceapi.QualifiedName = "addressingMode"        // string: "HMM", "ATS" or "None"
	AttributeMIGCapable            resourceapi.QualifiedName = "migCapable"            // bool, of a whole GPU: it can be partitioned
	AttributeNVLinkDomain          resourceapi.QualifiedName = "nvlinkDomain"          // string, see NVLink.Domain
	AttributeNVLinkClique          resourceapi.QualifiedName = "nvlinkClique"          // string, see NVLink.Clique
	// string: "TimeSlicing,MPS", one of them, or "none"
	AttributeSharingStrategies resourceapi.QualifiedName = config.AttributeStrategies
	AttributeSharedByNamespace resourceapi.QualifiedName = config.AttributeSharedByNamespace // bool: true or absent
	CapacityMemory             resourceapi.QualifiedName = "memory"                          // bytes

	// Of partitions.
	AttributeParentUUID resourceapi.QualifiedName = "parentUUID" // string
	AttributeProfile    resourceapi.QualifiedName = "profile"    // string, such as "1g.10gb"

	typeGPU = "gpu"
	typeMIG = "mig"
)

// DriverResources returns what the node's GPUs look like to the scheduler: one
// pool with a slice for each GPU that offers something, so that a change of one
// rewrites no other, in order of their PCI addresses. Counter sets of GPUs whose
// devices exclude each other come before, in slices of their own, as the API has
// it. Without any GPU it is one empty slice, which tells that the driver runs.
func (n *Node) DriverResources(pool string) resourceslice.DriverResources {
	var slices, counters []resourceslice.Slice
	for i := range n.GPUs {
		gpu := &n.GPUs[i]
		if len(gpu.Offers) == 0 {
			continue
		}
		var slice resourceslice.Slice
		for o := range gpu.Offers {
			slice.Devices = append(slice.Devices, n.Device(gpu, &gpu.Offers[o]))
		}
		slices = append(slices, slice)
		if !gpu.counted() {
			continue
		}
		last := len(counters) - 1
		if last < 0 || len(counters[last].SharedCounters) == resourceapi.ResourceSliceMaxCounterSets {
			counters = append(counters, resourceslice.Slice{})
			last++
		}
		counters[last].SharedCounters = append(counters[last].SharedCounters, gpu.counterSet())
	}
	if len(slices) == 0 {
		slices = []resourceslice.Slice{{}}
	}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{pool: {Slices: append(counters, slices...)}}}
}

// Device returns what is published of an offer.
func (n *Node) Device(gpu *GPU, offer *Offer) resourceapi.Device {
	device := resourceapi.Device{Name: offer.Name}
	if offer.Passthrough {
		device.Attributes, device.Capacity = n.passthrough(gpu)
	} else if offer.Partition == nil {
		device.Attributes, device.Capacity = n.wholeGPU(gpu)
	} else {
		device.Attributes, device.Capacity = n.partition(gpu, offer.Partition)
	}
	if offer.Strategies != "" {
		device.Attributes[AttributeSharingStrategies] = stringValue(offer.Strategies)
	}
	if offer.SharedByNamespace {
		device.Attributes[AttributeSharedByNamespace] = resourceapi.DeviceAttribute{BoolValue: new(true)}
	}
	if offer.Shares != nil {
		offer.Shares.divide(&device)
	}
	if gpu.counted() {
		device.ConsumesCounters = gpu.consumes(offer)
	}
	return device
}

type (
	attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute
	capacities = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity
)

func (n *Node) wholeGPU(gpu *GPU) (attributes, capacities) {
	a := n.common(gpu)
	a[AttributeType] = stringValue(typeGPU)
	a[AttributeUUID] = stringValue(gpu.UUID)
	a[AttributeMIGCapable] = resourceapi.DeviceAttribute{BoolValue: new(gpu.MIG != nil)}
	if gpu.AddressingMode != "" {
		a[AttributeAddressingMode] = stringValue(gpu.AddressingMode)
	}
	if gpu.NVLink != nil && gpu.NVLink.Domain != "" {
		a[AttributeNVLinkDomain] = stringValue(gpu.NVLink.Domain)
	}
	if gpu.NVLink != nil && gpu.NVLink.Clique != "" {
		a[AttributeNVLinkClique] = stringValue(gpu.NVLink.Clique)
	}
	return a, capacities{CapacityMemory: capacity(int64(gpu.MemoryBytes), resource.BinarySI)}
}

// partition has no NVLink: peers cannot be reached from one.
func (n *Node) partition(gpu *GPU, p *Partition) (attributes, capacities) {
	a := n.common(gpu)
	a[AttributeType] = stringValue(typeMIG)
	a[AttributeParentUUID] = stringValue(gpu.UUID)
	a[AttributeProfile] = stringValue(p.Name())
	if p.UUID != "" {
		a[AttributeUUID] = stringValue(p.UUID)
	}
	c := capacities{CapacityMemory: capacity(int64(p.Profile.MemoryMiB)<<20, resource.BinarySI)}
	for _, u := range units {
		c[u.capacity] = capacity(int64(u.of(p.Profile)), resource.DecimalSI)
	}
	if p.Compute != nil {
		// Its memory and engines are not its own, so it has no slices of the memory, of which each is one device's.
		c[CapacityMultiprocessors] = capacity(int64(p.Multiprocessors), resource.DecimalSI)
		return a, c
	}
	for slice := p.At.Start; slice < p.At.Start+p.At.Size; slice++ {
		c[sliceCapacity(slice)] = capacity(1, resource.DecimalSI)
	}
	return a, c
}

// common is what a GPU and its partitions have alike.
func (n *Node) common(gpu *GPU) attributes {
	a := n.place(gpu)
	a[AttributeProductName] = stringValue(gpu.ProductName)
	a[AttributeBrand] = stringValue(gpu.Brand)
	a[AttributeArchitecture] = stringValue(gpu.Architecture)
	a[AttributeCUDAComputeCapability] = versionValue(gpu.CUDAComputeCapability)
	a[AttributeDriverVersion] = versionValue(n.DriverVersion)
	a[AttributeCUDADriverVersion] = versionValue(n.CUDADriverVersion)
	return a
}

func capacity(n int64, format resource.Format) resourceapi.DeviceCapacity {
	return resourceapi.DeviceCapacity{Value: *resource.NewQuantity(n, format)}
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
