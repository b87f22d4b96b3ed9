// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package durable

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// TempSuffix ends the name of a file that is being written. A file with this suffix was never complete for
// a reader and may be removed by the owner of the name.
const TempSuffix = ".tmp"

// FS is the part of a file system that durable writing needs. The methods have the meaning of the
// functions of the same name in package os; SyncDir makes the names in a folder durable.
type FS interface {
	MkdirAll(path string, perm fs.FileMode) error
	ReadDir(path string) ([]fs.DirEntry, error)
	ReadFile(path string) ([]byte, error)
	Create(path string, perm fs.FileMode) (File, error)
	Link(oldPath, newPath string) error
	Rename(oldPath, newPath string) error
	Remove(path string) error
	SyncDir(path string) error
}

// File is a file that is being written.
type File interface {
	io.Writer
	Sync() error
	Close() error
}

// WriteFile replaces path with data, or leaves it as it was. It writes to path+TempSuffix, so two writers of
// one path must exclude each other; what a crashed writer left under that name is overwritten.
func WriteFile(fsys FS, path string, data []byte, perm fs.FileMode) error {
	temp := path + TempSuffix
	if err := writeSynced(fsys, temp, data, perm); err != nil {
		return errors.Join(err, otherThan(err, fsys.Remove(temp)))
	}
	if err := fsys.Rename(temp, path); err != nil {
		return errors.Join(err, otherThan(err, fsys.Remove(temp)))
	}
	return fsys.SyncDir(filepath.Dir(path))
}

// Restore writes path unless it has this very content already, and says whether it did.
func Restore(fsys FS, path string, data []byte, perm fs.FileMode) (written bool, err error) {
	current, err := fsys.ReadFile(path)
	if err == nil && bytes.Equal(current, data) {
		return false, nil
	}
	return true, WriteFile(fsys, path, data, perm)
}

// Remove deletes path for good. A path that does not exist is no error.
func Remove(fsys FS, path string) error {
	if err := ignoreNotExist(fsys.Remove(path)); err != nil {
		return err
	}
	return fsys.SyncDir(filepath.Dir(path))
}

func writeSynced(fsys FS, path string, data []byte, perm fs.FileMode) error {
	file, err := fsys.Create(path, perm)
	if err != nil {
		return err
	}
	if _, err := file.Write(data); err != nil {
		return errors.Join(err, file.Close())
	}
	if err := file.Sync(); err != nil {
		return errors.Join(err, file.Close())
	}
	return file.Close()
}

// otherThan returns the error of cleaning up, unless there is nothing to remove or it fails for the reason that the first error has told.
func otherThan(first, cleanup error) error {
	if cleanup != nil && errors.Is(cleanup, Reason(first)) {
		return nil
	}
	return ignoreNotExist(cleanup)
}

func ignoreNotExist(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// OS is the file system of the machine.
type OS struct{}

var _ FS = OS{}

// MkdirAll makes path and its missing parents.
func (OS) MkdirAll(path string, perm fs.FileMode) error { return os.MkdirAll(path, perm) }

// ReadDir lists a folder, sorted by name.
func (OS) ReadDir(path string) ([]fs.DirEntry, error) { return os.ReadDir(path) }

// ReadFile reads a whole file.
func (OS) ReadFile(path string) ([]byte, error) { return os.ReadFile(path) }

// Create opens path for writing, empties it, and gives it exactly the permissions perm, whatever the umask.
func (OS) Create(path string, perm fs.FileMode) (File, error) {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, perm)
	if err != nil {
		return nil, err
	}
	if err := file.Chmod(perm); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Link makes newPath a second name of the file oldPath.
func (OS) Link(oldPath, newPath string) error { return os.Link(oldPath, newPath) }

// Rename moves oldPath to newPath, replacing what is there.
func (OS) Rename(oldPath, newPath string) error { return os.Rename(oldPath, newPath) }

// Remove deletes a file.
func (OS) Remove(path string) error { return os.Remove(path) }

// SyncDir makes creations, renames and removals in a folder durable.
func (OS) SyncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	if err := dir.Sync(); err != nil {
		return errors.Join(err, dir.Close())
	}
	return dir.Close()
}

// Reason is what is wrong with a file, without its path: for messages that have named it already.
func Reason(err error) error {
	var at *fs.PathError
	if errors.As(err, &at) {
		return at.Err
	}
	var between *os.LinkError // of a rename or a link
	if errors.As(err, &between) {
		return between.Err
	}
	return err
}
