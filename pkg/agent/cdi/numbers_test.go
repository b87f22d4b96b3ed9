// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/durable"
)

// procOf is a /proc with these character devices, and what the driver says of MIG devices' nodes.
func procOf(t testing.TB, minors string, devices ...string) string {
	t.Helper()
	root := t.TempDir()
	text := "Character devices:\n  1 mem\n" + strings.Join(devices, "\n") + "\n\nBlock devices:\n235 nvidia-uvm\n"
	must(t, os.WriteFile(filepath.Join(root, "devices"), []byte(text), 0o600))
	must(t, os.MkdirAll(filepath.Join(root, "driver/nvidia-caps"), 0o755))
	must(t, os.WriteFile(filepath.Join(root, "driver/nvidia-caps/mig-minors"), []byte(minors), 0o600))
	return root
}

// numbered are the nodes that have no file of the host's.
func numbered(nodes []*specs.DeviceNode) (list []string) {
	for _, node := range nodes {
		if node.HostPath == "" {
			list = append(list, fmt.Sprintf("%s %s %d:%d %04o", node.Path, node.Type, node.Major, node.Minor, *node.FileMode))
		}
	}
	slices.Sort(list)
	return list
}

// TestNodesThatNobodyHasMadeAreGivenByNumber: on a host on which nobody has used CUDA yet, and where the driver's container has another /dev.
func TestNodesThatNobodyHasMadeAreGivenByNumber(t *testing.T) {
	all := []string{"121 nvidia-frontend", "235 nvidia-uvm"} // the nodes that are there have 121
	tests := map[string]struct {
		gone, devices []string
		loads         bool // the module that is asked for
		refused       error
		want          []string
		err           string
	}{
		"all are there": {devices: []string{"121 nvidia-frontend", "121 nvidia-uvm"}},
		// Of another kernel, maybe, that says so in other words.
		"what is there is not known": {devices: []string{"121 something"}},
		"nvidia-uvm was loaded anew": {devices: all, want: []string{"/dev/nvidia-uvm c 235:0 0666", "/dev/nvidia-uvm-tools c 235:1 0666"}},
		"another driver has been loaded": {
			devices: []string{"195 nvidia", "235 nvidia-uvm"},
			want:    []string{"/dev/nvidia-uvm c 235:0 0666", "/dev/nvidia-uvm-tools c 235:1 0666", "/dev/nvidia3 c 195:3 0666", "/dev/nvidiactl c 195:255 0666"},
		},
		"no nvidia-uvm": {gone: []string{"nvidia-uvm"}, devices: all, want: []string{"/dev/nvidia-uvm c 235:0 0666", "/dev/nvidia-uvm-tools c 235:1 0666"}},
		"none": {
			gone: []string{"nvidia-uvm", "nvidiactl", "nvidia3"}, devices: all,
			want: []string{"/dev/nvidia-uvm c 235:0 0666", "/dev/nvidia-uvm-tools c 235:1 0666", "/dev/nvidia3 c 121:3 0666", "/dev/nvidiactl c 121:255 0666"},
		},
		"a driver that calls itself nvidia": {
			gone: []string{"nvidia-uvm", "nvidiactl", "nvidia3"}, devices: []string{"195 nvidia", "195 nvidiactl", "510 nvidia-uvm"},
			want: []string{"/dev/nvidia-uvm c 510:0 0666", "/dev/nvidia-uvm-tools c 510:1 0666", "/dev/nvidia3 c 195:3 0666", "/dev/nvidiactl c 195:255 0666"},
		},
		"the module is not loaded": {
			gone: []string{"nvidia-uvm"}, devices: all[:1], loads: true, want: []string{"/dev/nvidia-uvm c 235:0 0666", "/dev/nvidia-uvm-tools c 235:1 0666"},
		},
		"the module was taken out, and has left its node": {
			devices: all[:1], loads: true, want: []string{"/dev/nvidia-uvm c 235:0 0666", "/dev/nvidia-uvm-tools c 235:1 0666"},
		},
		"it was taken out, and cannot be loaded": {devices: all[:1], refused: errors.New("modprobe says no"), err: "there is no /dev/nvidia-uvm: modprobe says no"},
		"the module cannot be loaded": {
			gone: []string{"nvidia-uvm"}, devices: all[:1], refused: errors.New("modprobe says no"), err: "there is no /dev/nvidia-uvm: modprobe says no",
		},
		"the module is loaded and has no device": {gone: []string{"nvidia-uvm"}, devices: all[:1], err: "has no character device nvidia-uvm"},
		"no driver, its control node":            {gone: []string{"nvidiactl"}, err: "there is no /dev/nvidiactl: "},
		"no driver, its GPU":                     {gone: []string{"nvidia3"}, err: "there is no /dev/nvidia3: "},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			sim, one := gpu3(t)
			version, _ := sim.SystemGetDriverVersion()
			root := driverRoot(t, version)
			proc := procOf(t, "", tc.devices...)
			makeHook(t, root)
			var asked []string
			backend := cdi.NewDriver(cdi.DriverOptions{
				NVML: func() nvml.Interface { return sim }, DriverRoot: root, HostDriverRoot: "/run/nvidia/driver", HookPath: "/opt/nvidia/nvidia-cdi-hook", ProcRoot: proc,
				LoadModule: func(_ context.Context, module string) error {
					asked = append(asked, module)
					if tc.loads {
						must(t, os.WriteFile(filepath.Join(proc, "devices"), []byte("Character devices:\n"+strings.Join(all, "\n")), 0o600))
					}
					return tc.refused
				},
			})
			for _, node := range tc.gone {
				must(t, os.Remove(filepath.Join(root, "dev", node)))
			}
			common, err := backend.CommonEdits(t.Context())
			var gpu *specs.ContainerEdits
			if err == nil {
				gpu, err = backend.GPUEdits(t.Context(), one)
			}
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("%v, want an error with %q", err, tc.err)
				}
				return
			}
			must(t, err)
			if diff := cmp.Diff(tc.want, numbered(slices.Concat(common.DeviceNodes, gpu.DeviceNodes))); diff != "" {
				t.Errorf("nodes by number (-want +got):\n%s", diff)
			}
			if (len(asked) > 0) != tc.loads {
				t.Errorf("modules asked for: %q", asked)
			}

			// What is not on the host is not looked for there, and the container has it.
			host := t.TempDir()
			must(t, os.MkdirAll(filepath.Join(host, "run/nvidia"), 0o755))
			must(t, os.Rename(root, filepath.Join(host, "run/nvidia/driver")))
			must(t, os.Symlink("run/nvidia/driver/opt", filepath.Join(host, "opt")))
			store := cdi.NewStore(durable.OS{}, t.TempDir(), host)
			must(t, os.Rename(filepath.Join(host, "run/nvidia/driver"), root))
			write(t, store, backend, train, cdi.Device{Request: "gpu", Name: one.Name, GPU: one})
			must(t, os.Rename(root, filepath.Join(host, "run/nvidia/driver")))
			id := cdi.DeviceID(train, "gpu", one.Name)
			must(t, store.Verify(train, []string{id}))
			var nodes []string
			for _, node := range inject(t, store.Dir(), id).Linux.Devices {
				nodes = append(nodes, node.Path)
			}
			for _, want := range []string{"/dev/nvidia3", "/dev/nvidiactl", "/dev/nvidia-uvm"} {
				if !slices.Contains(nodes, want) {
					t.Errorf("the container has %q, and not %s", nodes, want)
				}
			}
		})
	}
}

