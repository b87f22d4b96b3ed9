// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"cmp"
	"context"
	"errors"
	"io/fs"
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
func driverRoot(t testing.TB, version string) string {
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
	program := makeHook(t, root)
	backend := cdi.NewDriver(cdi.DriverOptions{
		NVML:       func() nvml.Interface { return sim },
		DriverRoot: root,
		ProcRoot:   t.TempDir(),
		HookPath:   program,
	})
	store := cdi.NewStore(durable.OS{}, t.TempDir(), "/")
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
		return strings.HasPrefix(hook, program) && strings.Contains(hook, "update-ldcache")
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
		ProcRoot:       t.TempDir(),
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

// makeHook stands in for the toolkit's program that containers are prepared with.
func makeHook(t *testing.T, root string) string {
	t.Helper()
	program := filepath.Join(root, "opt/nvidia/nvidia-cdi-hook")
	must(t, os.MkdirAll(filepath.Dir(program), 0o755))
	must(t, os.WriteFile(program, nil, 0o755))
	return program
}

// TestContainersNeedNotRunAsRoot: nodes that the host keeps for root are open to all in the container that was given the GPU.
func TestContainersNeedNotRunAsRoot(t *testing.T) {
	for _, host := range []struct {
		mode fs.FileMode
		gid  int
	}{{0o666, 0}, {0o600, 0}, {0o660, 44}} {
		root, backend, one := onGPU3(t)
		for _, node := range []string{"nvidiactl", "nvidia-uvm", "nvidia3"} {
			path := filepath.Join(root, "dev", node)
			must(t, os.Chmod(path, host.mode))
			must(t, os.Chown(path, 0, host.gid))
		}
		store := cdi.NewStore(durable.OS{}, t.TempDir(), "/")
		write(t, store, backend, train, cdi.Device{Request: "gpu", Name: one.Name, GPU: one})
		container := inject(t, store.Dir(), cdi.DeviceID(train, "gpu", one.Name))
		if len(container.Linux.Devices) != 3 {
			t.Errorf("device nodes %+v, want 3", container.Linux.Devices)
		}
		for _, node := range container.Linux.Devices {
			if *node.FileMode != 0o666 || node.Major != 121 || node.Type != "c" {
				t.Errorf("%v on the host: %s is %s %d with %v in the container, want 0666 of major 121", host, node.Path, node.Type, node.Major, node.FileMode)
			}
		}
	}
}

// TestWhatARuntimeOpensIsLookedUpInTheHostsRoot, which the agent sees in a folder: here with the driver of a driver container in it.
func TestWhatARuntimeOpensIsLookedUpInTheHostsRoot(t *testing.T) {
	tests := map[string]struct {
		hostDriver, hook string
		damage           func(t *testing.T, host string)
		want             []string
	}{
		"all is there": {},
		// Of the host, not of the agent, that is.
		"below a link that is absolute": {hostDriver: "/var/run/nvidia/driver"},
		"no hook":                       {hook: "/usr/bin/nvidia-cdi-hook", want: []string{"/usr/bin/nvidia-cdi-hook", "--nvidia-cdi-hook"}},
		"the hook is no program": {
			damage: func(t *testing.T, host string) {
				must(t, os.Chmod(filepath.Join(host, "opt/nvidia/nvidia-cdi-hook"), 0o644))
			},
			want: []string{"/opt/nvidia/nvidia-cdi-hook", "--nvidia-cdi-hook"},
		},
		"the driver is elsewhere": {hostDriver: "/run/driver", want: []string{"/run/driver/"}},
		"a library has gone": {
			damage: func(t *testing.T, host string) {
				found, _ := filepath.Glob(filepath.Join(host, "run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so.*"))
				must(t, os.Remove(found[0]))
			},
			want: []string{"mount at", "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libcuda.so."},
		},
		"a device node has gone": {
			damage: func(t *testing.T, host string) {
				must(t, os.Remove(filepath.Join(host, "run/nvidia/driver/dev/nvidia3")))
			},
			want: []string{"/run/nvidia/driver/dev/nvidia3"},
		},
		"no root": {damage: func(t *testing.T, host string) { must(t, os.Rename(host, host+"-gone")) }, want: []string{"the host's root folder"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			sim, one := gpu3(t)
			version, _ := sim.SystemGetDriverVersion()
			host := filepath.Join(t.TempDir(), "host")
			driver := filepath.Join(host, "run/nvidia/driver")
			must(t, os.MkdirAll(filepath.Dir(driver), 0o755))
			must(t, os.Rename(driverRoot(t, version), driver))
			must(t, os.MkdirAll(filepath.Join(host, "var"), 0o755))
			must(t, os.Symlink("/run", filepath.Join(host, "var/run")))
			makeHook(t, host)
			backend := cdi.NewDriver(cdi.DriverOptions{
				NVML:           func() nvml.Interface { return sim },
				DriverRoot:     driver,
				ProcRoot:       t.TempDir(),
				HostDriverRoot: cmp.Or(tc.hostDriver, "/run/nvidia/driver"),
				HookPath:       cmp.Or(tc.hook, "/opt/nvidia/nvidia-cdi-hook"),
			})
			store := cdi.NewStore(durable.OS{}, t.TempDir(), host)
			write(t, store, backend, train, cdi.Device{Request: "gpu", Name: one.Name, GPU: one})
			if tc.damage != nil {
				tc.damage(t, host)
			}
			err := store.Verify(train, []string{cdi.DeviceID(train, "gpu", one.Name)})
			if (err == nil) != (tc.want == nil) {
				t.Fatalf("Verify: %v, want an error with %q", err, tc.want)
			}
			for _, want := range tc.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("Verify: %v, want an error with %q", err, want)
				}
			}
		})
	}
}

