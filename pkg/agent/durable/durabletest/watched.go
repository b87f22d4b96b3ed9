// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package durabletest

import (
	"io/fs"

	"stowage.dev/stowage/pkg/agent/durable"
)

// Watched is an FS that asks before an operation on a path, named mkdir, list, read, create, link or remove, whether it fails. A test that
// counts steps, or ends the process at one, takes [Faulty].
type Watched struct {
	durable.FS
	Before func(op, path string) error
}

// MkdirAll implements durable.FS.
func (w Watched) MkdirAll(path string, perm fs.FileMode) error {
	if err := w.Before("mkdir", path); err != nil {
		return err
	}
	return w.FS.MkdirAll(path, perm)
}

// ReadDir implements durable.FS.
func (w Watched) ReadDir(path string) ([]fs.DirEntry, error) {
	if err := w.Before("list", path); err != nil {
		return nil, err
	}
	return w.FS.ReadDir(path)
}

// ReadFile implements durable.FS.
func (w Watched) ReadFile(path string) ([]byte, error) {
	if err := w.Before("read", path); err != nil {
		return nil, err
	}
	return w.FS.ReadFile(path)
}

// Create implements durable.FS.
func (w Watched) Create(path string, perm fs.FileMode) (durable.File, error) {
	if err := w.Before("create", path); err != nil {
		return nil, err
	}
	return w.FS.Create(path, perm)
}

// Link implements durable.FS.
func (w Watched) Link(oldPath, newPath string) error {
	if err := w.Before("link", newPath); err != nil {
		return err
	}
	return w.FS.Link(oldPath, newPath)
}

// Remove implements durable.FS.
func (w Watched) Remove(path string) error {
	if err := w.Before("remove", path); err != nil {
		return err
	}
	return w.FS.Remove(path)
}
