// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package vfio

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// Sysfs is the tree below /sys.
type Sysfs interface {
	fs.ReadLinkFS
	// Write writes the value to a file that there is, at once. It returns when the kernel has done what that asks
	// for, which may be never: a driver does not let go of a function that somebody uses.
	Write(name, value string) error
}

// Dir is the Sysfs of a kernel, or of a test, below a folder.
func Dir(root string) Sysfs {
	return dir{os.DirFS(root).(fs.ReadLinkFS), root} // documented to implement it
}

type dir struct {
	fs.ReadLinkFS
	root string
}

// Write implements Sysfs. It makes no file: a misspelt name is an error.
func (d dir) Write(name, value string) error {
	if !fs.ValidPath(name) {
		return &fs.PathError{Op: "write", Path: name, Err: fs.ErrInvalid}
	}
	file, err := os.OpenFile(filepath.Join(d.root, name), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteString(value)
	return errors.Join(err, file.Close())
}

// read returns the content of a file without its newline.
func read(fsys fs.FS, name string) (string, error) {
	data, err := fs.ReadFile(fsys, name)
	return strings.TrimSuffix(string(data), "\n"), err
}

// linked returns the last element of what a link leads to, "" if there is no such link.
func linked(fsys fs.ReadLinkFS, name string) (string, error) {
	target, err := fsys.ReadLink(name)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	return target[strings.LastIndexByte(target, '/')+1:], nil
}

func exists(fsys fs.FS, name string) bool {
	_, err := fs.Stat(fsys, name)
	return err == nil
}
