// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// Files of claims, for their containers: the CDI specification, and the device metadata (KEP-5304) that it mounts. These
// tell a container by a file for each request what devices the request got. They go with the specification: they are
// written before it, and removed after it, by the same step. The plugin library's own writer
// (kubeletplugin.EnableDeviceMetadata) is not used, as it goes on without the files when they cannot be written, and does
// not put back what is lost.
type Files struct {
	FS  durable.FS
	CDI *cdi.Store
	// MetadataDir has a folder for each claim. Containers see its files, and nobody else has to.
	MetadataDir string
}

// CDIFile is the step for any claim, the last one.
func (f Files) CDIFile(claim types.UID) ledger.Step {
	return ledger.Step{Kind: ledger.StepCDIFile, Target: f.CDI.Path(claim)}
}

// MetadataOf is the folder with the claim's metadata.
func (f Files) MetadataOf(claim types.UID) string { return filepath.Join(f.MetadataDir, string(claim)) }

// MetadataPath is the file with the metadata of the claim's request.
func (f Files) MetadataPath(claim types.UID, request string) string {
	return filepath.Join(f.MetadataOf(claim), request+".json")
}

// Restore writes what the claim's containers are given, as recorded, unless it is there already, and tells whether
// anything was written.
func (f Files) Restore(entry *ledger.Entry) (written bool, err error) {
	claim := entry.Claim.UID
	if len(entry.Metadata) > 0 {
		if err := f.FS.MkdirAll(f.MetadataOf(claim), 0o700); err != nil {
			return false, fmt.Errorf("make the folder for device metadata of claim %s: %w", claim, err)
		}
	}
	for _, request := range slices.Sorted(maps.Keys(entry.Metadata)) {
		// Containers of any user read it.
		wrote, err := durable.Restore(f.FS, f.MetadataPath(claim, request), append(slices.Clone(entry.Metadata[request]), '\n'), 0o644)
		if err != nil {
			return written, fmt.Errorf("write device metadata of claim %s, request %s: %w", claim, request, err)
		}
		written = written || wrote
	}
	wrote, err := f.CDI.Restore(claim, entry.CDISpec)
	return written || wrote, err
}

func (f Files) undo(_ context.Context, entry *ledger.Entry, step ledger.Step) error {
	if err := f.CDI.Remove(entry.Claim.UID, step.Target); err != nil {
		return err
	}
	return f.RemoveMetadata(entry.Claim.UID)
}

// RemoveMetadata removes the claim's metadata, which nothing mounts any more.
func (f Files) RemoveMetadata(claim types.UID) error {
	files, err := f.FS.ReadDir(f.MetadataOf(claim))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	for _, file := range files {
		err = errors.Join(err, f.FS.Remove(filepath.Join(f.MetadataOf(claim), file.Name())))
	}
	if err == nil {
		err = durable.Remove(f.FS, f.MetadataOf(claim))
	}
	if err != nil {
		return fmt.Errorf("remove device metadata of claim %s: %w", claim, err)
	}
	return nil
}
