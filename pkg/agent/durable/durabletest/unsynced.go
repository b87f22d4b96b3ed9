// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package durabletest

import (
	"io/fs"

	"stowage.dev/stowage/pkg/agent/durable"
)

// Unsynced is the machine's file system without waiting for the disk, for tests that end processes and not the machine: what
// a process has written is there for the next one.
type Unsynced struct{ durable.OS }

// SyncDir does nothing.
func (Unsynced) SyncDir(string) error { return nil }

// Create opens a file whose Sync does nothing.
func (u Unsynced) Create(path string, perm fs.FileMode) (durable.File, error) {
	file, err := u.OS.Create(path, perm)
	if err != nil {
		return nil, err
	}
	return unsyncedFile{file}, nil
}

type unsyncedFile struct{ durable.File }

func (unsyncedFile) Sync() error { return nil }
