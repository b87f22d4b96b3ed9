// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package durable_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
)

// TestAFailureIsToldOnce, and not again for what was to be cleaned up.
func TestAFailureIsToldOnce(t *testing.T) {
	folder := t.TempDir()
	file := filepath.Join(folder, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	path, written := filepath.Join(file, "record"), filepath.Join(folder, "record")
	tests := map[string]struct {
		fsys durable.FS
		path string
		want string
	}{
		"nothing can be made":           {durable.OS{}, path, "open " + path + ".tmp: not a directory"},
		"nothing can be renamed":        {sealed{remove: syscall.EROFS}, written, "rename " + written + ".tmp " + written + ": read-only file system"},
		"the cleanup has its own cause": {sealed{remove: syscall.EIO}, written, "rename " + written + ".tmp " + written + ": read-only file system\nremove " + written + ".tmp: input/output error"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if err := durable.WriteFile(tc.fsys, tc.path, []byte("new"), 0o600); err == nil || err.Error() != tc.want {
				t.Errorf("%v, want %s", err, tc.want)
			}
		})
	}
}

// sealed is a file system that becomes read-only when a file has been written. Its errors are those of package os. remove is why nothing
// can be removed.
type sealed struct {
	durable.OS
	remove error
}

func (sealed) Rename(oldPath, newPath string) error {
	return &os.LinkError{Op: "rename", Old: oldPath, New: newPath, Err: syscall.EROFS}
}

func (f sealed) Remove(path string) error {
	return &fs.PathError{Op: "remove", Path: path, Err: f.remove}
}

// TestAReaderFindsTheOldContentOrTheNew fails or crashes at every file operation of a write.
func TestAReaderFindsTheOldContentOrTheNew(t *testing.T) {
	write := func(t *testing.T, faulty *durabletest.Faulty) (path string, err error) {
		t.Helper()
		path = filepath.Join(t.TempDir(), "file")
		if err := durable.WriteFile(durable.OS{}, path, []byte("old"), 0o640); err != nil {
			t.Fatal(err)
		}
		return path, durable.WriteFile(faulty, path, []byte("new"), 0o640)
	}
	count := &durabletest.Faulty{FS: durable.OS{}}
	if _, err := write(t, count); err != nil {
		t.Fatal(err)
	}
	for at := range len(count.Steps()) + 1 {
		for _, mode := range []durabletest.Mode{durabletest.Fail, durabletest.CrashBefore, durabletest.CrashAfter} {
			path, err := write(t, &durabletest.Faulty{FS: durable.OS{}, Mode: mode, At: at})
			got, readErr := os.ReadFile(path)
			if readErr != nil {
				t.Fatal(readErr)
			}
			if string(got) != "new" && (string(got) != "old" || err == nil) {
				t.Errorf("%v step %d: content %q after error %v", mode, at, got, err)
			}
			info, statErr := os.Stat(path)
			if statErr != nil || info.Mode().Perm() != 0o640 {
				t.Errorf("%v step %d: mode %v, %v", mode, at, info.Mode(), statErr)
			}
		}
	}
}

// TestWhatIsReportedAsDoneOutlivesAPowerCut: a file that is written or removed is so after it; one that was being written is as before, or
// as it was to be.
func TestWhatIsReportedAsDoneOutlivesAPowerCut(t *testing.T) {
	tests := map[string]struct {
		do   func(fsys durable.FS, path string) error
		want string // "" for no file
	}{
		"written": {func(fsys durable.FS, path string) error { return durable.WriteFile(fsys, path, []byte("new"), 0o600) }, "new"},
		"restored": {func(fsys durable.FS, path string) error {
			_, err := durable.Restore(fsys, path, []byte("new"), 0o600)
			return err
		}, "new"},
		"removed": {durable.Remove, ""},
		"written once": {func(fsys durable.FS, path string) error {
			return errors.Join(durable.Remove(fsys, path), durable.WriteFile(fsys, path, []byte("new"), 0o600))
		}, "new"},
	}
	luck := map[string]func() bool{
		"nothing else is on the disk": nil,
		"everything is":               func() bool { return true },
	}
	for i := range 8 { // all that there can be of three coins
		n := 0
		luck[fmt.Sprintf("coins %03b", i)] = func() bool { n++; return i>>(n%3)&1 == 1 }
	}
	for name, tc := range tests {
		for lucky, coin := range luck {
			t.Run(name+", "+lucky, func(t *testing.T) {
				steps := -1
				for at := 0; steps < 0 || at <= steps; at++ {
					disk := durabletest.NewVolatile()
					path := filepath.Join(t.TempDir(), "file")
					if err := durable.WriteFile(disk, path, []byte("old"), 0o600); err != nil {
						t.Fatal(err)
					}
					faulty := &durabletest.Faulty{FS: disk, Mode: durabletest.CrashAfter, At: at}
					err := tc.do(faulty, path)
					if at == 0 {
						steps = len(faulty.Steps())
					}
					if err := disk.PowerCut(coin); err != nil {
						t.Fatal(err)
					}
					data, readErr := os.ReadFile(path)
					if readErr != nil && !errors.Is(readErr, fs.ErrNotExist) {
						t.Fatal(readErr)
					}
					if got := string(data); got != tc.want && (err == nil || got != "old" && (got != "" || name != "written once" || readErr == nil)) {
						t.Errorf("cut at step %d, after %v: content %q, %v", at, err, got, readErr)
					}
				}
			})
		}
	}
}

