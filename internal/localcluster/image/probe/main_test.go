// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"stowage.dev/stowage/internal/localcluster/image/report"
)

// unusedMajor is in the range for local and experimental use, so no driver answers.
const unusedMajor = 241

func TestNodesAreDescribedByPathNumbersAndOpening(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make device nodes")
	}
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "nvidia-caps"), 0o755); err != nil {
		t.Fatal(err)
	}
	for i, node := range []string{"nvidia3", "nvidia-caps/nvidia-cap1", "other"} {
		path := filepath.Join(dir, node)
		if err := unix.Mknod(path, unix.S_IFCHR|0o600, int(unix.Mkdev(unusedMajor, uint32(i)))); err != nil {
			t.Skipf("this machine lets no device node be made: %v", err)
		}
		if err := os.Chmod(path, 0o660); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(dir, "nvidia-file"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	got, err := devices(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := []report.Device{
		{Path: filepath.Join(dir, "nvidia-caps/nvidia-cap1"), Type: "char", Major: unusedMajor, Minor: 1, Mode: "0660", Open: report.Admitted},
		{Path: filepath.Join(dir, "nvidia-file"), Type: "other", Mode: "0644", Open: report.Opened},
		{Path: filepath.Join(dir, "nvidia3"), Type: "char", Major: unusedMajor, Mode: "0660", Open: report.Admitted},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

// TestFilesOfTheDriver are those that are mounted, and no others of the container.
func TestFilesOfTheDriver(t *testing.T) {
	const mounts = `21 1 0:19 / / rw - overlay overlay rw
30 21 0:5 /nvidia0 /dev/nvidia0 ro,nosuid - devtmpfs udev rw
31 21 8:1 /driver/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06 /usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06 ro - ext4 /dev/sda1 rw
32 21 8:1 /driver/usr/bin/nvidia-smi /usr/bin/nvidia-smi ro - ext4 /dev/sda1 rw
33 21 8:1 /libnvidia-ml.so.1 /usr/lib64/libnvidia-ml.so.1 ro - ext4 /dev/sda1 rw
34 21 8:1 /usr/bin/nvidia-smi /etc/hosts rw - ext4 /dev/sda1 rw
35 21 0:40 / /tmp/nvidia-mps rw - tmpfs tmpfs rw
`
	want := []string{"/usr/bin/nvidia-smi", "/usr/lib/x86_64-linux-gnu/libcuda.so.580.65.06", "/usr/lib64/libnvidia-ml.so.1"}
	if diff := cmp.Diff(want, files(mounts)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}
