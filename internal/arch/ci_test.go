// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// What CI runs are targets of the Makefile, and the README names them. The tests that it leaves out are there.
func TestCIRunsWhatTheReadmeNames(t *testing.T) {
	read := func(name string) string {
		t.Helper()
		content, err := os.ReadFile(filepath.Join("..", "..", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(content)
	}
	makefile, readme := read("Makefile"), read("README.md")
	var tests strings.Builder
	files, err := filepath.Glob("../../test/e2e/*_test.go")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		tests.WriteString(read(filepath.Join("test", "e2e", filepath.Base(file))))
	}
	for _, test := range regexp.MustCompile(`\bTest[A-Z]\w*`).FindAllString(read(".ci/run"), -1) {
		if !strings.Contains(tests.String(), "\nfunc "+test+"(") {
			t.Errorf(".ci/run leaves out %s, which test/e2e has not", test)
		}
	}
	steps := regexp.MustCompile(`(?m)^(?:step|unless_late) make ([a-z0-9-]+)`).FindAllStringSubmatch(read(".ci/run"), -1)
	if len(steps) == 0 {
		t.Error(".ci/run runs no target")
	}
	for _, step := range steps {
		if target := step[1]; !strings.Contains(makefile, "\n"+target+":") {
			t.Errorf(".ci/run: make %s: the Makefile has no such target", target)
		} else if !strings.Contains(readme, "`make "+target+"`") {
			t.Errorf(".ci/run: make %s: the README does not name it", target)
		}
	}
}
