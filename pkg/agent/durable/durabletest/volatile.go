// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package durabletest

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"stowage.dev/stowage/pkg/agent/durable"
)

// Volatile is the machine's file system with a disk below it that has only what was synced: a file's content since its last Sync, and the
// names in a folder since its last SyncDir. Folders are on the disk when they are made. Nothing waits for a real disk.
type Volatile struct {
	durable.OS

	mu sync.Mutex
	// now and disk are the files by their names, as processes see them and as they are after a power cut. A
	// file that was there before is in neither.
	now, disk map[string]*content
}

// content is that of a file, under all of its names.
type content struct{ now, disk []byte }

// NewVolatile returns a file system of which nothing has been written yet.
func NewVolatile() *Volatile {
	return &Volatile{now: map[string]*content{}, disk: map[string]*content{}}
}

// Create implements durable.FS. What the file had is gone only with the next Sync.
func (v *Volatile) Create(path string, perm fs.FileMode) (durable.File, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	file, err := v.OS.Create(path, perm)
	if err != nil {
		return nil, err
	}
	if v.now[path] == nil {
		v.now[path] = &content{}
	}
	v.now[path].now = nil
	return &volatileFile{File: file, fs: v, content: v.now[path]}, nil
}

// Link implements durable.FS.
func (v *Volatile) Link(oldPath, newPath string) error {
	return v.change(func() error { return v.OS.Link(oldPath, newPath) }, func() { v.now[newPath] = v.now[oldPath] })
}

// Rename implements durable.FS.
func (v *Volatile) Rename(oldPath, newPath string) error {
	return v.change(func() error { return v.OS.Rename(oldPath, newPath) }, func() {
		v.now[newPath] = v.now[oldPath]
		delete(v.now, oldPath)
	})
}

// Remove implements durable.FS.
func (v *Volatile) Remove(path string) error {
	return v.change(func() error { return v.OS.Remove(path) }, func() { delete(v.now, path) })
}

// SyncDir implements durable.FS.
func (v *Volatile) SyncDir(path string) error {
	return v.change(func() error { _, err := os.Stat(path); return err }, func() {
		in := func(file string, _ *content) bool { return filepath.Dir(file) == path }
		maps.DeleteFunc(v.disk, in)
		for file, content := range v.now {
			if in(file, content) {
				v.disk[file] = content
			}
		}
	})
}

func (v *Volatile) change(do func() error, done func()) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := do(); err != nil {
		return err
	}
	done()
	return nil
}

// PowerCut leaves what is on the disk. Of what was not synced a disk may have anything: lucky is asked about each name, and about each
// content, whether it has come there by itself; nothing has if it is nil. A file whose content has not is empty if it was never synced.
func (v *Volatile) PowerCut(lucky func() bool) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	kept := map[string]*content{}
	for _, path := range slices.Sorted(maps.Keys(v.names())) {
		on := v.disk
		if lucky != nil && v.now[path] != v.disk[path] && lucky() {
			on = v.now
		}
		if on[path] != nil {
			kept[path] = on[path]
		}
	}
	var errs []error
	for _, path := range slices.Sorted(maps.Keys(v.names())) {
		c := kept[path]
		if c == nil {
			if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
			continue
		}
		if lucky != nil && string(c.now) != string(c.disk) && lucky() {
			c.disk = c.now
		}
		c.now = c.disk
		// Its folder may have been removed, which was not synced, either.
		errs = append(errs, os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, c.disk, 0o600))
	}
	v.now, v.disk = kept, maps.Clone(kept)
	return errors.Join(errs...)
}

func (v *Volatile) names() map[string]bool {
	names := map[string]bool{}
	for path := range v.now {
		names[path] = true
	}
	for path := range v.disk {
		names[path] = true
	}
	return names
}

type volatileFile struct {
	durable.File
	fs      *Volatile
	content *content
}

func (f *volatileFile) Write(data []byte) (int, error) {
	n, err := f.File.Write(data)
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	f.content.now = append(slices.Clip(f.content.now), data[:n]...)
	return n, err
}

func (f *volatileFile) Sync() error {
	f.fs.mu.Lock()
	defer f.fs.mu.Unlock()
	f.content.disk = f.content.now
	return nil
}
