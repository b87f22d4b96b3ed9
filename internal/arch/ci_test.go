package arch

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// What CI runs are targets of the Makefile, and the README names them.
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
	steps := regexp.MustCompile(`(?m)^step make ([a-z0-9-]+)`).FindAllStringSubmatch(read(".ci/run"), -1)
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
