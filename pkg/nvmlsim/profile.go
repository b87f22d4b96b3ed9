// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"cmp"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

// Profile describes one machine: what NVML and the kernel say about it.
// The YAML files in profiles/ are the examples of its format.
type Profile struct {
	// Name is how the profile is asked for, such as "dgx-h100".
	Name string `json:"name"`
	// Description says in one line which machine this is.
	Description string `json:"description"`
	// Sources are the public places where the facts below can be read.
	Sources []string `json:"sources,omitempty"`
	// System is what NVML says about the driver.
	System System `json:"system"`
	// GPU is what all GPUs of the machine have in common.
	GPU Model `json:"gpu"`
	// Fabric is nil where nvmlDeviceGetGpuFabricInfo is not supported.
	Fabric *Fabric `json:"fabric,omitempty"`
	// GPUs are the single GPUs, in NVML's index order.
	GPUs []GPU `json:"gpus"`
}

// System holds the versions of the driver.
type System struct {
	// VirtualMachine tells that a hypervisor passes the GPUs through: the driver
	// knows it, and the port above a GPU is the hypervisor's.
	VirtualMachine bool `json:"virtualMachine,omitempty"`
	// DriverVersion as in /proc/driver/nvidia/version, such as "570.172.08".
	DriverVersion string `json:"driverVersion"`
	// PersistenceOff: the GPUs are as the driver brings them up by itself, without
	// persistence.
	PersistenceOff bool `json:"persistenceOff,omitempty"`
	// CUDADriverVersion is the newest CUDA that the driver serves, "12.8".
	CUDADriverVersion string `json:"cudaDriverVersion"`
}

// Model is what GPUs of one product have in common.
type Model struct {
	// ProductName exactly as nvmlDeviceGetName has it.
	ProductName string `json:"productName"`
	// Brand is one of the words in [brands].
	Brand string `json:"brand"`
	// Architecture is one of the words in [architectures].
	Architecture string `json:"architecture"`
	// CUDAComputeCapability is "major.minor".
	CUDAComputeCapability string `json:"cudaComputeCapability"`
	// MemoryMiB is what nvidia-smi prints as the total: a little less than the
	// sold size where the firmware keeps a part.
	MemoryMiB uint64 `json:"memoryMiB"`
	// ReservedMiB of them are kept by the driver.
	ReservedMiB uint64 `json:"reservedMiB"`
	// BAR1MiB is the size of the PCI window onto the memory.
	BAR1MiB uint64 `json:"bar1MiB"`
	// Multiprocessors and CUDACores count the enabled units.
	Multiprocessors int `json:"multiprocessors"`
	CUDACores       int `json:"cudaCores"`
	// Card is how the card names itself.
	Card
	// PCIe is what the card and its slot can do.
	PCIe Bus `json:"pcie"`
	// Power limits and the draw of an idle GPU.
	Power Power `json:"power"`
	// IdleTemperatureC is the temperature of an idle GPU.
	IdleTemperatureC uint32 `json:"idleTemperatureC"`
	// Clocks are none where not supported.
	Clocks Clocks `json:"clocks,omitzero"`
	// Thermal says from when on a hot GPU slows down.
	Thermal Thermal `json:"thermal,omitzero"`
	// ECC tells whether the memory has error correction switched on.
	ECC bool `json:"ecc"`
	// MIG is nil for a GPU that cannot be partitioned.
	MIG *MIG `json:"mig,omitempty"`
	// AddressingMode is "None", "HMM" or "ATS"; empty where not supported.
	AddressingMode string `json:"addressingMode,omitempty"`
	// NVLink is nil for a GPU without NVLink.
	NVLink *NVLink `json:"nvlink,omitempty"`
	// Functions of the card beside the GPU, such as sound, from number 1 on.
	Functions []Function `json:"functions,omitempty"`
}

// Card is what is written into a card; the profile has its fields beside the GPU's.
type Card struct {
	// PCIDeviceID and PCISubsystemID are NVML's device<<16|vendor words.
	PCIDeviceID    uint32 `json:"pciDeviceID"`
	PCISubsystemID uint32 `json:"pciSubsystemID"`
	// VBIOSVersion and BoardPartNumber are texts such as "96.00.99.00.01" and "692-2G520-0200-000", of at most
	// 31 and 79 bytes (nvml.h); empty where not known: then they are not supported.
	VBIOSVersion    string `json:"vbiosVersion,omitempty"`
	BoardPartNumber string `json:"boardPartNumber,omitempty"`
}

