// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
)

// fakeMounts has the sizes of what is mounted, by path. What is in a folder goes with what is mounted there.
type fakeMounts map[string]int64

func (f fakeMounts) mount(path string, bytes int64) error {
	if _, err := os.Stat(filepath.Join(filepath.Dir(path), "..", "full")); err == nil {
		return unix.ENOMEM
	}
	f[path] = bytes
	return empty(path)
}

func (f fakeMounts) unmount(path string) error {
	delete(f, path)
	return empty(path)
}

func empty(path string) error {
	entries, err := os.ReadDir(path)
	for _, entry := range entries {
		err = errors.Join(err, os.RemoveAll(filepath.Join(path, entry.Name())))
	}
	return err
}

func (f fakeMounts) followsNoLinks(path string) error {
	if _, err := os.Stat(filepath.Join(filepath.Dir(path), "..", "old-kernel")); err == nil {
		return errors.New("links are followed")
	}
	return nil
}

func (f fakeMounts) mounted(path string) (bool, error) {
	_, ok := f[path]
	return ok, nil
}

// touch makes an empty file beside the fake programs.
func touch(t *testing.T, opts DriverOptions, name string) {
	t.Helper()
	path := filepath.Join(filepath.Dir(opts.MPSRoot), name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
}

func remove(t *testing.T, opts DriverOptions, name string) {
	t.Helper()
	if err := os.Remove(filepath.Join(filepath.Dir(opts.MPSRoot), name)); err != nil {
		t.Fatal(err)
	}
}

// needsRoot skips what mounts.
func needsRoot(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("stowage-test", dir, "tmpfs", 0, ""); err != nil {
		t.Skipf("file systems cannot be mounted here: %v", err)
	}
	if err := unix.Unmount(dir, 0); err != nil {
		t.Fatal(err)
	}
}

// TestADaemonsFolderIsAFileSystemOfItsOwn: two tenants write as much as they can, and as deep as they can, and neither takes what is the other's
// or the host's. It ends although a program has a file open there, and although nobody could walk it.
func TestADaemonsFolderIsAFileSystemOfItsOwn(t *testing.T) {
	needsRoot(t)
	opts, _ := host(t)
	opts.mounts, opts.ShmBytes = nil, 32<<20
	daemons := NewDriver(opts).Daemons
	names := []string{"claim-1", "claim-2"}
	t.Cleanup(func() {
		for _, name := range names {
			for unix.Unmount(filepath.Join(opts.MPSRoot, name), unix.MNT_DETACH) == nil {
			}
		}
	})
	for _, name := range names {
		if err := daemons.Start(t.Context(), Daemon{Name: name, GPUs: []string{"GPU-" + name}}); err != nil {
			t.Fatal(err)
		}
		shm := filepath.Join(opts.MPSRoot, name, "shm")
		var stat unix.Statfs_t
		if err := unix.Statfs(shm, &stat); err != nil {
			t.Fatal(err)
		}
		if got := int64(stat.Blocks) * stat.Bsize; stat.Type != unix.TMPFS_MAGIC || got != opts.ShmBytes || stat.Files != 2048 {
			t.Errorf("%s: type %x, %d bytes, %d files; want a tmpfs of %d bytes and 2048 files", name, stat.Type, got, stat.Files, opts.ShmBytes)
		}
		const want = unix.ST_NOSUID | unix.ST_NODEV | unix.ST_NOEXEC | nosymfollow
		if stat.Flags&want != want {
			t.Errorf("%s: flags %x, want %x", name, stat.Flags, want)
		}
	}
	open, err := os.Create(filepath.Join(opts.MPSRoot, names[0], "pipe", "big"))
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	if err := errors.Join(open.Truncate(opts.ShmBytes+1<<20), unix.Fallocate(int(open.Fd()), 0, 0, opts.ShmBytes+1<<20)); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("more than there is: %v, want that there is no room", err)
	}
	if err := open.Truncate(0); err != nil {
		t.Fatal(err)
	}
	nest(t, filepath.Join(opts.MPSRoot, names[0], "shm"))
	if err := os.WriteFile(filepath.Join(opts.MPSRoot, names[1], "shm", "x"), make([]byte, 1<<20), 0o600); err != nil {
		t.Errorf("the other tenant: %v", err)
	}
	// Nobody has as many descriptors as there are levels.
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	few := limit
	few.Cur = 256
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &few); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	for _, name := range names {
		if err := daemons.Stop(t.Context(), name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Lstat(filepath.Join(opts.MPSRoot, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: its folder: %v", name, err)
		}
	}
}

// nest makes a folder in a folder, and so on, until there is no file left to be made.
func nest(t *testing.T, dir string) {
	t.Helper()
	at, err := unix.Open(dir, unix.O_DIRECTORY, 0)
	if err != nil {
		t.Fatal(err)
	}
	depth := 0
	for ; ; depth++ {
		if depth > 10_000 {
			t.Fatal("there is no limit")
		}
		if err := unix.Mkdirat(at, "d", 0o777); errors.Is(err, unix.ENOSPC) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		next, err := unix.Openat(at, "d", unix.O_DIRECTORY, 0)
		if err != nil {
			t.Fatal(err)
		}
		_ = unix.Close(at)
		at = next
	}
	_ = unix.Close(at)
	if depth < 1000 {
		t.Fatalf("only %d levels", depth)
	}
}

// TestWhereLinksAreFollowedNoDaemonIsStarted: a daemon is root, and its clients can put links where it writes.
func TestWhereLinksAreFollowedNoDaemonIsStarted(t *testing.T) {
	for name, before := range map[string]bool{"a new folder": false, "one that containers have": true} {
		t.Run(name, func(t *testing.T) {
			opts, calls := host(t)
			opts.mounts = fakeMounts{}
			daemons := NewDriver(opts).Daemons
			daemon := Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}}
			if before {
				if err := daemons.Start(t.Context(), daemon); err != nil {
					t.Fatal(err)
				}
				remove(t, opts, "unit") // it died
			}
			calls()
			touch(t, opts, "old-kernel")
			if err := daemons.Start(t.Context(), daemon); err == nil || !strings.Contains(err.Error(), "links are followed") {
				t.Errorf("error %v, want that links are followed", err)
			}
			if got := calls(); slices.ContainsFunc(got, func(c string) bool { return strings.HasPrefix(c, "systemd-run ") }) {
				t.Errorf("it is started: %q", got)
			}
			if err := daemons.Stop(t.Context(), daemon.Name); err != nil || len(opts.mounts.(fakeMounts)) > 0 {
				t.Errorf("stopped: %v; mounted: %v", err, opts.mounts)
			}
		})
	}
}

