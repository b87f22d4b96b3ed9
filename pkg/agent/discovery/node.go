package discovery

// Node is what discovery found on one machine.
type Node struct {
	// DriverVersion of the NVIDIA kernel driver, such as "570.172.08".
	DriverVersion string `json:"driverVersion"`
	// CUDADriverVersion is the newest CUDA that the driver serves: "12.8".
	CUDADriverVersion string `json:"cudaDriverVersion"`
	// GPUs in order of their PCI addresses, offered or not.
	GPUs []GPU `json:"gpus"`
	// Failures are GPUs that did not answer.
	Failures []Failure `json:"failures,omitempty"`
}

// GPU is one GPU that answered all questions.
type GPU struct {
	// Name of the device in ResourceSlices, from the PCI address, so that it
	// stays the same over reboots and lost GPUs: "gpu-0000-1b-00-0".
	Name string `json:"name"`
	// Index and Minor are today's numbers; both may change with a reboot.
	Index int `json:"index"`
	Minor int `json:"minor"`
	UUID  string `json:"uuid"`
	// PCIBusID as the kernel writes it: "0000:1b:00.0".
	PCIBusID              string `json:"pciBusID"`
	ProductName           string `json:"productName"`
	Brand                 string `json:"brand"`
	Architecture          string `json:"architecture"`
	CUDAComputeCapability string `json:"cudaComputeCapability"`
	MemoryBytes           uint64 `json:"memoryBytes"`
	// NUMANode is nil where the kernel knows none.
	NUMANode *int `json:"numaNode,omitempty"`
	// PCIeRoot is the root complex: "pci0000:15"; empty where unknown.
	PCIeRoot string `json:"pcieRoot,omitempty"`
	// NVLink is nil for a GPU without an active link.
	NVLink *NVLink `json:"nvlink,omitempty"`
	// MIGEnabled GPUs are partitioned or about to be.
	MIGEnabled bool `json:"migEnabled,omitempty"`
	// NotOffered says why the GPU is not in the ResourceSlices; empty if it is.
	NotOffered string `json:"notOffered,omitempty"`
}

// NVLink tells how a GPU is connected to others.
type NVLink struct {
	Version int `json:"version"`
	// Links that are active.
	Links int `json:"links"`
	// Domain is the same for GPUs that reach each other over NVLink,
	// directly or through others.
	Domain string `json:"domain,omitempty"`
	// Clique is "<cluster UUID>.<clique ID>" of a fabric over several nodes.
	Clique string `json:"clique,omitempty"`
	// Peers are the GPUs of this node reached without a hop over another GPU.
	Peers []Peer `json:"peers,omitempty"`
}

// Peer is a GPU at the other end of NVLinks, or behind the same switches.
type Peer struct {
	Name  string `json:"name"`
	Links int    `json:"links"`
}

// Failure is a GPU that did not answer.
type Failure struct {
	Index int `json:"index"`
	// UUID and PCIBusID as far as they are known.
	UUID     string `json:"uuid,omitempty"`
	PCIBusID string `json:"pciBusID,omitempty"`
	// Reason is the error's text.
	Reason string `json:"reason"`
	Err    error  `json:"-"`
}
