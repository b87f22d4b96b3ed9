// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"crypto/sha256"
	"encoding/hex"
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The embedded page is what the sources beside it give: dist.sum has the sums of both as of the last build. "make map-page-check" builds
// it anew, for which it needs npm.
func TestThePageIsBuiltFromItsSources(t *testing.T) {
	web := os.DirFS("web")
	is := map[string]string{}
	if err := fs.WalkDir(web, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case name == "node_modules":
			return fs.SkipDir
		case entry.IsDir() || name == "dist.sum":
			return nil
		}
		content, err := fs.ReadFile(web, name)
		sum := sha256.Sum256(content)
		is[name] = hex.EncodeToString(sum[:])
		return err
	}); err != nil {
		t.Fatal(err)
	}
	content, err := fs.ReadFile(web, "dist.sum")
	if err != nil {
		t.Fatal(err)
	}
	built := map[string]string{}
	for line := range strings.Lines(string(content)) {
		if sum, name, ok := strings.Cut(strings.TrimSpace(line), "  "); ok {
			built[name] = sum
		}
	}
	if len(built) < 10 || built["dist/map.js"] == "" {
		t.Fatalf("dist.sum has %d files", len(built))
	}
	if diff := cmp.Diff(built, is); diff != "" {
		t.Errorf("run 'make map-page' and commit what it writes (-as built +as is): %s", diff)
	}
}

// Each state of a GPU has a chip, a color and a sign on the page.
func TestThePageKnowsAllStates(t *testing.T) {
	read := func(name string) string {
		content, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(content)
	}
	style, script := read("web/dist/map.css"), read("web/dist/map.js")
	states := regexp.MustCompile(`(?m)^\t[A-Z]\w+ +State = "(\w+)"`).FindAllStringSubmatch(read("../clusterview/gpu.go"), -1)
	if len(states) < 7 {
		t.Fatalf("states %v", states)
	}
	for _, match := range states {
		for _, selector := range []string{".gpu." + match[1] + "{--ink:", ".gpu." + match[1] + ":before", ".state." + match[1] + "{color:"} {
			if !strings.Contains(style, selector) {
				t.Errorf("the style has no %s", selector)
			}
		}
		if !strings.Contains(script, "`"+match[1]+"`") {
			t.Errorf("the script has no state %q", match[1])
		}
	}
}