// Clocks are those of an idle GPU, and the highest.
type Clocks struct {
	Idle    ClockRates `json:"idle"`
	Highest ClockRates `json:"highest"`
}

// ClockRates are in MHz.
type ClockRates struct {
	Graphics uint32 `json:"graphics"`
	SM       uint32 `json:"sm"`
	Memory   uint32 `json:"memory"`
	Video    uint32 `json:"video"`
}

// Function is one more PCI function of a card.
type Function struct {
	// Class and Device as sysfs has them: "0x040300", "0x22ba".
	Class  string `json:"class"`
	Device string `json:"device"`
	// Driver that it has after a boot.
	Driver string `json:"driver"`
}

// Bus is the PCI Express link of a GPU, and what its two ends can do.
type Bus struct {
	// Generation is the fastest that card and slot agree on, Width what the card
	// has: NVML calls both the link's maximum.
	Generation int `json:"generation"`
	Width      int `json:"width"`
	// DeviceGeneration is the card's alone; Generation where left out.
	DeviceGeneration int `json:"deviceGeneration,omitempty"`
	// LinkWidth is how many lanes the link has where those are fewer than the
	// card's, as in most clouds; Width where left out.
	LinkWidth int `json:"linkWidth,omitempty"`
	// PortWidth is what the kernel says of the port above; LinkWidth where left out.
	PortWidth int `json:"portWidth,omitempty"`
}

// link is the one of a sound GPU.
func (b Bus) link() PCIe { return PCIe{Generation: b.Generation, Width: cmp.Or(b.LinkWidth, b.Width)} }

// port is how many lanes the port above the GPU has.
func (b Bus) port() int { return cmp.Or(b.PortWidth, b.link().Width) }

// Power values are in watts.
type Power struct {
	IdleWatts    uint32 `json:"idleWatts"`
	MinWatts     uint32 `json:"minWatts"`
	DefaultWatts uint32 `json:"defaultWatts"`
	MaxWatts     uint32 `json:"maxWatts"`
}

// Thermal has the thresholds in one of two forms. GPUs up to Ampere name temperatures; later ones how far the GPU is from the nearest
// threshold ("T.Limit"), and at which distances it acts, which may be negative.
type Thermal struct {
	SlowdownC uint32 `json:"slowdownC,omitempty"`
	ShutdownC uint32 `json:"shutdownC,omitempty"`
	// IdleMarginC is the distance of an idle GPU, zero for one that names temperatures.
	IdleMarginC     int32 `json:"idleMarginC,omitempty"`
	SlowdownMarginC int32 `json:"slowdownMarginC,omitempty"`
	ShutdownMarginC int32 `json:"shutdownMarginC,omitempty"`
}

// thermal is the profile's, or what many GPUs have.
func (m *Model) thermal() Thermal {
	if m.Thermal == (Thermal{}) {
		return Thermal{SlowdownC: 87, ShutdownC: 92}
	}
	return m.Thermal
}

// MIG describes a GPU that can be partitioned.
type MIG struct {
	// Enabled is the mode at start.
	Enabled bool `json:"enabled"`
	// MaxDevices is how many MIG devices fit on one GPU.
	MaxDevices int `json:"maxDevices"`
	// Table names the GPU's instance profiles and placements, such as
	// "h100-80gb"; see [migTables].
	Table string `json:"table"`
}

// table is nil for a GPU that cannot be partitioned.
func (m *MIG) table() *migTable {
	if m == nil {
		return nil
	}
	return migTables[m.Table]
}

// NVLink describes the links of each GPU.
type NVLink struct {
	// Version of NVLink: 2 (V100), 3 (A100), 4 (H100), 5 (B200).
	Version uint32 `json:"version"`
	// Links is the number of links of one GPU.
	Links int `json:"links"`
	// Switches are the NVSwitches that the links end at. Empty where the
	// switches are not on the PCI bus of the machine, or where GPUs are linked
	// to each other (see GPU.NVLinkPeers).
	Switches []NVSwitch `json:"switches,omitempty"`
}