// onGPU3 is a backend over stand-in files, with a GPU.
func onGPU3(t *testing.T) (root string, backend *cdi.Driver, one cdi.GPU) {
	t.Helper()
	sim, one := gpu3(t)
	version, _ := sim.SystemGetDriverVersion()
	root = driverRoot(t, version)
	return root, cdi.NewDriver(cdi.DriverOptions{NVML: func() nvml.Interface { return sim }, DriverRoot: root, ProcRoot: t.TempDir()}), one
}

// gpu3 is a GPU of a simulated machine, of which another one has fallen off the bus.
func gpu3(t *testing.T) (*nvmlsim.Library, cdi.GPU) {
	t.Helper()
	sim, err := nvmlsim.New("dgx-h100", "node-1")
	must(t, err)
	if ret := sim.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	handle, _ := sim.DeviceGetHandleByIndex(3)
	one := gpu(3)
	one.PCIBusID = "0000:61:00.0"
	one.UUID, _ = handle.GetUUID()
	_, err = sim.Machine().Do(&nvmlsim.LoseGPU{GPU: "5"})
	must(t, err)
	one.Minor, _ = handle.GetMinorNumber()
	return sim, one
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

// TestAHookThatCannotOpenTheDriverIsNotAskedTo: the image's program is linked statically. It is named where it is by now.
func TestAHookThatCannotOpenTheDriverIsNotAskedTo(t *testing.T) {
	sim, one := gpu3(t)
	version, _ := sim.SystemGetDriverVersion()
	for name, paths := range map[string][]string{"the host's": {"/hook"}, "ours": {"/state/hook", "/plugin/hook"}} {
		opts := cdi.DriverOptions{NVML: func() nvml.Interface { return sim }, DriverRoot: driverRoot(t, version), ProcRoot: t.TempDir()}
		ours, installed := name == "ours", paths[0]
		if ours {
			opts.InstallHook = func(context.Context) (string, error) { return installed, nil }
		} else {
			opts.HookPath = installed
		}
		backend := cdi.NewDriver(opts)
		for _, installed = range paths {
			common, err := backend.CommonEdits(t.Context())
			must(t, err)
			edits, err := backend.GPUEdits(t.Context(), one)
			must(t, err)
			if len(common.Hooks) == 0 {
				t.Errorf("%s: there are no hooks for all", name)
			}
			var names []string
			for _, hook := range slices.Concat(common.Hooks, edits.Hooks) {
				names = append(names, hook.Args[1])
				if hook.Path != installed {
					t.Errorf("%s: hook %s is %s, want %s", name, hook.Args[1], hook.Path, installed)
				}
			}
			if slices.Contains(names, "apply-cuda-memory-limits") == ours {
				t.Errorf("%s: hooks %q", name, names)
			}
		}
	}
}

// TestAClaimWithoutTheHookIsRefused with the reason. One of a GPU for a virtual machine does not need it.
func TestAClaimWithoutTheHookIsRefused(t *testing.T) {
	sim, one := gpu3(t)
	version, _ := sim.SystemGetDriverVersion()
	full := errors.New("the disk is full")
	backend := cdi.NewDriver(cdi.DriverOptions{
		NVML: func() nvml.Interface { return sim }, DriverRoot: driverRoot(t, version), ProcRoot: t.TempDir(),
		InstallHook: func(context.Context) (string, error) { return "", full },
	})
	if err := backend.Ready(t.Context()); !errors.Is(err, full) {
		t.Errorf("ready: %v", err)
	}
	for device, want := range map[*cdi.Device]error{{Request: "gpu", Name: one.Name, GPU: one}: full, {Request: "vm", Name: one.Name, GPU: one, Nodes: []string{"null"}}: nil} {
		if _, err := cdi.BuildSpec(t.Context(), backend, train, []cdi.Device{*device}); !errors.Is(err, want) {
			t.Errorf("request %s: %v, want %v", device.Request, err, want)
		}
	}
}
