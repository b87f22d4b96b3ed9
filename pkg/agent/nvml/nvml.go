// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

// Library is an NVML library, real or simulated. Outside of a session every
// method answers a *CallError with ERROR_UNINITIALIZED. Errors of single calls
// are or wrap *CallError: errors.Is finds ErrNotSupported, ErrNotFound,
// ErrGPULost and the others. No method returns before the library does: calls
// into it cannot be cancelled.
type Library interface {
	// Init opens a session; each needs its Shutdown. It may be called any
	// number of times, also after an error: a driver may be loaded later.
	// Its errors wrap a *CallError and, for what an administrator can mend,
	// ErrLibraryNotFound, ErrDriverNotLoaded or ErrVersionMismatch.
	Init() error
	// Shutdown closes a session.
	Shutdown() error
	// DriverVersion of the kernel driver, such as "570.172.08".
	DriverVersion() (string, error)
	// CUDADriverVersion is the newest CUDA that the driver serves.
	CUDADriverVersion() (Version, error)
	// DeviceCount is the number of GPUs; indices run below it.
	DeviceCount() (int, error)
	// Device returns the handle of the GPU with that index.
	Device(index int) (Device, error)
	// DeviceAt returns the handle of the GPU at that PCI address, as the kernel
	// writes it. There is none by UUID: NVML looks for it on all GPUs, which
	// takes long when they are busy, and fails if any has fallen off the bus.
	DeviceAt(busID string) (Device, error)
}

// Device is one GPU.
type Device interface {
	// UUID in NVML's form, "GPU-xxxxxxxx-...".
	UUID() (string, error)
	// Name is the product name.
	Name() (string, error)
	// Brand such as "Nvidia" or "Tesla", in go-nvlib's words.
	Brand() (string, error)
	// Architecture such as "Hopper", in go-nvlib's words.
	Architecture() (string, error)
	// CUDAComputeCapability of the GPU.
	CUDAComputeCapability() (Version, error)
	// PCIBusID as the kernel writes it: "0000:1b:00.0".
	PCIBusID() (string, error)
	// MinorNumber of /dev/nvidia<minor>.
	MinorNumber() (int, error)
	// MemoryBytes is the total memory, including what the driver reserves.
	MemoryBytes() (uint64, error)
	// InVirtualMachine tells whether a hypervisor has passed the GPU, or a part
	// of it, through to this machine.
	InVirtualMachine() (bool, error)
	// AddressingMode is how the GPU reaches the machine's memory: "HMM", "ATS" or
	// "None"; empty where the GPU or the driver does not say.
	AddressingMode() (string, error)
	// MIGMode tells whether the GPU can be and is partitioned.
	MIGMode() (MIGMode, error)
	// NVLinks lists the active links; empty for a GPU without NVLink.
	NVLinks() ([]NVLink, error)
	// ReachesOverNVLink reports whether peer-to-peer traffic to the other
	// GPU goes over NVLink. The error wraps ErrNotSupported where the driver
	// can't tell. The other must come from the same Library.
	ReachesOverNVLink(other Device) (bool, error)
	// Fabric is the NVLink fabric that the GPU is part of; nil if none.
	Fabric() (*Fabric, error)

	Partitions
	Use
	Condition
	Load
}

// Version is a major and minor number.
type Version struct{ Major, Minor int }

// MIGMode of a GPU.
type MIGMode struct {
	// Capable GPUs can be partitioned.
	Capable bool
	// Enabled is the current mode; Pending is the mode after the next reset.
	Enabled, Pending bool
}

// NVLink is one active link of a GPU.
type NVLink struct {
	Index int
	// Version is the generation, 4 for an H100; 0 for one that is not known.
	Version int
	// Remote is what the other end is.
	Remote RemoteType
	// RemotePCIBusID of the other end; empty where NVML doesn't know it, as
	// for switches that are not on the machine's own PCI bus.
	RemotePCIBusID string
}

// RemoteType is the kind of device at the other end of an NVLink.
type RemoteType string

// The remote types. NVML reports unknown where switches are hidden, in a
// virtual machine for one.
const (
	RemoteGPU     RemoteType = "GPU"
	RemoteSwitch  RemoteType = "Switch"
	RemoteOther   RemoteType = "Other"
	RemoteUnknown RemoteType = "Unknown"
)

// Fabric names a set of GPUs connected by NVLink, maybe over several machines.
type Fabric struct {
	// ClusterUUID is empty where the fabric ends inside the machine.
	ClusterUUID string
	CliqueID    uint32
	// State is NVML's: "NotStarted", "InProgress" or "Completed".
	State string
	// Err is how the fabric manager's probe failed, if it did.
	Err error
}
