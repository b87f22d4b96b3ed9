// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package vfio_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"stowage.dev/stowage/pkg/agent/vfio"
)

// TestProcessesAreFoundByTheDeviceThatTheyHaveOpen looks at a folder like /proc: what a file is called does not matter.
func TestProcessesAreFoundByTheDeviceThatTheyHaveOpen(t *testing.T) {
	root := t.TempDir()
	link := func(pid, fd, target string) {
		t.Helper()
		dir := filepath.Join(root, pid, "fd")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(target, filepath.Join(dir, fd)); err != nil {
			t.Fatal(err)
		}
	}
	// /dev/null and /dev/zero stand for GPUs; a container's node has another path.
	link("70", "0", "/dev/zero")
	link("70", "3", "/dev/null")
	link("8", "0", "/dev/null")
	link("9", "0", "/dev/zero")
	link("9", "1", filepath.Join(root, "9"))                           // no device
	link("9", "2", filepath.Join(root, "gone"))                        // closed meanwhile
	link("self", "0", "/dev/null")                                     // no number
	if err := os.Mkdir(filepath.Join(root, "10"), 0o755); err != nil { // a process that has just ended
		t.Fatal(err)
	}
	users := vfio.Proc{Root: root}
	for want, nodes := range map[string][]string{
		"[8 70]":   {"/dev/null", "/dev/nosuchnode"},
		"[8 9 70]": {"/dev/null", "/dev/zero"},
		"[]":       {"/dev/nosuchnode"},
	} {
		pids, err := users.Of(t.Context(), nodes...)
		if err != nil || fmt.Sprint(pids) != want {
			t.Errorf("%v: %v, %v, want %s", nodes, pids, err, want)
		}
	}
	// This very process, through the real /proc.
	open, err := os.Open("/dev/full")
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	if err := os.Symlink("/proc/self", filepath.Join(root, fmt.Sprint(os.Getpid()))); err != nil {
		t.Fatal(err)
	}
	pids, err := users.Of(t.Context(), "/dev/full")
	if err != nil || fmt.Sprint(pids) != fmt.Sprint([]int{os.Getpid()}) {
		t.Errorf("users of /dev/full: %v, %v, want this process %d", pids, err, os.Getpid())
	}
	if _, err := (vfio.Proc{Root: filepath.Join(root, "none")}).Of(t.Context(), "/dev/null"); err == nil {
		t.Error("without /proc nobody has anything open")
	}
}

// TestAFileSystemThatNeverAnswersHoldsNobodyUp: a process has a folder open on a FUSE file system whose server does not even say hello. Whoever
// asks it for anything waits for ever.
func TestAFileSystemThatNeverAnswersHoldsNobodyUp(t *testing.T) {
	server, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skipf("no FUSE here: %v", err)
	}
	mountpoint := t.TempDir()
	if err := unix.Mount("none", mountpoint, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server)); err != nil {
		unix.Close(server)
		t.Skipf("may not mount: %v", err)
	}
	t.Cleanup(func() {
		_ = unix.Close(server) // whoever waits gets an error
		if err := unix.Unmount(mountpoint, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	folder, err := unix.Open(mountpoint, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(folder) })
	root, self := t.TempDir(), fmt.Sprint(os.Getpid())
	if err := os.Symlink("/proc/self", filepath.Join(root, self)); err != nil {
		t.Fatal(err)
	}
	type answer struct {
		pids []uint32
		err  error
	}
	done := make(chan answer, 1)
	go func() {
		pids, err := vfio.Proc{Root: root}.Of(t.Context(), "/dev/full") // nobody's, so that all files are looked at
		done <- answer{pids, err}
	}()
	select {
	case got := <-done:
		if got.err != nil || len(got.pids) > 0 {
			t.Errorf("%v, %v, want nobody", got.pids, got.err)
		}
	case <-time.After(time.Minute):
		t.Error("waits for the file system's server")
	}
}
