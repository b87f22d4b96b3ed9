package main

import (
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

// Each seeded bug of the repository fits the code of today, and compiles.
func TestSeedsCompile(t *testing.T) {
	packages := map[string]*target{} // by their folders
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
		for _, s := range known.Seeds {
			seeds++
			if err := s.compiles(t, dir, packages); err != nil {
				t.Errorf("%s: seed %q: %v", path, s.Name, err)
			}
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

// compiles checks the types of the packages that the bug changes.
func (s seed) compiles(t *testing.T, dir string, packages map[string]*target) error {
	texts, err := s.changed(dir)
	if err != nil {
		return err
	}
	byPackage := map[string]map[string]string{}
	for path, text := range texts {
		folder, name := filepath.Split(path)
		if byPackage[folder] == nil {
			byPackage[folder] = map[string]string{}
		}
		byPackage[folder][name] = text
	}
	for folder, changed := range byPackage {
		if packages[folder] == nil {
			// As `make test` builds it.
			if packages[folder], err = load(t.Context(), "./"+filepath.ToSlash(folder), "-race"); err != nil {
				return err
			}
		}
		if err := packages[folder].check(changed); err != nil {
			return err
		}
	}
	return nil
}