// locks of either kind.
var locks = map[string]func(ctx context.Context, path string) (func(), error){
	"of a file": durable.Lock,
	"of a key": func(ctx context.Context, path string) (func(), error) {
		return durable.LockKey(ctx, path, "8b8e7a52-5d0b-4f6a-9a55-6d2a3c1c6a10")
	},
}

func TestALockExcludesEverybodyElse(t *testing.T) {
	for name, lock := range locks {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "lock")
			var holders, most atomic.Int64
			var group sync.WaitGroup
			for range 20 {
				group.Go(func() {
					unlock, err := lock(t.Context(), path)
					if err != nil {
						t.Error(err)
						return
					}
					if n := holders.Add(1); n > most.Load() {
						most.Store(n)
					}
					holders.Add(-1)
					unlock()
				})
			}
			group.Wait()
			if most.Load() != 1 {
				t.Errorf("%d held the lock at once", most.Load())
			}
		})
	}
}

func TestALockIsNotWaitedForLongerThanTheCallerWants(t *testing.T) {
	for name, lock := range locks {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "lock")
			unlock, err := lock(t.Context(), path)
			if err != nil {
				t.Fatal(err)
			}
			defer unlock()
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
			defer cancel()
			if _, err := lock(ctx, path); !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("error %v, want the context's", err)
			}
		})
	}
}

// TestKeysDoNotWaitForEachOther: a claim that waits for a GPU that is stuck holds its own lock, which must be nobody else's.
func TestKeysDoNotWaitForEachOther(t *testing.T) {
	path := filepath.Join(t.TempDir(), "locks")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for i := range 1000 {
		unlock, err := durable.LockKey(ctx, path, fmt.Sprintf("claim-%d", i))
		if err != nil {
			t.Fatal(err)
		}
		defer unlock()
	}
	if info, err := os.Stat(path); err != nil || info.Size() != 0 {
		t.Errorf("the file: %v, %v, want an empty one", info, err)
	}
}

// TestALockWhereNothingCanBeWritten: one of a file can be had if the file is there; whoever cannot have it is told why.
func TestALockWhereNothingCanBeWritten(t *testing.T) {
	folder := t.TempDir()
	mount := func(flags uintptr) error { return unix.Mount("none", folder, "tmpfs", flags, "") }
	if err := mount(0); errors.Is(err, unix.EPERM) {
		t.Skip("only root can mount")
	} else if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(folder, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	there, missing := filepath.Join(folder, "lock"), filepath.Join(folder, "missing")
	if err := os.WriteFile(there, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := mount(unix.MS_REMOUNT | unix.MS_RDONLY); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancel()
	unlock, err := durable.Lock(ctx, there)
	if err != nil {
		t.Fatal(err)
	}
	defer unlock()
	if _, err := durable.Lock(ctx, there); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second one: %v, want the context's", err)
	}
	for _, tc := range []struct{ lock, path string }{{"of a file", missing}, {"of a key", missing}, {"of a key", there}} {
		_, err := locks[tc.lock](t.Context(), tc.path)
		var at *fs.PathError
		if !errors.As(err, &at) || !errors.Is(at, unix.EROFS) {
			t.Errorf("%s %s: %v, want that it is read-only", tc.lock, tc.path, err)
		}
	}
}