// NVSwitch is one switch chip on the machine's PCI bus.
type NVSwitch struct {
	// Address on the PCI bus, such as "0000:05:00.0".
	Address string `json:"address"`
	// Links is how many links of each GPU end at this switch.
	Links int `json:"links"`
}

// Fabric is the NVLink fabric as nvmlDeviceGetGpuFabricInfo reports it.
type Fabric struct {
	// ClusterUUID names the fabric over several machines; all zero where the
	// fabric ends inside the machine.
	ClusterUUID string `json:"clusterUUID"`
	// CliqueID names the GPUs of that fabric that reach each other.
	CliqueID uint32 `json:"cliqueID"`
}

// GPU is one GPU of the machine.
type GPU struct {
	// PCI is the way from the root complex to the GPU, in the words of
	// /sys/devices: root, bridges, address, separated by slashes.
	PCI string `json:"pci"`
	// NUMANode as the kernel has it in numa_node; -1 where it knows none.
	NUMANode int `json:"numaNode"`
	// Minor of /dev/nvidia<minor>; the index where left out.
	Minor *int `json:"minor,omitempty"`
	// Board that carries the GPU: those of one board report one serial number.
	// A board of its own where left out.
	Board *int `json:"board,omitempty"`
	// MIGEnabled overrides Model.MIG.Enabled.
	MIGEnabled *bool `json:"migEnabled,omitempty"`
	// NVLinkDown tells that the GPU's links are not active.
	NVLinkDown bool `json:"nvlinkDown,omitempty"`
	// NVLinkPeers gives, for GPUs linked to each other without switches, the
	// index of the GPU at the other end of each link. Its length is the number
	// of links; either all GPUs of a machine have it or none.
	NVLinkPeers []int `json:"nvlinkPeers,omitempty"`
}

//go:embed profiles/*.yaml
var embedded embed.FS

// ErrUnknownProfile is wrapped by the error for a name that is neither a
// built-in profile nor a path.
var ErrUnknownProfile = errors.New("unknown GPU profile")

// Profiles returns the names of the built-in profiles, sorted.
func Profiles() []string {
	files, err := fs.Glob(embedded, "profiles/*.yaml")
	if err != nil {
		panic(err) // the pattern is a constant
	}
	names := make([]string, 0, len(files))
	for _, f := range files {
		names = append(names, strings.TrimSuffix(path.Base(f), ".yaml"))
	}
	slices.Sort(names)
	return names
}

// LoadProfile returns the built-in profile of that name or, where name
// contains a slash or ends in .yaml or .yml, the profile in that file.
func LoadProfile(name string) (*Profile, error) {
	if isPath(name) {
		data, err := os.ReadFile(name)
		if err != nil {
			return nil, fmt.Errorf("read GPU profile: %w", err)
		}
		return ParseProfile(name, data)
	}
	known := Profiles()
	if !slices.Contains(known, name) {
		return nil, fmt.Errorf("%w %q: known are %s, or the path of a YAML file", ErrUnknownProfile, name, strings.Join(known, ", "))
	}
	data, err := embedded.ReadFile("profiles/" + name + ".yaml")
	if err != nil {
		return nil, fmt.Errorf("read GPU profile %q: %w", name, err)
	}
	return ParseProfile(name, data)
}

// ParseProfile decodes and validates the YAML of a profile. Unknown fields are
// errors. The origin, a file or profile name, stands in the errors.
func ParseProfile(origin string, data []byte) (*Profile, error) {
	p := &Profile{}
	asJSON, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return nil, fmt.Errorf("decode GPU profile %q: %w", origin, err)
	}
	// Not yaml.UnmarshalStrict, which takes any spelling of capitals.
	strict, err := json.UnmarshalStrict(asJSON, p)
	if err := errors.Join(append(strict, err)...); err != nil {
		return nil, fmt.Errorf("decode GPU profile %q: %w", origin, err)
	}
	if err := p.validate(); err != nil {
		return nil, fmt.Errorf("invalid GPU profile %q: %w", origin, err)
	}
	return p, nil
}

func isPath(name string) bool {
	return strings.Contains(name, "/") || strings.HasSuffix(name, ".yaml") || strings.HasSuffix(name, ".yml")
}
