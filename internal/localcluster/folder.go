// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

const (
	// folderPrefix begins the names of temporary cluster folders.
	folderPrefix = "stowage-cluster-"
	// aliveFile is locked by the process that owns the folder.
	aliveFile = "alive"
	// keepFile marks a folder that was kept on purpose.
	keepFile = "kept"
)

// makeDir makes the cluster's folder and registers its removal. First it
// removes folders left by processes that were killed.
func (c *Cluster) makeDir() error {
	if c.options.Dir != "" {
		dir, err := filepath.Abs(c.options.Dir)
		if err != nil {
			return err
		}
		c.dir = dir
		return os.MkdirAll(c.LogDir(), 0o755)
	}
	if err := removeLeftovers(os.TempDir()); err != nil {
		fmt.Fprintf(c.progress, "folders of earlier clusters: %v\n", err)
	}
	dir, alive, err := makeOwnedFolder(os.TempDir())
	if err != nil {
		return fmt.Errorf("making the cluster's folder: %w", err)
	}
	c.dir = dir
	err = c.OnStop("folder", func() error {
		defer alive.Close()
		if c.keep.Load() {
			fmt.Fprintf(c.progress, "kept %s\n", dir)
			return os.WriteFile(filepath.Join(dir, keepFile), nil, 0o600)
		}
		return removeUnmounted(dir)
	})
	if err != nil {
		return err
	}
	return os.MkdirAll(c.LogDir(), 0o755)
}

// makeOwnedFolder makes a folder whose file aliveFile is locked as long as the
// returned file is open, which is not longer than this process lives. The file
// gets its name when it is locked already, so no sweeper can come between.
func makeOwnedFolder(parent string) (dir string, alive *os.File, err error) {
	dir, err = os.MkdirTemp(parent, folderPrefix)
	if err != nil {
		return "", nil, err
	}
	alive, err = os.CreateTemp(dir, aliveFile+"-")
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	if err = syscall.Flock(int(alive.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err == nil {
		err = os.Rename(alive.Name(), filepath.Join(dir, aliveFile))
	}
	if err != nil {
		alive.Close()
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	return dir, alive, nil
}

// removeLeftovers removes our user's cluster folders below parent whose owner
// is dead and that were not kept on purpose.
func removeLeftovers(parent string) error {
	dirs, err := filepath.Glob(filepath.Join(parent, folderPrefix+"*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, dir := range dirs {
		if _, err := os.Stat(filepath.Join(dir, keepFile)); err == nil || !ownedByUs(dir) {
			continue
		}
		alive, err := os.OpenFile(filepath.Join(dir, aliveFile), os.O_RDWR, 0)
		if err != nil {
			continue // being made, being removed, or not a cluster's
		}
		if syscall.Flock(int(alive.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
			errs = append(errs, removeUnmounted(dir))
		}
		alive.Close()
	}
	return errors.Join(errs...)
}

func ownedByUs(path string) bool {
	info, err := os.Lstat(path)
	if err != nil || !info.IsDir() {
		return false
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(stat.Uid) == os.Getuid()
}

// removeUnmounted removes a folder, unless something is mounted below it: then
// removing could reach files that are not ours.
func removeUnmounted(dir string) error {
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return fmt.Errorf("removing %s: looking for mounts below it: %w", dir, err)
	}
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if len(fields) > 4 && (fields[4] == dir || strings.HasPrefix(fields[4], dir+"/")) {
			return fmt.Errorf("removing %s: %s is still mounted", dir, fields[4])
		}
	}
	return os.RemoveAll(dir)
}
