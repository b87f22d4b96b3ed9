// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/durable"
)

// File is a claim's file as it was found.
type File struct {
	Claim types.UID
	// Devices are the names in ResourceSlices of the devices that it describes.
	Devices []string
	// Err says why it is not known what it describes. A file that is not of our kind has one, too: it is somebody else's.
	Err error
}

// Files lists the claims' files, sorted by claim. Other programs' are not among them.
func (s *Store) Files() ([]File, error) {
	entries, err := s.list()
	if err != nil {
		return nil, err
	}
	var files []File
	for _, entry := range entries {
		claim, ok := ClaimOf(entry.Name())
		if !ok || entry.IsDir() {
			continue
		}
		file := File{Claim: claim}
		file.Devices, file.Err = s.devicesOf(claim)
		if errors.Is(file.Err, fs.ErrNotExist) {
			continue // gone by now
		}
		files = append(files, file)
	}
	return files, nil
}

func (s *Store) devicesOf(claim types.UID) ([]string, error) {
	path := s.Path(claim)
	data, err := s.fsys.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var spec specs.Spec
	if err := json.Unmarshal(data, &spec); err != nil {
		return nil, fmt.Errorf("CDI specification %s: %w", path, err)
	}
	if want := Vendor + "/" + Class; spec.Kind != want {
		return nil, fmt.Errorf("CDI specification %s: kind: %q: want %q", path, spec.Kind, want)
	}
	var devices []string
	for _, device := range spec.Devices {
		// Those of shares have a fourth part, and one device several of them.
		parts := strings.Split(device.Name, "_")
		if len(parts) != 3 && len(parts) != 4 || parts[0] != string(claim) {
			return nil, fmt.Errorf("CDI specification %s: devices: name %q: want <claim>_<request>_<device> or "+
				"<claim>_<request>_<device>_<share>, of claim %s", path, device.Name, claim)
		}
		if !slices.Contains(devices, parts[2]) {
			devices = append(devices, parts[2])
		}
	}
	if len(devices) == 0 {
		return nil, fmt.Errorf("CDI specification %s: devices: it has none", path)
	}
	return devices, nil
}

// ClaimOfDevice returns the claim that a fully qualified CDI name is scoped to; ok is false for devices that are not ours.
func ClaimOfDevice(id string) (claim types.UID, ok bool) {
	vendor, class, name, err := parser.ParseQualifiedName(id)
	if err != nil || vendor != Vendor || class != Class {
		return "", false
	}
	uid, _, ok := strings.Cut(name, "_")
	return types.UID(uid), ok
}

// Unfinished lists the claims whose file was being written when its writer died, or is being written now.
func (s *Store) Unfinished() ([]types.UID, error) {
	entries, err := s.list()
	if err != nil {
		return nil, err
	}
	var claims []types.UID
	for _, entry := range entries {
		name, temporary := strings.CutSuffix(entry.Name(), durable.TempSuffix)
		if claim, ok := ClaimOf(name); ok && temporary {
			claims = append(claims, claim)
		}
	}
	return claims, nil
}

// RemoveUnfinished deletes what a dead writer of the claim's file has left. The caller excludes writers.
func (s *Store) RemoveUnfinished(claim types.UID) error {
	if err := durable.Remove(s.fsys, s.Path(claim)+durable.TempSuffix); err != nil {
		return fmt.Errorf("remove unfinished CDI specification of claim %s: %w", claim, err)
	}
	return nil
}

func (s *Store) list() ([]fs.DirEntry, error) {
	entries, err := s.fsys.ReadDir(s.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read CDI folder: %w", err)
	}
	return entries, nil
}
