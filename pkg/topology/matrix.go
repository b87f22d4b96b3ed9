// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package topology

// The closeness of two GPUs is perNVLink for each link between them, and one of the others. A link is worth more than
// any difference on the PCI bus.
const (
	perNVLink    = 100
	samePCIeRoot = 30
	sameNUMANode = 20
	sameMachine  = 10
)

// Device is a GPU, and where it is on its machine.
type Device struct {
	// NUMANode is nil where it is not known.
	NUMANode *int
	// PCIeRoot is the root complex, "pci0000:15"; empty where it is not known.
	PCIeRoot string
	// NVLinks are the links that carry the traffic to other GPUs, by their indices: NV<links> in nvidia-smi topo -m.
	NVLinks map[int]int
}

// Matrix is the closeness of every two GPUs of a machine, by their indices. It does not change.
type Matrix struct {
	n         int
	closeness []int32
}

// NewMatrix compares every two of the devices. Links that only one end knows of count.
func NewMatrix(devices []Device) *Matrix {
	m := &Matrix{n: len(devices), closeness: make([]int32, len(devices)*len(devices))}
	for i := range devices {
		for j := range i {
			c := int32(closeness(&devices[i], &devices[j]) + perNVLink*max(devices[i].NVLinks[j], devices[j].NVLinks[i], 0))
			m.closeness[i*m.n+j], m.closeness[j*m.n+i] = c, c
		}
	}
	return m
}

// closeness on the PCI bus. What is not known of both is not the same.
func closeness(a, b *Device) int {
	switch {
	case a.PCIeRoot != "" && a.PCIeRoot == b.PCIeRoot:
		return samePCIeRoot
	case a.NUMANode != nil && b.NUMANode != nil && *a.NUMANode == *b.NUMANode:
		return sameNUMANode
	default:
		return sameMachine
	}
}

// Len is the number of GPUs.
func (m *Matrix) Len() int { return m.n }

// Closeness of two GPUs; 0 of one to itself. Indices are below Len.
func (m *Matrix) Closeness(i, j int) int { return int(m.closeness[i*m.n+j]) }
