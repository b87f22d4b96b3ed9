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
