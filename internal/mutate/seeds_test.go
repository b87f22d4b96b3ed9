// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// Each seeded bug of the repository fits the code of today.
func TestSeedsFitTheCode(t *testing.T) {
	seeds := 0
	err := filepath.WalkDir("../..", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (path == "../../internal/mutate" || strings.HasPrefix(entry.Name(), ".") && strings.Trim(entry.Name(), ".") != ""):
			return filepath.SkipDir
		case !strings.HasSuffix(filepath.ToSlash(path), "/testdata/mutants.yaml"):
			return nil
		}
		dir := filepath.Dir(filepath.Dir(path))
		known, err := readNotes(&target{dir: dir})
		if err != nil {
			return err
		}
		seeds += len(known.Seeds)
		if _, err := known.switched(&target{dir: dir}, t.TempDir()); err != nil {
			t.Errorf("%s: %v", path, err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if seeds < 40 {
		t.Errorf("%d seeds are found, which is not all of them", seeds)
	}
}
