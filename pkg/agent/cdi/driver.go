// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform/root"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Driver is the Backend of real GPUs: the driver's libraries, programs, device nodes and hooks, as NVIDIA's own
// nvcdi finds them below the driver root.
type Driver struct {
	opts    DriverOptions
	numbers numbers
	common  common
}

var _ Backend = (*Driver)(nil)

// DriverOptions say where the real driver is.
type DriverOptions struct {
	// NVML returns the driver's library, nil as long as there is none. It is initialised and shut down
	// around each use.
	NVML func() nvml.Interface
	// DriverRoot is the folder below which the agent sees the driver's files: / on the host, or where a driver
	// container or the host's root is mounted.
	DriverRoot string
	// HostDriverRoot is the same folder as the container runtime sees it; empty if it has the same path.
	HostDriverRoot string
	// ProcRoot is /proc, of the host; "/proc" if empty.
	ProcRoot string
	// LoadModule loads a module of the host's kernel that the driver needs and that nobody has loaded yet. Without it such a claim waits.
	LoadModule func(ctx context.Context, module string) error
	// MakeNode makes a device node of the driver's in the host's /dev where there is none ([MakeNode]), for containers in a user namespace.
	// Without it, and where it fails, they can have what is there.
	MakeNode func(path string, major, minor uint32, mode fs.FileMode) error
	// HookPath is an nvidia-cdi-hook program of the host's; empty means nvcdi's default.
	HookPath string
	// InstallHook brings one there instead, and says where it is ([Hook.Install]). It cannot open the driver's library. It may be nil.
	InstallHook func(ctx context.Context) (path string, err error)
}

// NewDriver returns the Backend; nothing is looked up before it is asked.
func NewDriver(opts DriverOptions) *Driver {
	return &Driver{opts: opts, numbers: numbers{proc: cmp.Or(opts.ProcRoot, "/proc"), load: opts.LoadModule}}
}

// Ready implements Backend.
func (d *Driver) Ready(ctx context.Context) error {
	_, err := d.hook(ctx)
	return err
}

// hook returns the program's path on the host, once it is there; empty means nvcdi's default.
func (d *Driver) hook(ctx context.Context) (path string, err error) {
	if d.opts.InstallHook == nil {
		return d.opts.HookPath, nil
	}
	return d.opts.InstallHook(ctx)
}

// CommonEdits implements Backend.
func (d *Driver) CommonEdits(ctx context.Context) (*specs.ContainerEdits, error) {
	edits, err := d.findCommon(ctx)
	if err != nil {
		return nil, err
	}
	letEverybodyOpen(edits.DeviceNodes)
	if err := d.toHost(edits); err != nil {
		return nil, err
	}
	if err := d.completeControl(ctx, edits); err != nil {
		return nil, fmt.Errorf("look for the driver's device nodes below %s: %w", d.devRoot(), err)
	}
	return edits, nil
}

// GPUEdits implements Backend.
func (d *Driver) GPUEdits(ctx context.Context, gpu GPU) (*specs.ContainerEdits, error) {
	logger := newNvcdiLogger(ctx)
	lib, err := d.nvcdi(ctx, logger, gpu)
	if err != nil {
		return nil, err
	}
	devices, err := lib.GetDeviceSpecsByID(gpu.UUID)
	if err != nil {
		return nil, fmt.Errorf("look for the device nodes of %s: %w", gpu.UUID, err)
	}
	if len(devices) == 0 {
		return nil, fmt.Errorf("look for the device nodes of %s: nvcdi knows none", gpu.UUID)
	}
	edits := devices[0].ContainerEdits
	letEverybodyOpen(edits.DeviceNodes)
	if err := d.toHost(&edits); err != nil {
		return nil, err
	}
	if err := d.completeGPU(&edits, gpu); err != nil {
		return nil, fmt.Errorf("look for the device nodes of %s below %s: %w%s", gpu.UUID, d.devRoot(), err, logger.said())
	}
	d.makeNodes(ctx, edits.DeviceNodes)
	return &edits, nil
}

// VisibleDevices implements Backend. An NVIDIA runtime below the container engine must not add to CDI.
func (*Driver) VisibleDevices([]string) string { return noDevices }

// nvcdi makes a new library for each use: it keeps the driver's version, which changes when a driver is
// loaded anew. It is about one GPU, or about none.
func (d *Driver) nvcdi(ctx context.Context, logger *nvcdiLogger, gpu GPU) (nvcdi.Interface, error) {
	hook, err := d.hook(ctx)
	if err != nil {
		return nil, err
	}
	lib := d.library(gpu)
	if lib == nil {
		return nil, errors.New("no NVML library is loaded")
	}
	opts := []nvcdi.Option{
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithNvmlLib(lib),
		nvcdi.WithDriverRoot(d.opts.DriverRoot),
		nvcdi.WithDevRoot(d.devRoot()),
		nvcdi.WithLogger(logger),
		// The sandbox utilities would be a second native library beside NVML, for information that the
		// driver root already gives.
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
	}
	if hook != "" {
		opts = append(opts, nvcdi.WithNVIDIACDIHookPath(hook))
	}
	if d.opts.InstallHook != nil {
		opts = append(opts, nvcdi.WithDisabledHooks(memoryLimitsHook))
	}
	finder, err := nvcdi.New(opts...)
	if err != nil {
		return nil, fmt.Errorf("start nvcdi: %w", err)
	}
	return finder, nil
}

// library is nil as long as there is none. It is about one GPU, or about none.
func (d *Driver) library(gpu GPU) nvml.Interface {
	lib := d.opts.NVML()
	if lib != nil && gpu.PCIBusID != "" {
		return atBus{lib, gpu.PCIBusID}
	}
	return lib
}

// toHost replaces the agent's driver root in the paths that the container runtime opens.
func (d *Driver) toHost(edits *specs.ContainerEdits) error {
	if d.opts.HostDriverRoot == "" {
		return nil
	}
	transform := root.New(root.WithRoot(d.opts.DriverRoot), root.WithTargetRoot(d.opts.HostDriverRoot), root.WithRelativeTo("host"))
	if err := transform.Transform(&specs.Spec{ContainerEdits: *edits}); err != nil {
		return fmt.Errorf("name the driver's files below %s as the host does, below %s: %w", d.opts.DriverRoot, d.opts.HostDriverRoot, err)
	}
	return nil
}

// devRoot is the driver root if the driver container has device nodes of its own there, else the host's.
func (d *Driver) devRoot() string {
	if info, err := os.Stat(filepath.Join(d.opts.DriverRoot, "dev", "nvidiactl")); err == nil && !info.IsDir() {
		return d.opts.DriverRoot
	}
	return "/"
}
