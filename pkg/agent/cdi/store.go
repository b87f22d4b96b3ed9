// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	oci "github.com/opencontainers/runtime-spec/specs-go"
	"k8s.io/apimachinery/pkg/types"
	cdilib "tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/durable"
)

const fileSuffix = ".json"

// filePrefix begins the name of every file made here.
var filePrefix = cdilib.GenerateSpecName(Vendor, Class) + "_"

// Store is the folder from which the container runtime reads specifications. Other programs' files in it
// are left alone. Callers exclude each other per claim.
type Store struct {
	dir  string
	fsys durable.FS
	host host
}

// NewStore makes nothing yet: the folder is made with the first file, or by MakeFolder. hostRoot is the root folder of
// the host, whose files the specifications name, as the agent sees it: "/" on the host itself.
func NewStore(fsys durable.FS, dir, hostRoot string) *Store {
	return &Store{dir: dir, fsys: fsys, host: host(filepath.Clean(hostRoot))}
}

// Dir returns the folder.
func (s *Store) Dir() string { return s.dir }

// Path returns the file of a claim.
func (s *Store) Path(claim types.UID) string {
	return filepath.Join(s.dir, filePrefix+string(claim)+fileSuffix)
}

// ClaimOf returns the claim whose file has this name or path; ok is false for files of others.
func ClaimOf(path string) (claim types.UID, ok bool) {
	uid, found := strings.CutPrefix(filepath.Base(path), filePrefix)
	if !found {
		return "", false
	}
	uid, found = strings.CutSuffix(uid, fileSuffix)
	return types.UID(uid), found && uid != ""
}

// Encode returns the content of a specification's file.
func Encode(spec *specs.Spec) ([]byte, error) {
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("encode CDI specification: %w", err)
	}
	return data, nil
}

// Restore writes the claim's file unless it has this very content already, and says whether it did. Container runtimes
// run as root, but the file holds nothing secret, and rootless tools read it too: 0644.
func (s *Store) Restore(claim types.UID, data []byte) (written bool, err error) {
	if err := s.MakeFolder(); err != nil {
		return false, err
	}
	if written, err = durable.Restore(s.fsys, s.Path(claim), data, 0o644); err != nil {
		return written, fmt.Errorf("write CDI specification of claim %s: %w", claim, err)
	}
	return written, nil
}

// Remove deletes the claim's file at the path that Path gave when it was written, which may be in another
// folder than today's. That there is none is no error.
func (s *Store) Remove(claim types.UID, path string) error {
	if of, ok := ClaimOf(path); !ok || of != claim {
		return fmt.Errorf("remove CDI specification of claim %s: %s is not its file", claim, path)
	}
	if err := durable.Remove(s.fsys, path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove CDI specification of claim %s: %w", claim, err)
	}
	return nil
}

// Verify reads the claim's file the way a container runtime does and applies every one of the devices to an
// empty container: the file must parse, each name must resolve, all that is mounted and each hook's program must be
// there, and each device node of the host must be a device with the numbers that the container will be allowed to open.
func (s *Store) Verify(claim types.UID, deviceIDs []string) error {
	path := s.Path(claim)
	spec, err := cdilib.ReadSpec(path, 0)
	if err != nil {
		return fmt.Errorf("CDI specification of claim %s: %w", claim, err)
	}
	// The library fills host paths in when it applies edits, so they are looked at before.
	container := &oci.Spec{}
	if err := s.host.verify(&spec.ContainerEdits); err != nil {
		return fmt.Errorf("CDI specification %s, common edits: %w", path, err)
	}
	if err := spec.ApplyEdits(container); err != nil {
		return fmt.Errorf("CDI specification %s, common edits: %w", path, err)
	}
	for _, id := range deviceIDs {
		vendor, class, name, err := parser.ParseQualifiedName(id)
		if err != nil {
			return fmt.Errorf("CDI device of claim %s: %w", claim, err)
		}
		device := spec.GetDevice(name)
		if vendor != spec.GetVendor() || class != spec.GetClass() || device == nil {
			return fmt.Errorf("CDI device %s is not in %s", id, path)
		}
		if err := s.host.verify(&device.ContainerEdits); err != nil {
			return fmt.Errorf("CDI device %s: %w", id, err)
		}
		if err := device.ApplyEdits(container); err != nil {
			return fmt.Errorf("CDI device %s: %w", id, err)
		}
	}
	return nil
}

// MakeFolder makes the folder if it is missing.
func (s *Store) MakeFolder() error {
	if err := s.fsys.MkdirAll(s.dir, 0o755); err != nil {
		return fmt.Errorf("make CDI folder: %w", err)
	}
	return nil
}