// TestTheKernelSaysWhetherItFollowsLinks: one that does not know the flag mounts without it.
func TestTheKernelSaysWhetherItFollowsLinks(t *testing.T) {
	needsRoot(t)
	path := t.TempDir()
	t.Cleanup(func() {
		for unix.Unmount(path, unix.MNT_DETACH) == nil {
		}
	})
	if err := unix.Mount("stowage-test", path, "tmpfs", 0, ""); err != nil { // as an older kernel does it
		t.Fatal(err)
	}
	var k kernelMounts
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	if err := k.followsNoLinks(path); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "Linux "+strings.TrimSpace(string(release))+":") {
		t.Errorf("error %v, want one that names the folder and the kernel", err)
	}
	if err := k.mount(path, 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(k.followsNoLinks(path), os.Symlink("/", filepath.Join(path, "link"))); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(path, "link")); !errors.Is(err, unix.ELOOP) {
		t.Errorf("the link is followed: %v", err)
	}
}

// TestAFullFolderDoesNotKeepADaemonFromItsLimits: tenants can fill the folder, and the daemon is ready all the same.
func TestAFullFolderDoesNotKeepADaemonFromItsLimits(t *testing.T) {
	needsRoot(t)
	opts, calls := host(t)
	opts.mounts, opts.ShmBytes = nil, 1<<20
	daemons := NewDriver(opts).Daemons
	daemon := Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}, ActiveThreadPercentage: 50}
	dir := filepath.Join(opts.MPSRoot, daemon.Name)
	t.Cleanup(func() {
		for unix.Unmount(dir, unix.MNT_DETACH) == nil {
		}
	})
	touch(t, opts, "deaf") // the agent ends before it has set the limits
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		_ = wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true, func(context.Context) (bool, error) {
			_, err := os.Stat(filepath.Join(filepath.Dir(opts.MPSRoot), "unit"))
			return err == nil, nil
		})
		cancel()
	}()
	if err := daemons.Start(ctx, daemon); err == nil {
		t.Fatal("no limits are set, and it is no error")
	}
	remove(t, opts, "deaf")
	full := error(nil)
	for i := 0; full == nil && i < 1000; i++ {
		full = os.WriteFile(filepath.Join(dir, "shm", strconv.Itoa(i)), nil, 0o600)
	}
	if !errors.Is(full, unix.ENOSPC) {
		t.Fatal(full)
	}
	for _, when := range []string{"it runs", "it died, and is started again"} {
		if err := daemons.Start(t.Context(), daemon); err != nil {
			t.Errorf("%s: %v", when, err)
		}
		if ready, err := daemons.Ready(t.Context(), daemon); !ready || err != nil {
			t.Errorf("%s: ready %t, %v", when, ready, err)
		}
		if got := calls(); !slices.Contains(got, "mps: set_default_active_thread_percentage 50") {
			t.Errorf("%s: calls %q, want that it gets its limits", when, got)
		}
		if names, err := daemons.List(); err != nil || !slices.Equal(names, []string{daemon.Name}) {
			t.Errorf("%s: listed are %v, %v", when, names, err)
		}
		_ = os.Remove(filepath.Join(filepath.Dir(opts.MPSRoot), "unit"))
	}
	if err := daemons.Stop(t.Context(), daemon.Name); err != nil {
		t.Error(err)
	}
	if left, err := os.ReadDir(opts.MPSRoot); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestAMountThatTheHostDoesNotSee is refused, with what to do about it, and does not stay.
