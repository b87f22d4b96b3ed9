// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// migDriver is stand-in files of a driver with a MIG device on GPU 3, on a machine of which another GPU has fallen off the bus, and what the driver says in /proc of its nodes.
func migDriver(t *testing.T) (root string, opts cdi.DriverOptions, device cdi.GPU, minors string) {
	t.Helper()
	profile, err := nvmlsim.LoadProfile("dgx-h100")
	must(t, err)
	machine := nvmlsim.NewMachine(profile, "node-1")
	for _, c := range []nvmlsim.Command{&nvmlsim.SetMIG{GPU: "3", Enabled: true}, &nvmlsim.CreateMIG{GPU: "3", Profile: "1g.10gb"}, &nvmlsim.CreateMIG{GPU: "3", Profile: "3g.40gb"}, &nvmlsim.LoseGPU{GPU: "5"}} {
		_, err := machine.Do(c)
		must(t, err)
	}
	sim := machine.NVML()
	if ret := sim.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	root = driverRoot(t, profile.System.DriverVersion)
	handle, _ := sim.DeviceGetHandleByIndex(3)
	minor, _ := handle.GetMinorNumber()
	must(t, os.Mkdir(filepath.Join(root, "dev/nvidia-caps"), 0o755))
	for i := range 2 {
		mig, ret := handle.GetMigDeviceHandleByIndex(i)
		if ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
		uuid, _ := mig.GetUUID()
		gi, _ := mig.GetGpuInstanceId()
		ci, _ := mig.GetComputeInstanceId()
		first := 21 + 10*i
		minors += fmt.Sprintf("gpu%d/gi%d/access %d\ngpu%d/gi%d/ci%d/access %d\n", minor, gi, first, minor, gi, ci, first+1)
		for n := range 2 {
			must(t, unix.Mknod(capNode(root, first+n), unix.S_IFCHR|0o400, int(unix.Mkdev(121, uint32(first+n)))))
		}
		if i == 0 {
			device = cdi.GPU{Name: "gpu-0000-03-00-0", UUID: uuid, PCIBusID: "0000:61:00.0", Minor: minor}
		}
	}
	return root, cdi.DriverOptions{NVML: func() nvml.Interface { return sim }, DriverRoot: root, ProcRoot: t.TempDir()}, device, minors
}

func capNode(root string, n int) string {
	return filepath.Join(root, "dev/nvidia-caps", fmt.Sprint("nvidia-cap", n))
}

// withDriverInProc does f with a /proc/driver of its own, which is where nvcdi reads the numbers of a MIG device's nodes.
func withDriverInProc(t *testing.T, minors string, f func()) {
	t.Helper()
	if _, err := os.Stat("/proc/driver/nvidia-caps"); err == nil {
		t.Skip("a real driver is loaded: its MIG devices are not those of this test")
	}
	ended := make(chan error, 1)
	go func() {
		// The thread has another view of the file system from now on, so it ends with the goroutine.
		runtime.LockOSThread()
		const folder = "/proc/driver"
		err := errors.Join(unix.Unshare(unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""), unix.Mount("none", folder, "tmpfs", 0, ""))
		if err != nil {
			ended <- err
			return
		}
		caps := filepath.Join(folder, "nvidia-caps")
		if err = errors.Join(os.Mkdir(caps, 0o755), os.WriteFile(filepath.Join(caps, "mig-minors"), []byte(minors), 0o600)); err == nil {
			f()
		}
		ended <- err
	}()
	if err := <-ended; errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		t.Skipf("a /proc/driver cannot be stood in for without the right to mount: %v", err)
	} else if err != nil {
		t.Fatal(err)
	}
}

// TestAMIGDeviceHasItsOwnNodes runs nvcdi over stand-in files: the container gets the GPU's node, and the two by which the driver knows
// what of the GPU it may use.
func TestAMIGDeviceHasItsOwnNodes(t *testing.T) {
	root, opts, device, minors := migDriver(t)
	backend := cdi.NewDriver(opts)
	withDriverInProc(t, minors, func() {
		edits, err := backend.GPUEdits(t.Context(), device)
		if err != nil {
			t.Error(err)
			return
		}
		var got []string
		for _, node := range edits.DeviceNodes {
			got = append(got, node.Path)
			if want := fs.FileMode(0o444); *node.FileMode&want != want {
				t.Errorf("%s has mode %v: not all in the container may open it", node.Path, node.FileMode)
			}
		}
		slices.Sort(got)
		if diff := cmp.Diff([]string{"/dev/nvidia-caps/nvidia-cap21", "/dev/nvidia-caps/nvidia-cap22", "/dev/nvidia3"}, got); diff != "" {
			t.Errorf("device nodes (-want +got):\n%s", diff)
		}
		for _, missing := range []string{capNode(root, 22), capNode(root, 21), filepath.Join(root, "dev/nvidia3")} {
			if err := os.Remove(missing); err != nil {
				t.Error(err)
			}
			if _, err := backend.GPUEdits(t.Context(), device); err == nil || !strings.Contains(err.Error(), filepath.Base(missing)) || !strings.Contains(err.Error(), device.UUID) {
				t.Errorf("without %s: %v, want an error that names it", missing, err)
			}
		}
	})
}

// TestAMIGDeviceThatTheDriverDoesNotKnow has no nodes that could be looked for.
func TestAMIGDeviceThatTheDriverDoesNotKnow(t *testing.T) {
	_, opts, device, _ := migDriver(t)
	backend := cdi.NewDriver(opts)
	withDriverInProc(t, "gpu7/gi1/access 1\n", func() {
		if edits, err := backend.GPUEdits(t.Context(), device); err == nil || !strings.Contains(err.Error(), device.UUID) {
			t.Errorf("%+v, %v: want an error that names it", edits, err)
		}
	})
}
