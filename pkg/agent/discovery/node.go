// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import "stowage.dev/stowage/pkg/agent/nvml"

// NamePrefix begins the names of all GPUs.
const NamePrefix = "gpu-"

// Node is what discovery found on one machine.
type Node struct {
	// DriverVersion of the NVIDIA kernel driver, such as "570.172.08".
	DriverVersion string `json:"driverVersion"`
	// CUDADriverVersion is the newest CUDA that the driver serves: "12.8".
	CUDADriverVersion string `json:"cudaDriverVersion"`
	// GPUs that answered, offered or not, in order of their PCI addresses.
	GPUs []GPU `json:"gpus"`
	// Failures are GPUs that did not answer, in NVML's order.
	Failures []Failure `json:"failures,omitempty"`
}

// GPU is one GPU that said what must be known to hand it out.
type GPU struct {
	// Name of the device in ResourceSlices, from the PCI address, so that it
	// stays the same over reboots and lost GPUs: "gpu-0000-1b-00-0".
	Name string `json:"name"`
	// Index and Minor are today's numbers; both may change with a reboot. A GPU that NVML does not number has the index -1.
	Index int    `json:"index"`
	Minor int    `json:"minor"`
	UUID  string `json:"uuid"`
	// PCIBusID as the kernel writes it: "0000:1b:00.0".
	PCIBusID     string `json:"pciBusID"`
	ProductName  string `json:"productName"`
	Brand        string `json:"brand"`
	Architecture string `json:"architecture"`
	// CUDAComputeCapability is "major.minor".
	CUDAComputeCapability string `json:"cudaComputeCapability"`
	// MemoryBytes is all memory, including what the driver keeps for itself.
	MemoryBytes uint64 `json:"memoryBytes"`
	// AddressingMode is how the GPU reaches the machine's memory: "HMM", "ATS" or "None"; empty where that is not known.
	AddressingMode string `json:"addressingMode,omitempty"`
	// NUMANode is nil where the kernel knows none.
	NUMANode *int `json:"numaNode,omitempty"`
	// PCIeRoot is the root complex, "pci0000:15"; empty where unknown.
	PCIeRoot string `json:"pcieRoot,omitempty"`
	// PortLanes is how many PCIe lanes the port above the GPU has; 0 where that is not known.
	PortLanes int `json:"portLanes,omitempty"`
	// NVLink is nil for a GPU without an active link.
	NVLink *NVLink `json:"nvlink,omitempty"`
	// MIGEnabled tells that the GPU is partitioned.
	MIGEnabled bool `json:"migEnabled,omitempty"`
	// MIG is nil for a GPU that cannot be partitioned.
	MIG *MIG `json:"-"`
	// MIGInstances that there are, whoever made them.
	MIGInstances []nvml.GPUInstance `json:"migInstances,omitempty"`
	// Offers are the devices that claims can have of it; see Node.Offer.
	Offers []Offer `json:"-"`
	// Passthrough is nil where the kernel was not asked.
	Passthrough *Passthrough `json:"passthrough,omitempty"`
	// NoPassthrough says why the GPU is not offered to virtual machines although the node's are; see Node.Offer.
	NoPassthrough string `json:"noPassthrough,omitempty"`
	// NotOffered says why the GPU is not in the ResourceSlices; empty if it is.
	NotOffered string `json:"notOffered,omitempty"`
	// Warnings say what could not be found out: such facts are not published.
	Warnings []string `json:"warnings,omitempty"`
}

// NVLink tells how a GPU is connected to others.
type NVLink struct {
	// Version of NVLink, 4 for an H100.
	Version int `json:"version"`
	// Links that are active.
	Links int `json:"links"`
	// Domain is the same for GPUs that are connected over NVLink, and differs
	// from any other on the node: the clique where there is one, otherwise made
	// from the lowest PCI address, "nvlink-0000-1b-00-0". Empty for a GPU
	// whose links lead to no other GPU.
	Domain string `json:"domain,omitempty"`
	// Clique names a fabric over several nodes: "<cluster UUID>.<clique ID>",
	// as in the node label nvidia.com/gpu.clique.
	Clique string `json:"clique,omitempty"`
	// Peers are the node's GPUs reached without a hop over a third GPU, in
	// order of their PCI addresses.
	Peers []Peer `json:"peers,omitempty"`
}

// Peer is a GPU at the other end of NVLinks, or behind the same switches.
type Peer struct {
	Name string `json:"name"`
	// Links that carry the traffic: NV<links> in nvidia-smi topo -m.
	Links int `json:"links"`
}

// Failure is a GPU that did not answer. It is not published.
type Failure struct {
	// Index in NVML's order.
	Index int `json:"index"`
	// UUID and PCIBusID as far as they are known.
	UUID     string `json:"uuid,omitempty"`
	PCIBusID string `json:"pciBusID,omitempty"`
	// Reason is the text of Err.
	Reason string `json:"reason"`
	Err    error  `json:"-"`
	// Candidates are the GPUs on the bus that it may be, by device name, if it does not say which it is.
	Candidates []string `json:"candidates,omitempty"`
}
