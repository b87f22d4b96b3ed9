// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"

	"stowage.dev/stowage/pkg/agent/vfio"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// The forms of the --nvml flag, beside the path of a library.
const (
	SpecAuto      = "auto"
	specSimPrefix = "sim:"
)

// ErrRealDriver means that GPUs would be simulated on a machine that has some.
var ErrRealDriver = errors.New("a real NVIDIA driver is loaded")

// OpenOptions say where things are. The zero value is right on a host.
type OpenOptions struct {
	// NodeName gives simulated GPUs their identity; needed for them only.
	NodeName string
	// SimDir keeps the state of simulated GPUs, which then outlives the process
	// and is shared with others. Without it they are new, in memory.
	SimDir string
	// SimLibrary is the file of a simulated libnvidia-ml.so.1 (cmd/nvmlsim-library), through which simulated GPUs are asked as
	// real ones are, by the dynamic loader. It needs a SimDir. Without it they are asked within this process.
	SimLibrary string
	// DriverRoot is the root of the driver's files: "/", or the folder where
	// a driver container has mounted its own root. "auto" looks there.
	DriverRoot string
	// ProcRoot and SysRoot are "/proc" and "/sys".
	ProcRoot, SysRoot string
}

// Handle is an NVML library with what belongs to it. Nothing is loaded before
// its Init.
type Handle struct {
	Library
	// Raw is the same library in go-nvml's terms, for nvcdi.
	Raw gonvml.Interface
	// Sysfs is the kernel's view of the same machine, the tree below /sys.
	Sysfs vfio.Sysfs
	// Simulated tells that no real GPU is behind it.
	Simulated bool
	// Source is the library's file as given to the dynamic loader, or
	// "sim:<profile>".
	Source string
	// Machine is the simulated hardware, nil for a real driver.
	Machine *nvmlsim.Machine

	procRoot string
}

// BootID is another one after each reboot of the machine that has the GPUs.
func (h *Handle) BootID() (string, error) {
	if h.Machine != nil {
		return h.Machine.BootID(), nil
	}
	data, err := os.ReadFile(filepath.Join(h.procRoot, "sys/kernel/random/boot_id"))
	if err != nil {
		return "", fmt.Errorf("read the boot ID: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}

// Open turns the --nvml flag into a library: "auto" (the driver's library,
// looked for below DriverRoot, then by the dynamic loader), the path of a
// library, or "sim:<profile>" with a name or a file of pkg/nvmlsim. A missing
// library or driver is found out by Init, not here, so that the agent can start
// before they are there. Simulation beside a loaded driver is refused with
// ErrRealDriver.
func Open(spec string, opts OpenOptions) (*Handle, error) {
	opts.setDefaults()
	switch profile, simulated := strings.CutPrefix(spec, specSimPrefix); {
	case simulated:
		return openSimulated(spec, profile, opts)
	case spec == SpecAuto:
		path, found := findLibrary(opts.DriverRoot)
		if !found {
			return openReal(path, fmt.Sprintf("%s below %s and by the dynamic loader", path, opts.DriverRoot), opts), nil
		}
		return openReal(path, path, opts), nil
	case strings.Contains(spec, "/") || strings.Contains(spec, ".so"):
		return openReal(spec, spec, opts), nil
	}
	return nil, fmt.Errorf("NVML %q: want %q, the path of a library, or %s<profile> with one of %s",
		spec, SpecAuto, specSimPrefix, strings.Join(profiles(), ", "))
}

func (o *OpenOptions) setDefaults() {
	for field, value := range map[*string]string{&o.DriverRoot: "/", &o.ProcRoot: "/proc", &o.SysRoot: "/sys"} {
		if *field == "" {
			*field = value
		}
	}
}

func openSimulated(spec, profile string, opts OpenOptions) (*Handle, error) {
	if opts.NodeName == "" {
		return nil, fmt.Errorf("NVML %q: simulated GPUs need a node name", spec)
	}
	loaded, version, err := RealDriverLoaded(opts.ProcRoot)
	if err != nil {
		return nil, err
	}
	if loaded {
		return nil, fmt.Errorf("NVML %q: %w (%s): simulated GPUs on this machine would hide its own: use --nvml=%s",
			spec, ErrRealDriver, version, SpecAuto)
	}
	machine, err := openMachine(profile, opts)
	if err != nil {
		return nil, fmt.Errorf("NVML %q: %w", spec, err)
	}
	sim := machine.NVML()
	h := &Handle{Library: Adapt(sim, spec), Raw: sim, Sysfs: sim.Sysfs(), Simulated: true, Source: spec, Machine: machine}
	if opts.SimLibrary != "" {
		if err := h.load(profile, opts); err != nil {
			return nil, fmt.Errorf("NVML %q: %w", spec, err)
		}
	}
	return h, nil
}

// load has simulated GPUs asked through a library, which finds their machine by its environment (pkg/nvmlsim/capi).
func (h *Handle) load(profile string, opts OpenOptions) error {
	if opts.SimDir == "" {
		return fmt.Errorf("library %s: simulated GPUs that are asked through a library need a folder", opts.SimLibrary)
	}
	for name, value := range map[string]string{
		nvmlsim.EnvSocket: filepath.Join(opts.SimDir, nvmlsim.ControlSocket), nvmlsim.EnvProfile: profile, nvmlsim.EnvNode: opts.NodeName,
	} {
		if err := os.Setenv(name, value); err != nil {
			return err
		}
	}
	lib := gonvml.New(gonvml.WithLibraryPath(opts.SimLibrary))
	h.Library, h.Raw, h.Source = adaptReal(lib, opts.SimLibrary), lib, opts.SimLibrary
	return nil
}

func openReal(path, name string, opts OpenOptions) *Handle {
	lib := gonvml.New(gonvml.WithLibraryPath(path))
	return &Handle{
		Library: adaptReal(lib, name), Raw: lib, Source: path, procRoot: opts.ProcRoot,
		Sysfs: vfio.Dir(opts.SysRoot),
	}
}

const libraryName = "libnvidia-ml.so.1"

// libraryFolders are where distributions and driver containers put it.
var libraryFolders = []string{
	"usr/lib64",
	"usr/lib/x86_64-linux-gnu",
	"usr/lib/aarch64-linux-gnu",
	"lib64",
	"lib/x86_64-linux-gnu",
	"lib/aarch64-linux-gnu",
	"usr/lib/x86_64-linux-gnu/nvidia/current",
	"usr/lib/aarch64-linux-gnu/nvidia/current",
}

// findLibrary returns the library's path below the driver root or, if it is not
// there, its bare name, which the dynamic loader looks up.
func findLibrary(driverRoot string) (path string, found bool) {
	for _, folder := range libraryFolders {
		path := filepath.Join(driverRoot, folder, libraryName)
		if _, err := os.Stat(path); err == nil {
			return path, true
		}
	}
	return libraryName, false
}

// RealDriverLoaded reports whether the NVIDIA kernel module is loaded, and the
// first line of its version.
func RealDriverLoaded(procRoot string) (loaded bool, version string, err error) {
	data, err := os.ReadFile(filepath.Join(procRoot, "driver/nvidia/version"))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, "", nil
	case err != nil:
		return false, "", fmt.Errorf("look for a loaded NVIDIA driver: %w", err)
	}
	version, _, _ = strings.Cut(string(data), "\n")
	return true, strings.TrimSpace(version), nil
}
