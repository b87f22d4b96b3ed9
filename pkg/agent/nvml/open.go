package nvml

import (
	"io/fs"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
)

// OpenOptions say where things are.
type OpenOptions struct {
	// NodeName gives simulated GPUs their identity.
	NodeName string
	// DriverRoot is the root of the driver's files, "/" or the folder where
	// a driver container has mounted its own root. "auto" looks there.
	DriverRoot string
	// ProcRoot is "/proc" unless a test says otherwise.
	ProcRoot string
	// SysRoot is "/sys" unless a test says otherwise.
	SysRoot string
}

// Handle is an opened NVML with what belongs to it.
type Handle struct {
	Library
	// Raw is the library in go-nvml's terms, for nvcdi.
	Raw gonvml.Interface
	// Sysfs is the kernel's view of the same machine.
	Sysfs fs.ReadLinkFS
	// Simulated tells that no real GPU is behind it.
	Simulated bool
	// Path is the library's file as given to the dynamic loader, or the
	// simulated profile.
	Path string
}

// Open turns spec into a library: "auto" (look for the driver's library),
// the path of a library, or "sim:<profile>".
func Open(spec string, opts OpenOptions) (*Handle, error) { return nil, nil }
