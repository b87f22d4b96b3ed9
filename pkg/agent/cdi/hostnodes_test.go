// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/cdi"
)

// nodeAt describes what is there, without following links.
func nodeAt(t *testing.T, path string) string {
	t.Helper()
	var stat unix.Stat_t
	if err := unix.Lstat(path, &stat); err != nil {
		return err.Error()
	}
	switch stat.Mode & unix.S_IFMT {
	case unix.S_IFCHR:
		return fmt.Sprintf("c %d:%d %04o", unix.Major(stat.Rdev), unix.Minor(stat.Rdev), stat.Mode&0o7777)
	case unix.S_IFLNK:
		return "link"
	}
	return "other"
}

// TestMakeNode with two agents, as during an upgrade, that prepare several claims.
func TestMakeNode(t *testing.T) {
	requireMknod(t)
	mknod := func(mode uint32, major, minor uint32) func(*testing.T, string) {
		return func(t *testing.T, path string) { must(t, unix.Mknod(path, mode, int(unix.Mkdev(major, minor)))) }
	}
	tests := map[string]struct {
		before func(t *testing.T, path string)
		name   string
		want   string
		fails  bool
	}{
		"there is none":                     {want: "c 121:7 0666"},
		"there is no folder":                {name: "nvidia-caps/nvidia-cap7", want: "c 121:7 0666"},
		"it is there, with the host's mode": {before: mknod(unix.S_IFCHR|0o600, 121, 7), want: "c 121:7 0600"},
		"one of a module that is gone":      {before: mknod(unix.S_IFCHR|0o600, 122, 7), want: "c 121:7 0666"},
		"one of another minor":              {before: mknod(unix.S_IFCHR|0o600, 121, 8), want: "c 121:7 0666"},
		"a block device":                    {before: mknod(unix.S_IFBLK|0o600, 121, 7), want: "other", fails: true},
		"a link":                            {before: func(t *testing.T, path string) { must(t, os.Symlink("elsewhere", path)) }, want: "link", fails: true},
		"a file":                            {before: func(t *testing.T, path string) { must(t, os.WriteFile(path, nil, 0o600)) }, want: "other", fails: true},
		"what an agent that crashed has left": {
			before: func(t *testing.T, path string) {
				mknod(unix.S_IFCHR|0o600, 9, 9)(t, fmt.Sprintf("%s.stowage.%d", path, os.Getpid()))
			},
			want: "c 121:7 0666",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			dev := t.TempDir()
			path := filepath.Join(dev, "nvidia-uvm")
			if tc.name != "" {
				path = filepath.Join(dev, tc.name)
			}
			if tc.before != nil {
				tc.before(t, path)
			}
			var group sync.WaitGroup
			for range 8 {
				group.Go(func() {
					if err := cdi.MakeNode(path, 121, 7, 0o666); (err != nil) != tc.fails {
						t.Errorf("%v, want an error: %t", err, tc.fails)
					}
				})
			}
			group.Wait()
			if got := nodeAt(t, path); got != tc.want {
				t.Errorf("there is %s, want %s", got, tc.want)
			}
			if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) != 1 {
				t.Errorf("beside it there is %v, %v", left, err)
			}
		})
	}
}

// TestANodeThatCannotBeMadeIsNotReplaced: a container would have the old one, and others none.
func TestANodeThatCannotBeMadeIsNotReplaced(t *testing.T) {
	requireMknod(t)
	dev := t.TempDir()
	path := filepath.Join(dev, "nvidia-uvm")
	if err := unix.Mount("test", dev, "tmpfs", 0, "size=1m"); err != nil {
		t.Skip("nothing can be mounted here: ", err)
	}
	t.Cleanup(func() { must(t, unix.Unmount(dev, unix.MNT_DETACH)) })
	must(t, unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(122, 7))))
	must(t, unix.Mount("test", dev, "tmpfs", unix.MS_REMOUNT|unix.MS_RDONLY, ""))
	if err := cdi.MakeNode(path, 121, 7, 0o666); !errors.Is(err, unix.EROFS) {
		t.Errorf("%v, want %v", err, unix.EROFS)
	}
	if got := nodeAt(t, path); got != "c 122:7 0600" {
		t.Errorf("there is %s", got)
	}
}

// TestTheHostGetsTheDriversNodes, those of a driver container, too: for a container in a user namespace the runtime takes them from the host's /dev.
func TestTheHostGetsTheDriversNodes(t *testing.T) {
	all := []string{"/dev/nvidia-uvm 235:0 0666", "/dev/nvidia-uvm-tools 235:1 0666", "/dev/nvidia3 121:3 0666", "/dev/nvidiactl 121:255 0666"}
	tests := map[string]struct {
		params string
		fails  error
		want   []string
	}{
		"the driver's default":               {params: "ModifyDeviceFiles: 1\nDeviceFileMode: 438\n", want: all},
		"no parameters":                      {want: all},
		"none can be made":                   {fails: unix.EROFS, want: all},
		"the host's are for root":            {params: "DeviceFileMode: 384\n"},
		"the host's are for a group":         {params: "DeviceFileUID: 0\nDeviceFileGID: 44\nDeviceFileMode: 432\n"},
		"parameters that nobody understands": {params: "DeviceFileMode: all\n", want: all},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			sim, one := gpu3(t)
			version, _ := sim.SystemGetDriverVersion()
			root := driverRoot(t, version)
			// What is not the driver's is the kernel's to make.
			must(t, os.MkdirAll(filepath.Join(root, "dev/dri"), 0o755))
			proc := procOf(t, "", "121 nvidia", "235 nvidia-uvm")
			must(t, os.MkdirAll(filepath.Join(proc, "driver/nvidia"), 0o755))
			must(t, os.WriteFile(filepath.Join(proc, "driver/nvidia/params"), []byte(tc.params), 0o600))
			var made []string
			opts := cdi.DriverOptions{
				NVML: func() nvml.Interface { return sim }, DriverRoot: root, HostDriverRoot: "/run/nvidia/driver", HookPath: "/hook", ProcRoot: proc,
			}
			edits := func() (nodes []*specs.DeviceNode) {
				backend := cdi.NewDriver(opts)
				common, err := backend.CommonEdits(t.Context())
				must(t, err)
				gpu, err := backend.GPUEdits(t.Context(), one)
				must(t, err)
				return slices.Concat(common.DeviceNodes, gpu.DeviceNodes)
			}
			without := edits()
			opts.MakeNode = func(path string, major, minor uint32, mode fs.FileMode) error {
				made = append(made, fmt.Sprintf("%s %d:%d %04o", path, major, minor, mode))
				return tc.fails
			}
			if diff := cmp.Diff(without, edits()); diff != "" {
				t.Errorf("containers get other nodes (-without +with):\n%s", diff)
			}
			slices.Sort(made)
			if diff := cmp.Diff(tc.want, made); diff != "" {
				t.Errorf("nodes of the host (-want +got):\n%s", diff)
			}
		})
	}
}
