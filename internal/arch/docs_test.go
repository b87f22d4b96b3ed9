package arch

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Documents that name tests as proof name tests that exist.
func TestDocumentsNameTestsThatExist(t *testing.T) {
	root := filepath.Join("..", "..")
	exists := map[string]bool{}
	function := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, match := range function.FindAllSubmatch(source, -1) {
			exists[string(match[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	documents, err := filepath.Glob(filepath.Join(root, "docs", "*.md"))
	if err != nil || len(documents) == 0 {
		t.Fatalf("documents: %q, %v", documents, err)
	}
	named := 0
	for _, document := range documents {
		text, err := os.ReadFile(document)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range regexp.MustCompile("`(Test[A-Z]\\w*)`").FindAllSubmatch(text, -1) {
			named++
			if name := string(match[1]); !exists[name] {
				t.Errorf("%s names the test %s, which does not exist", filepath.Base(document), name)
			}
		}
	}
	if named == 0 {
		t.Error("no document names a test: this one looks at the wrong place")
	}
}