func TestAMountThatTheHostDoesNotSee(t *testing.T) {
	needsRoot(t)
	path, hostRoot := t.TempDir(), t.TempDir()
	if err := os.MkdirAll(filepath.Join(hostRoot, path), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	k := kernelMounts{hostRoot: hostRoot}
	if err := k.mount(path, 1<<20); err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "Bidirectional") {
		t.Errorf("error %v, want one that names the folder and the volume's setting", err)
	}
	if mounted, err := k.mounted(path); mounted || err != nil {
		t.Errorf("mounted: %v, %v", mounted, err)
	}
}

// TestWhatAKilledAgentHasMountedIsFound: wherever it ended, the next one lists the daemon and leaves nothing of it.
func TestWhatAKilledAgentHasMountedIsFound(t *testing.T) {
	for name, tc := range map[string]struct {
		fails   string // a file that makes a program fail
		mounted bool
	}{
		"before the mount":            {"full", false},
		"before the daemon's start":   {"refuse", true},
		"before its limits":           {"deaf", true},
		"when it had all of it":       {"", true},
		"while the daemon was ending": {"ending", true},
	} {
		t.Run(name, func(t *testing.T) {
			opts, _ := host(t)
			opts.mounts = fakeMounts{}
			if tc.fails != "" && tc.fails != "ending" {
				touch(t, opts, tc.fails)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
			defer cancel()
			if tc.fails == "" || tc.fails == "ending" {
				ctx = t.Context()
			}
			err := NewDriver(opts).Daemons.Start(ctx, Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}})
			if failed := tc.fails != "" && tc.fails != "ending"; (err != nil) != failed {
				t.Fatalf("start: %v", err)
			}
			if tc.fails == "ending" {
				touch(t, opts, "ending")
			}
			if got := len(opts.mounts.(fakeMounts)) == 1; got != tc.mounted {
				t.Fatalf("mounted: %v, want %v", got, tc.mounted)
			}
			next := NewDriver(opts).Daemons
			if names, err := next.List(); err != nil || !slices.Equal(names, []string{"claim-1"}) {
				t.Errorf("listed are %v, %v", names, err)
			}
			for range 2 { // the second time there is none
				if err := next.Stop(t.Context(), "claim-1"); err != nil {
					t.Fatal(err)
				}
			}
			if names, err := next.List(); err != nil || len(names)+len(opts.mounts.(fakeMounts)) > 0 {
				t.Errorf("left: %v, %v, %v", names, opts.mounts, err)
			}
		})
	}
}