// TestControlNodesAreMadeBeforeNVMLIsLoaded: an agent that starts looks after MPS daemons before it looks for GPUs.
func TestControlNodesAreMadeBeforeNVMLIsLoaded(t *testing.T) {
	ctl, uvm := "/dev/nvidiactl 121:255", []string{"/dev/nvidia-uvm 235:0", "/dev/nvidia-uvm-tools 235:1"}
	loaded := []string{"121 nvidia", "235 nvidia-uvm"}
	for name, tc := range map[string]struct {
		gone, devices []string
		loads         bool
		want          []string
		err           string
	}{
		"none is there":            {gone: []string{"nvidia-uvm", "nvidiactl"}, devices: loaded, want: append(uvm, ctl)},
		"the module is not loaded": {gone: []string{"nvidia-uvm"}, devices: loaded[:1], loads: true, want: append(uvm, ctl)},
		"the module was taken out": {devices: loaded[:1], loads: true, want: append(uvm, ctl)},
		"one is of another driver": {devices: loaded, want: append(uvm, ctl)},
		"what is there is not known": {
			devices: []string{"121 something"}, want: []string{"/dev/nvidia-uvm 121:253", "/dev/nvidiactl 121:255"},
		},
		"no module": {gone: []string{"nvidia-uvm"}, devices: loaded[:1], err: "there is no /dev/nvidia-uvm: "},
		"no driver": {gone: []string{"nvidia-uvm"}, err: "there is no /dev/nvidia-uvm: "},
	} {
		t.Run(name, func(t *testing.T) {
			root, proc := driverRoot(t, "570.86.15"), procOf(t, "", tc.devices...)
			for _, node := range tc.gone {
				must(t, os.Remove(filepath.Join(root, "dev", node)))
			}
			var made []string
			err := cdi.NewDriver(cdi.DriverOptions{
				NVML: func() nvml.Interface { return nil }, DriverRoot: root, ProcRoot: proc,
				LoadModule: func(context.Context, string) error {
					if tc.loads {
						must(t, os.WriteFile(filepath.Join(proc, "devices"), []byte("Character devices:\n"+strings.Join(loaded, "\n")), 0o600))
					}
					return nil
				},
				MakeNode: func(path string, major, minor uint32, _ fs.FileMode) error {
					made = append(made, fmt.Sprintf("%s %d:%d", path, major, minor))
					return nil
				},
			}).ControlNodes(t.Context())
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("%v, want an error with %q", err, tc.err)
				}
				return
			}
			slices.Sort(made)
			if diff := cmp.Diff(tc.want, made); err != nil || diff != "" {
				t.Errorf("%v; nodes of the host (-want +got):\n%s", err, diff)
			}
		})
	}
}

