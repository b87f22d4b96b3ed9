// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package stepaside

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"
)

// file is one that was loaded, as it was then.
type file struct {
	path string
	is   identity
}

// identity is another one when a file was replaced, or written in place.
type identity struct {
	device, inode uint64
	size          int64
	modified      time.Time
}

// fileAt is nil for a file that cannot be looked at: then it is not known whether it changes.
func fileAt(path string) *file {
	is, err := identityOf(path)
	if err != nil {
		return nil
	}
	return &file{path, is}
}

// identityOf follows links: a driver's library is a link to the file of its version.
func identityOf(path string) (identity, error) {
	info, err := os.Stat(path)
	if err != nil {
		return identity{}, err
	}
	stat, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return identity{}, fmt.Errorf("%s: no inode", path)
	}
	return identity{device: stat.Dev, inode: stat.Ino, size: info.Size(), modified: info.ModTime()}, nil
}

// changed says how the file is not what it was; empty if it is, or if that is not known.
func (f *file) changed() string {
	switch is, err := identityOf(f.path); {
	case errors.Is(err, fs.ErrNotExist):
		return "its library " + f.path + " is gone"
	case err == nil && is != f.is:
		return "its library " + f.path + " is another file"
	}
	return ""
}