// TestADaemonThatIsStartedAgainIsFoundByItsClients: containers have its folder, so that stays, with none of the files that the one before has left.
func TestADaemonThatIsStartedAgainIsFoundByItsClients(t *testing.T) {
	opts, calls := host(t)
	mounts := fakeMounts{}
	opts.mounts = mounts
	daemons := NewDriver(opts).Daemons
	daemon := Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}, ActiveThreadPercentage: 50}
	if err := daemons.Start(t.Context(), daemon); err != nil {
		t.Fatal(err)
	}
	for _, left := range []string{"mps/claim-1/pipe/control", "mps/claim-1/pipe/control_lock/deep", "mps/claim-1/shm/cuda.shm"} {
		touch(t, opts, left)
	}
	if err := os.Mkdir(filepath.Join(opts.MPSRoot, "claim-1", "pipe", "empty"), 0o755); err != nil {
		t.Fatal(err)
	}
	inode := func() (ino uint64) {
		var stat unix.Stat_t
		if err := unix.Lstat(filepath.Join(opts.MPSRoot, "claim-1", "pipe"), &stat); err != nil {
			t.Fatal(err)
		}
		return stat.Ino
	}
	before := inode()
	remove(t, opts, "unit") // it died
	calls()
	if err := daemons.Start(t.Context(), daemon); err != nil {
		t.Fatal(err)
	}
	if after := inode(); after != before || len(mounts) != 1 {
		t.Errorf("the pipe folder is another one (inode %d, %d), mounts %v", before, after, mounts)
	}
	var left []string
	for _, folder := range []string{"pipe", "shm"} {
		entries, err := os.ReadDir(filepath.Join(opts.MPSRoot, "claim-1", folder))
		if err != nil {
			t.Fatal(err)
		}
		for _, entry := range entries {
			left = append(left, folder+"/"+entry.Name())
		}
	}
	if diff := cmp.Diff([]string{"shm/cuda.shm"}, left); diff != "" {
		t.Errorf("left (-want +got):\n%s", diff)
	}
	if got := calls(); !slices.ContainsFunc(got, func(c string) bool { return strings.HasPrefix(c, "systemd-run ") }) ||
		!slices.Contains(got, "mps: set_default_active_thread_percentage 50") {
		t.Errorf("calls %q, want that it is started and gets its limits", got)
	}
}

// TestADaemonStartsInACleanFolderWhateverTenantsNested: containers have the folder mounted, under whose names tenants made folders until there was no room for
// another one. Each start takes them away, and containers meet the new daemon in the folder that they have.
func TestADaemonStartsInACleanFolderWhateverTenantsNested(t *testing.T) {
	needsRoot(t)
	opts, _ := host(t)
	opts.mounts, opts.ShmBytes = nil, 32<<20
	daemons := NewDriver(opts).Daemons
	daemon := Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}}
	dir, container := filepath.Join(opts.MPSRoot, daemon.Name), t.TempDir()
	t.Cleanup(func() {
		for _, path := range []string{container, dir} {
			for unix.Unmount(path, unix.MNT_DETACH) == nil {
			}
		}
	})
	if err := daemons.Start(t.Context(), daemon); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(filepath.Join(dir, "pipe"), container, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	for times := range 3 {
		for _, name := range []string{"control", "control_lock"} {
			if err := os.MkdirAll(filepath.Join(container, name, "deep"), 0o777); err != nil {
				t.Fatal(err)
			}
		}
		if times == 2 {
			nest(t, filepath.Join(container, "control"))
		}
		remove(t, opts, "unit") // it died
		if err := daemons.Start(t.Context(), daemon); err != nil {
			t.Fatal(err)
		}
		for _, path := range []string{container, filepath.Join(dir, "pipe")} {
			if left, err := os.ReadDir(path); err != nil || len(left) > 0 {
				t.Errorf("start %d: in %s are %v, %v", times+1, path, left, err)
			}
		}
	}
	if err := daemons.Stop(t.Context(), daemon.Name); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the folder of a daemon that is stopped: %v", err)
	}
}

// TestWhatAProgramSaysIsClipped before it is kept, however much it is.
func TestWhatAProgramSaysIsClipped(t *testing.T) {
	opts, _ := host(t)
	dir := filepath.Dir(opts.MPSRoot)
	text := "#!/bin/sh\nhead -c 3000000 /dev/zero | tr '\\0' '\\377'\nexit 3\n"
	if err := os.WriteFile(filepath.Join(dir, "nvidia-smi"), []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	err := NewDriver(opts).TimeSlicer.SetTimeSlice(t.Context(), strings.Repeat("GPU-", 1000), "Long")
	if err == nil || len(err.Error()) > 8*maxOutput+len(strings.Repeat("GPU-", 1000)) {
		t.Errorf("%d bytes of error", len(err.Error()))
	}
	h := head{most: maxOutput + 1}
	for range 1000 {
		if n, err := h.Write(make([]byte, 1000)); n != 1000 || err != nil {
			t.Fatalf("%d, %v", n, err)
		}
	}
	if h.Len() > maxOutput+1 {
		t.Errorf("%d bytes are kept in memory", h.Len())
	}
}
