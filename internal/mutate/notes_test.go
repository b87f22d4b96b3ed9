// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestReadNotes(t *testing.T) {
	tests := map[string]struct{ text, want string }{
		"nothing":              {"", ""},
		"complete":             {"equivalent:\n- {mutant: m, reason: r}\nseeds:\n- {name: n, file: f, old: o, new: '', caughtBy: TestX}\n", ""},
		"a field that is none": {"equivalents: []\n", "equivalents"},
		"no reason":            {"equivalent:\n- {mutant: m}\n", "equivalent[0]: a mutant and a reason are needed"},
		"no mutant":            {"equivalent:\n- {mutant: m, reason: r}\n- {reason: r}\n", "equivalent[1]: a mutant and a reason are needed"},
		"caught elsewhere":     {"seeds:\n- {name: n, file: f, old: o, caughtBy: TestX, in: ../x, noHistory: why}\n", ""},
		"elsewhere, no reason": {"seeds:\n- {name: n, file: f, old: o, caughtBy: TestX, in: ../x}\n", "seeds[0]: noHistory is needed"},
		"no history at a seed": {"seeds:\n- {name: n, file: f, old: o, caughtBy: TestX, history: 3, noHistory: why}\n", "seeds[0]: noHistory is needed"},
		"caught by no test":    {"seeds:\n- {name: n, file: f, old: o, caughtBy: ' '}\n", "seeds[0]: a name, a file, an old text and the tests that catch it are needed"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			write(t, filepath.Join(dir, "testdata", "mutants.yaml"), tc.text)
			_, err := readNotes(&target{dir: dir})
			if (err != nil) != (tc.want != "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want %q", err, tc.want)
			}
		})
	}
	if _, err := readNotes(&target{dir: t.TempDir()}); err != nil {
		t.Errorf("without the file: %v", err)
	}
}

// A seed that does not fit the code any more is an error, not a bug that is never put in.
func TestSeedsMustFitTheCode(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "f.go"), "a\nb\na\n")
	for old, want := range map[string]string{"b\n": "", "a\n": "field old: found 2 times in f.go, want once", "c": "field old: found 0 times"} {
		_, err := seed{replacement: replacement{File: "f.go", Old: old, New: "d"}}.changed(dir)
		if (err != nil) != (want != "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("old %q: error %v, want %q", old, err, want)
		}
	}
	twice := seed{replacement: replacement{File: "f.go", Old: "b\n", New: "c\n"}, Also: []replacement{{File: "f.go", Old: "c\na\n", New: "d\n"}}}
	if texts, err := twice.changed(dir); err != nil || texts[filepath.Join(dir, "f.go")] != "a\nd\n" {
		t.Errorf("two places in a file: %q, %v", texts, err)
	}
	if _, err := (seed{replacement: replacement{File: "g.go"}}).changed(dir); err == nil || !strings.Contains(err.Error(), "field file") {
		t.Errorf("no such file: %v", err)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
