// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/nvmlsim/librarytest"
)

func TestMain(m *testing.M) { os.Exit(librarytest.Main(m)) }

// nvcdi is what makes CDI specs for real GPUs: it must find in the simulation
// all that it asks a driver for.
func TestNvcdiMakesSpecsFromEveryProfile(t *testing.T) {
	for _, profile := range nvmlsim.Profiles() {
		sim, err := nvmlsim.New(profile, "node-a")
		if err != nil {
			t.Fatal(err)
		}
		t.Run(profile, func(t *testing.T) { makesSpecs(t, sim, sim.Profile().System.DriverVersion) })
		t.Run(profile+" through the C library", func(t *testing.T) {
			t.Setenv("NVMLSIM_PROFILE", profile)
			t.Setenv("NVMLSIM_NODE", "node-a")
			makesSpecs(t, nvml.New(nvml.WithLibraryPath(librarytest.Build(t))), sim.Profile().System.DriverVersion)
		})
	}
}

func makesSpecs(t *testing.T, lib nvml.Interface, version string) {
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	defer lib.Shutdown()
	root, uuids, wantNodes := driverRoot(t, lib, version)

	namer, err := nvcdi.NewDeviceNamer(nvcdi.DeviceNameStrategyUUID)
	if err != nil {
		t.Fatal(err)
	}
	generator, err := nvcdi.New(
		nvcdi.WithMode(nvcdi.ModeNvml),
		nvcdi.WithLogger(testLogger{t}),
		nvcdi.WithNvmlLib(lib),
		nvcdi.WithDriverRoot(root),
		nvcdi.WithDevRoot(root),
		nvcdi.WithFeatureFlags(nvcdi.FeatureDisableNvsandboxUtils),
		nvcdi.WithDeviceNamers(namer),
	)
	if err != nil {
		t.Fatal(err)
	}
	devices, err := generator.GetDeviceSpecsByID(uuids...)
	if err != nil {
		t.Fatal(err)
	}
	var names, nodes []string
	for _, d := range devices {
		names = append(names, d.Name)
		for _, node := range d.ContainerEdits.DeviceNodes {
			nodes = append(nodes, node.Path)
		}
	}
	slices.Sort(nodes)
	if diff := cmp.Diff(uuids, names); diff != "" {
		t.Errorf("CDI devices (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(wantNodes, nodes); diff != "" {
		t.Errorf("device nodes (-want +got):\n%s", diff)
	}
	if _, err := generator.GetCommonEdits(); err != nil {
		t.Errorf("common edits: %v", err)
	}
}

// driverRoot is a folder with stand-ins for a driver's files: empty libraries,
// and device nodes that no driver answers.
func driverRoot(t *testing.T, lib nvml.Interface, version string) (root string, uuids, nodes []string) {
	t.Helper()
	root = t.TempDir()
	for _, file := range []string{
		"/usr/bin/nvidia-smi", "/usr/lib64/libcuda.so." + version, "/usr/lib64/libnvidia-ml.so." + version,
	} {
		makeFolder(t, root, file)
		if err := os.WriteFile(filepath.Join(root, file), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	makeNode(t, root, "/dev/nvidiactl", 255)
	count, _ := lib.DeviceGetCount()
	for i := range count {
		d, _ := lib.DeviceGetHandleByIndex(i)
		uuid, _ := d.GetUUID()
		minor, ret := d.GetMinorNumber()
		if ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
		node := fmt.Sprintf("/dev/nvidia%d", minor)
		makeNode(t, root, node, uint32(minor))
		uuids, nodes = append(uuids, uuid), append(nodes, node)
	}
	return root, uuids, nodes
}

func makeNode(t *testing.T, root, path string, minor uint32) {
	t.Helper()
	const nvidiaMajor = 195
	makeFolder(t, root, path)
	err := unix.Mknod(filepath.Join(root, path), unix.S_IFCHR|0o666, int(unix.Mkdev(nvidiaMajor, minor)))
	if errors.Is(err, unix.EPERM) {
		t.Skip("needs the right to make device nodes (root)")
	}
	if err != nil {
		t.Fatal(err)
	}
}

func makeFolder(t *testing.T, root, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(filepath.Join(root, path)), 0o755); err != nil {
		t.Fatal(err)
	}
}

// testLogger keeps nvcdi's many warnings about missing files to failed runs.
type testLogger struct{ t *testing.T }

func (l testLogger) Debugf(string, ...any)               {}
func (l testLogger) Tracef(string, ...any)               {}
func (l testLogger) Infof(format string, args ...any)    { l.t.Logf(format, args...) }
func (l testLogger) Warningf(format string, args ...any) { l.t.Logf(format, args...) }
func (l testLogger) Errorf(format string, args ...any)   { l.t.Errorf(format, args...) }
