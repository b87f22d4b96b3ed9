// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"fmt"
	"io/fs"
	"slices"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/deviceattribute"

	"stowage.dev/stowage/pkg/agent/vfio"
)

// Attributes of a GPU that is offered to virtual machines, beside those of the bus and what NVML said of the GPU.
const (
	AttributeVendorID   resourceapi.QualifiedName = "vendorID"       // string: "0x10de"
	AttributeDeviceID   resourceapi.QualifiedName = "deviceID"       // string: "0x2330"
	AttributeIOMMUGroup resourceapi.QualifiedName = "iommuGroup"     // int
	AttributeIOMMUFD    resourceapi.QualifiedName = "iommuFDEnabled" // bool

	typeVFIO = "vfio"

	passthroughSuffix = "-vfio"
)

// Passthrough is what the kernel says about giving the whole GPU to a virtual machine.
type Passthrough struct {
	VendorID string `json:"vendorID,omitempty"`
	DeviceID string `json:"deviceID,omitempty"`
	// Group is the IOMMU group's number.
	Group string `json:"group,omitempty"`
	// IOMMUFD: the kernel has the newer interface, too.
	IOMMUFD bool `json:"iommufd,omitempty"`
	// Bound tells that vfio-pci has the GPU now, so that NVML does not see it.
	Bound bool `json:"bound,omitempty"`
	// Refused says why the GPU cannot be given to one; empty if it can.
	Refused string `json:"refused,omitempty"`
}

// AskPassthrough asks the kernel again about all GPUs: what is remembered of some may be old. With them change the
// indices of others, as NVML leaves out GPUs that vfio-pci has.
func (n *Node) AskPassthrough(sysfs fs.ReadLinkFS) {
	indices := make([]int, len(n.GPUs))
	for i := range n.GPUs {
		indices[i] = n.IndexOf(&n.GPUs[i])
	}
	for i := range n.GPUs {
		n.GPUs[i].Passthrough = askPassthrough(sysfs, n.GPUs[i].PCIBusID)
	}
	for i := range n.GPUs {
		n.GPUs[i].Index += indices[i] - n.IndexOf(&n.GPUs[i])
	}
}

// askPassthrough reads what the kernel says of the GPU with that address.
func askPassthrough(sysfs fs.ReadLinkFS, address string) *Passthrough {
	gpu, err := vfio.ReadFunction(sysfs, address)
	p := &Passthrough{VendorID: gpu.Vendor, DeviceID: gpu.Device, Bound: gpu.Driver == vfio.Driver, IOMMUFD: vfio.HasIOMMUFD(sysfs)}
	if err != nil {
		p.Refused = err.Error()
		return p
	}
	group, err := vfio.GroupOf(sysfs, address)
	if err != nil {
		p.Refused = err.Error()
		return p
	}
	p.Group = group.ID
	return p
}

// addBound adds to the GPUs that NVML sees those that vfio-pci has. Of them nothing is known but what the kernel says.
func (n *Node) addBound(sysfs fs.ReadLinkFS) {
	functions, err := vfio.GPUs(sysfs)
	if err != nil {
		return // there is no PCI bus, or none that can be read
	}
	for _, f := range functions {
		if f.Driver != vfio.Driver || slices.ContainsFunc(n.GPUs, func(g GPU) bool { return g.PCIBusID == f.Address }) {
			continue
		}
		bound := found{gpu: GPU{Name: deviceName(f.Address), Index: -1, Minor: -1, PCIBusID: f.Address}}
		bound.askBus(sysfs)
		n.GPUs = append(n.GPUs, bound.gpu)
	}
	slices.SortFunc(n.GPUs, func(a, b GPU) int { return strings.Compare(a.PCIBusID, b.PCIBusID) })
}

// Bound tells that vfio-pci has the GPU, so that NVML cannot be asked about it.
func (g *GPU) Bound() bool { return g.Passthrough != nil && g.Passthrough.Bound }

// Unseen tells that NVML has said nothing of the GPU: vfio-pci had it before the agent came, so an administrator gave it to it.
func (g *GPU) Unseen() bool { return g.UUID == "" }

// notSeen is why a GPU that NVML has said nothing of is not offered.
const notSeen = "the driver vfio-pci has it, and it is not offered to virtual machines: give it back to the driver nvidia, or use " +
	"--passthrough"

// offerPassthrough adds the GPU as a device for virtual machines to what it offers as a whole.
func (g *GPU) offerPassthrough(policy *Policy) {
	whole := slices.ContainsFunc(g.Offers, func(o Offer) bool { return o.Partition == nil })
	g.NoPassthrough = ""
	switch {
	case !policy.Passthrough:
	case g.Passthrough == nil:
		g.NoPassthrough = "the kernel has not been asked"
	case g.Passthrough.Refused != "":
		g.NoPassthrough = g.Passthrough.Refused
	case !whole && !g.Unseen():
		g.NoPassthrough = "MIG mode is enabled, and its partitions would be lost"
	default:
		g.Offers = append(g.Offers, Offer{Name: g.Name + passthroughSuffix, Passthrough: true})
	}
}

// passthrough is the device that a virtual machine gets.
func (n *Node) passthrough(gpu *GPU) (attributes, capacities) {
	p := gpu.Passthrough
	a := n.place(gpu)
	a[AttributeType] = stringValue(typeVFIO)
	for name, value := range map[resourceapi.QualifiedName]string{
		AttributeVendorID:     p.VendorID,
		AttributeDeviceID:     p.DeviceID,
		AttributeUUID:         gpu.UUID,
		AttributeProductName:  gpu.ProductName,
		AttributeBrand:        gpu.Brand,
		AttributeArchitecture: gpu.Architecture,
	} {
		if value != "" {
			a[name] = stringValue(value)
		}
	}
	if group, err := strconv.ParseInt(p.Group, 10, 64); err == nil {
		a[AttributeIOMMUGroup] = resourceapi.DeviceAttribute{IntValue: &group}
	}
	iommufd := p.IOMMUFD
	a[AttributeIOMMUFD] = resourceapi.DeviceAttribute{BoolValue: &iommufd}
	if gpu.MemoryBytes == 0 {
		return a, nil
	}
	return a, capacities{CapacityMemory: capacity(int64(gpu.MemoryBytes), resource.BinarySI)}
}

// place is where on the bus a GPU is.
func (n *Node) place(gpu *GPU) attributes {
	a := attributes{deviceattribute.StandardDeviceAttributePCIBusID: stringValue(gpu.PCIBusID)}
	if gpu.PCIeRoot != "" {
		a[deviceattribute.StandardDeviceAttributePCIeRoot] = stringValue(gpu.PCIeRoot)
	}
	if gpu.NUMANode != nil {
		node := int64(*gpu.NUMANode)
		a[deviceattribute.StandardDeviceAttributeNUMANode] = resourceapi.DeviceAttribute{IntValue: &node}
	}
	return a
}

// wholeCounter counts GPUs that have nothing else to be counted, and can be had in two ways.
const wholeCounter = "gpu"

// ErrBound says of a device that the GPU is a virtual machine's.
var ErrBound = fmt.Errorf("the GPU has the driver %s: it is, or was, with a virtual machine", vfio.Driver)
