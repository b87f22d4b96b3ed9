package cdi_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// driverRoot is a folder with what an installed driver of that version looks like to nvcdi: empty files, and
// device nodes whose numbers no driver has.
func driverRoot(t *testing.T, version string) string {
	t.Helper()
	requireMknod(t)
	root := t.TempDir()
	for _, file := range []string{
		"usr/lib/x86_64-linux-gnu/libcuda.so." + version,
		"usr/lib/x86_64-linux-gnu/libnvidia-ml.so." + version,
		"usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so." + version,
		"usr/bin/nvidia-smi",
	} {
		path := filepath.Join(root, file)
		must(t, os.MkdirAll(filepath.Dir(path), 0o755))
		must(t, os.WriteFile(path, nil, 0o755))
	}
	backend, err := cdi.NewSimulated(t.Context(), cdi.SimulatedOptions{DevRoot: filepath.Join(root, "dev"), ProcRoot: procRoot(t)})
	must(t, err)
	for minor := range 8 {
		_, err := backend.GPUEdits(t.Context(), gpu(minor))
		must(t, err)
	}
	return root
}

// TestRealGPUsGetTheDriversFiles runs nvcdi, as on a node with a real driver, over stand-in files.
func TestRealGPUsGetTheDriversFiles(t *testing.T) {
	sim, err := nvmlsim.New("dgx-h100", "node-1")
	must(t, err)
	if ret := sim.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	version, ret := sim.SystemGetDriverVersion()
	if ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	handle, ret := sim.DeviceGetHandleByIndex(3)
	if ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	uuid, _ := handle.GetUUID()
	minor, _ := handle.GetMinorNumber()

	root := driverRoot(t, version)
	backend := cdi.NewDriver(cdi.DriverOptions{
		NVML:       func() nvml.Interface { return sim },
		DriverRoot: root,
		HookPath:   "/opt/nvidia/nvidia-cdi-hook",
	})
	store, err := cdi.NewStore(durable.OS{}, t.TempDir())
	must(t, err)
	one := gpu(minor)
	one.UUID = uuid
	write(t, store, backend, train, cdi.Device{Request: "gpu", Name: one.Name, GPU: one})
	id := cdi.DeviceID(train, "gpu", one.Name)
	must(t, store.Verify(train, []string{id}))

	container := inject(t, store.Dir(), id)
	var nodes, mounts, hooks []string
	for _, node := range container.Linux.Devices {
		nodes = append(nodes, node.Path)
	}
	for _, mount := range container.Mounts {
		mounts = append(mounts, mount.Source)
	}
	for _, hook := range container.Hooks.CreateContainer {
		hooks = append(hooks, strings.Join(append([]string{hook.Path}, hook.Args...), " "))
	}
	for _, want := range []string{"/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm"} {
		if !slices.Contains(nodes, want) {
			t.Errorf("device nodes %v: %s is missing", nodes, want)
		}
	}
	if slices.Contains(nodes, "/dev/nvidia0") {
		t.Errorf("device nodes %v: another GPU's is among them", nodes)
	}
	if want := filepath.Join(root, "usr/lib/x86_64-linux-gnu/libcuda.so."+version); !slices.Contains(mounts, want) {
		t.Errorf("mounts %v: %s is missing", mounts, want)
	}
	if !slices.ContainsFunc(hooks, func(hook string) bool {
		return strings.HasPrefix(hook, "/opt/nvidia/nvidia-cdi-hook") && strings.Contains(hook, "update-ldcache")
	}) {
		t.Errorf("hooks %q: the one that updates the linker's cache is missing", hooks)
	}
	for _, want := range []string{"NVIDIA_VISIBLE_DEVICES=void", "STOWAGE_GPU_0000_03_00_0=" + uuid} {
		if !slices.Contains(container.Process.Env, want) {
			t.Errorf("environment %q: %s is missing", container.Process.Env, want)
		}
	}
}

func TestTheHostsPathsAreNamedToTheRuntime(t *testing.T) {
	sim, err := nvmlsim.New("dgx-h100", "node-1")
	must(t, err)
	if ret := sim.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	version, _ := sim.SystemGetDriverVersion()
	root := driverRoot(t, version)
	backend := cdi.NewDriver(cdi.DriverOptions{
		NVML:           func() nvml.Interface { return sim },
		DriverRoot:     root,
		HostDriverRoot: "/run/nvidia/driver",
	})
	edits, err := backend.CommonEdits(t.Context())
	must(t, err)
	for _, mount := range edits.Mounts {
		if !strings.HasPrefix(mount.HostPath, "/run/nvidia/driver/") || strings.HasPrefix(mount.ContainerPath, "/run/nvidia/driver") {
			t.Errorf("mount of %s at %s: want the host's path outside and the plain one inside", mount.HostPath, mount.ContainerPath)
		}
	}
	if len(edits.Mounts) == 0 {
		t.Error("no mounts")
	}
}

// onGPU3 is a backend over stand-in files, with a GPU.
func onGPU3(t *testing.T) (root string, backend *cdi.Driver, one cdi.GPU) {
	t.Helper()
	sim, err := nvmlsim.New("dgx-h100", "node-1")
	must(t, err)
	if ret := sim.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	version, _ := sim.SystemGetDriverVersion()
	handle, _ := sim.DeviceGetHandleByIndex(3)
	one = gpu(3)
	one.UUID, _ = handle.GetUUID()
	one.Minor, _ = handle.GetMinorNumber()
	root = driverRoot(t, version)
	return root, cdi.NewDriver(cdi.DriverOptions{NVML: func() nvml.Interface { return sim }, DriverRoot: root}), one
}

// TestAMissingDeviceNodeIsSaid: nvcdi goes on without it.
func TestAMissingDeviceNodeIsSaid(t *testing.T) {
	for node, common := range map[string]bool{"nvidiactl": true, "nvidia-uvm": true, "nvidia3": false} {
		t.Run(node, func(t *testing.T) {
			root, backend, one := onGPU3(t)
			// What a GPU that renders has besides is not the GPU.
			dri := filepath.Join(root, "dev", "dri")
			must(t, os.MkdirAll(dri, 0o755))
			must(t, os.Rename(filepath.Join(root, "dev", node), filepath.Join(dri, "renderD128")))
			_, commonErr := backend.CommonEdits(t.Context())
			_, gpuErr := backend.GPUEdits(t.Context(), one)
			err := gpuErr
			if common {
				err = commonErr
			}
			if err == nil || !strings.Contains(err.Error(), "no /dev/"+node) {
				t.Errorf("common edits: %v, the GPU's: %v: want an error that names the node", commonErr, gpuErr)
			}
		})
	}
}

func TestAMissingDriverIsSaid(t *testing.T) {
	backend := cdi.NewDriver(cdi.DriverOptions{NVML: func() nvml.Interface { return nil }, DriverRoot: "/"})
	_, err := cdi.BuildSpec(t.Context(), backend, train, []cdi.Device{device("gpu", 0)})
	if err == nil || !strings.Contains(err.Error(), "no NVML library") {
		t.Errorf("error %v, want one that says that there is no library", err)
	}
}