// TestAMIGDevicesNodesAreGivenByNumber where NVML has made them in another /dev than the driver's container has.
func TestAMIGDevicesNodesAreGivenByNumber(t *testing.T) {
	root, opts, device, minors := migDriver(t)
	caps := []string{"121 nvidia", "508 nvidia-caps"}
	backend := func(minors string, devices ...string) *cdi.Driver {
		opts.ProcRoot = procOf(t, minors, devices...)
		return cdi.NewDriver(opts)
	}
	want := []string{"/dev/nvidia-caps/nvidia-cap21 c 508:21 0444", "/dev/nvidia-caps/nvidia-cap22 c 508:22 0444"}
	withDriverInProc(t, minors, func() {
		for _, gone := range []string{"", capNode(root, 22), capNode(root, 21)} { // none, but they have another number; one of them; both
			if err := os.Remove(gone); gone != "" && err != nil {
				t.Error(err)
			}
			edits, err := backend(minors, caps...).GPUEdits(t.Context(), device)
			if err != nil {
				t.Errorf("without %s: %v", gone, err)
				continue
			}
			if diff := cmp.Diff(want, numbered(edits.DeviceNodes)); diff != "" {
				t.Errorf("nodes by number, without %s (-want +got):\n%s", gone, diff)
			}
			if len(edits.DeviceNodes) != 3 {
				t.Errorf("%d nodes, want the GPU's and two", len(edits.DeviceNodes))
			}
		}
		for text, b := range map[string]*cdi.Driver{
			"has no gpu": backend("gpu7/gi1/access 1\n", caps...), "has no character device nvidia-caps": backend(minors, caps[0]),
		} {
			if _, err := b.GPUEdits(t.Context(), device); err == nil || !strings.Contains(err.Error(), text) || !strings.Contains(err.Error(), device.UUID) {
				t.Errorf("%v, want an error with %q", err, text)
			}
		}
	})
}
