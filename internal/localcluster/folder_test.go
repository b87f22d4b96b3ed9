// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
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

func TestStopReportsAProcessThatEndedByItself(t *testing.T) {
	var progress strings.Builder
	c := &Cluster{dir: t.TempDir(), progress: newLineWriter(&progress), names: map[string]int{}}
	ended, err := c.StartProcess(t.Context(), Command{Name: "ended", Path: "/bin/sh", Args: []string{"-c", "echo no more; exit 4"}})
	if err != nil {
		t.Fatal(err)
	}
	killed, err := c.StartProcess(t.Context(), Command{Name: "killed", Path: "/bin/sleep", Args: []string{"600"}})
	if err != nil {
		t.Fatal(err)
	}
	running, err := c.StartProcess(t.Context(), Command{Name: "running", Path: "/bin/sleep", Args: []string{"600"}})
	if err != nil {
		t.Fatal(err)
	}
	<-ended.Exited()
	if err := killed.Kill(); err != nil {
		t.Fatal(err)
	}
	err = c.Stop()
	var exit *ExitError
	if !errors.As(err, &exit) || exit.Name != "ended" || exit.LogTail != "no more" {
		t.Errorf("Stop gives %v, want an ExitError of the process that ended", err)
	}
	if strings.Contains(err.Error(), "killed ended") || strings.Contains(err.Error(), "running ended") {
		t.Errorf("Stop gives %v, want nothing about the others", err)
	}
	if !strings.Contains(progress.String(), "ended ended unexpectedly: exit status 4") {
		t.Errorf("progress is %q, want the unexpected end in it", &progress)
	}
	select {
	case <-running.Exited():
	default:
		t.Error("Stop returned while a process runs")
	}
}
