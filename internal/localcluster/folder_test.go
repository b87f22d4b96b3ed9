package localcluster

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestLeftFoldersAreRemovedAndOthersAreNot(t *testing.T) {
	parent := t.TempDir()

	alive, aliveLock, err := makeOwnedFolder(parent)
	if err != nil {
		t.Fatal(err)
	}
	defer aliveLock.Close()

	left, lock, err := makeOwnedFolder(parent)
	if err != nil {
		t.Fatal(err)
	}
	lock.Close() // as the kernel does for a process that was killed

	kept, lock, err := makeOwnedFolder(parent)
	if err != nil {
		t.Fatal(err)
	}
	lock.Close()
	if err := os.WriteFile(filepath.Join(kept, keepFile), nil, 0o600); err != nil {
		t.Fatal(err)
	}

	other := filepath.Join(parent, "other")
	withoutLock := filepath.Join(parent, folderPrefix+"by-hand")
	for _, dir := range []string{other, withoutLock} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}

	if err := removeLeftovers(parent); err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, dir := range []string{alive, left, kept, other, withoutLock} {
		got[dir] = pathExists(dir)
	}
	want := map[string]bool{alive: true, left: false, kept: true, other: true, withoutLock: true}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("folders that exist (-want +got):\n%s", diff)
	}
}

func TestStopUndoesInReverseOrderOnceAndReportsAll(t *testing.T) {
	c := &Cluster{progress: newLineWriter(nil), names: map[string]int{}}
	var order []string
	for _, name := range []string{"first", "second", "third"} {
		err := c.OnStop(name, func() error {
			order = append(order, name)
			if name == "second" {
				return os.ErrPermission
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := c.Stop(); err == nil || err.Error() != "stopping second: permission denied" {
			t.Errorf("Stop gives %v", err)
		}
	}
	if diff := cmp.Diff([]string{"third", "second", "first"}, order); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}

	late := false
	err := c.OnStop("late", func() error { late = true; return nil })
	if err == nil || !late {
		t.Errorf("registering after Stop: undone %t, error %v; want it undone and refused", late, err)
	}
	if _, err := c.StartProcess(t.Context(), shell(t, "exec sleep 60")); err == nil {
		t.Error("a process can be started after Stop")
	}
}
