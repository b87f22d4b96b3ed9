// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package ledger_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/durable/durabletest"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// refusing is a file system of which one operation is refused.
func refusing(refused string, err error) durable.FS {
	return durabletest.Watched{FS: durabletest.Unsynced{}, Before: func(op, path string) error {
		if op != refused {
			return nil
		}
		return &fs.PathError{Op: op, Path: path, Err: err}
	}}
}

// vanishing is a file system in which somebody removes a folder as soon as it is made.
type vanishing struct{ durabletest.Unsynced }

func (vanishing) MkdirAll(string, fs.FileMode) error { return nil }

// removing is a file system from which somebody else removes each file just before it is read or removed.
type removing struct{ durabletest.Unsynced }

func (r removing) ReadFile(path string) ([]byte, error) {
	return nil, errors.Join(r.Unsynced.Remove(path), &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist})
}

func (r removing) Remove(path string) error {
	return errors.Join(r.Unsynced.Remove(path), &fs.PathError{Op: "remove", Path: path, Err: fs.ErrNotExist})
}

// TestWhatAFileSystemRefusesIsTold, and the record stays what it was.
func TestWhatAFileSystemRefusesIsTold(t *testing.T) {
	put := func(l *ledger.Ledger) error { return l.Put(entry(ledger.PrepareCompleted, "gpu-a")) }
	for name, tc := range map[string]struct {
		op string
		do func(*ledger.Ledger) error
	}{
		"a folder that cannot be listed is asked for a record":   {"list", func(l *ledger.Ledger) error { _, err := l.Get(uid); return err }},
		"a folder that cannot be listed is asked for all":        {"list", func(l *ledger.Ledger) error { _, err := l.Records(); return err }},
		"a claim is removed from a folder that cannot be listed": {"list", func(l *ledger.Ledger) error { return l.Remove(uid) }},
		"what is unfinished, too":                                {"list", func(l *ledger.Ledger) error { return l.RemoveUnfinished(uid) }},
		"what is unfinished stays":                               {"remove", func(l *ledger.Ledger) error { return l.RemoveUnfinished(uid) }},
		"a record stays":                                         {"remove", func(l *ledger.Ledger) error { return l.Remove(uid) }},
		"the record before cannot be read":                       {"read", put},
		"there is no place for what is unfinished":               {"remove", put},
		"a file has one name only":                               {"link", put},
	} {
		t.Run(name, func(t *testing.T) {
			l := open(t, durabletest.Unsynced{}, t.TempDir())
			if err := l.Put(entry(ledger.PrepareStarted, "gpu-a")); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(get(t, l).Path+".prev.tmp", nil, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := tc.do(ledger.At(refusing(tc.op, syscall.EIO), l.Dir())); !errors.Is(err, syscall.EIO) {
				t.Errorf("error %v, want that of the file system", err)
			}
			if record := get(t, l); record == nil || record.Entry == nil || record.Entry.State != ledger.PrepareStarted {
				t.Errorf("record %+v, want the one before", record)
			}
		})
	}
}

// TestARecordThatIsNoJSONIsNotWritten: the one before stays.
func TestARecordThatIsNoJSONIsNotWritten(t *testing.T) {
	l := open(t, durabletest.Unsynced{}, t.TempDir())
	if err := l.Put(entry(ledger.PrepareStarted, "gpu-a")); err != nil {
		t.Fatal(err)
	}
	bad := entry(ledger.PrepareCompleted, "gpu-a")
	bad.CDISpec = json.RawMessage("{")
	if err := l.Put(bad); err == nil || !strings.Contains(err.Error(), "encode ledger record") {
		t.Errorf("error %v, want that it cannot be encoded", err)
	}
	if record := get(t, l); record.Entry == nil || record.Entry.State != ledger.PrepareStarted {
		t.Errorf("record %+v, want the one before", record)
	}
}

// TestWhatSomebodyElseRemovesIsGone: two agents share the folder while one replaces the other.
func TestWhatSomebodyElseRemovesIsGone(t *testing.T) {
	for name, do := range map[string]func(*ledger.Ledger) error{
		"while it is removed": func(l *ledger.Ledger) error { return l.Remove(uid) },
		"while it is read": func(l *ledger.Ledger) error {
			records, err := l.Records()
			if len(records) > 0 {
				return errors.Join(err, errors.New("it is listed"))
			}
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := open(t, durabletest.Unsynced{}, t.TempDir())
			for range 2 {
				if err := l.Put(entry(ledger.PrepareCompleted, "gpu-a")); err != nil {
					t.Fatal(err)
				}
			}
			if err := do(ledger.At(removing{}, l.Dir())); err != nil {
				t.Error(err)
			}
			if record := get(t, l); record != nil {
				t.Errorf("record %+v", record)
			}
		})
	}
}

// TestAClaimOfNoGPU, as one with admin access alone, has a record that blocks none.
func TestAClaimOfNoGPU(t *testing.T) {
	l := open(t, durable.OS{}, t.TempDir())
	e := entry(ledger.PrepareCompleted, "gpu-a")
	e.Devices[0].AdminAccess = true
	if err := l.Put(e); err != nil {
		t.Fatal(err)
	}
	if record := get(t, l); record == nil || record.Entry == nil || record.AllGPUs || record.Holds("gpu-a") {
		t.Errorf("record %+v, want one that holds no GPU", record)
	}
}

// TestTheFolderIsRestrictedOnlyWhereItMust: a file system that is read-only refuses what would change nothing, too.
func TestTheFolderIsRestrictedOnlyWhereItMust(t *testing.T) {
	if _, err := ledger.Open(vanishing{}, filepath.Join(t.TempDir(), "claims")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a folder that is gone: %v", err)
	}
	for mode, want := range map[fs.FileMode]error{0o700: nil, 0o750: syscall.EROFS} {
		dir := t.TempDir()
		if err := unix.Mount("stowage-test", dir, "tmpfs", unix.MS_RDONLY, fmt.Sprintf("mode=%o", mode)); err != nil {
			t.Skipf("file systems cannot be mounted here: %v", err)
		}
		t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
		if _, err := ledger.Open(durable.OS{}, dir); !errors.Is(err, want) {
			t.Errorf("mode %o: %v, want %v", mode, err, want)
		}
	}
}
