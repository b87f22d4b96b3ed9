// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
)

var (
	// plainReference is a document that a comment or a text names, by its path
	// from the repository's root, and the heading after it if there is one:
	// docs/runbook.md, *Taints*.
	plainReference = regexp.MustCompile(`(?:^|[^\w/.-])(docs/[\w/-]+\.md)(?:#([\w-]+))?\x60?(?:,[\s/#]+\*([^*]+)\*)?`)
	// link is a link of a document to a file of the repository, and the heading after it.
	link        = regexp.MustCompile(`\]\(([^)#\s]*)(?:#([^)\s]+))?\)(?:,\s+\*([^*]+)\*)?`)
	headingLine = regexp.MustCompile(`(?m)^#+ +(.+?) *$`)
	boldLead    = regexp.MustCompile(`(?m)^ *(?:[*-] +)?\*\*?([^*\n]+?)[.:]?\*\*?`)
	// namedSource is a folder, a file, or a name of a package that a document has between backticks.
	namedSource   = regexp.MustCompile(`\x60((?:cmd|internal|manifests|pkg|test)/[\w/-]+(?:\.[a-z]+)?)(?:\.[A-Z]\w*)?\x60|\x60(\w+\.go)\x60`)
	notInAnAnchor = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// reference is what a file says of a place in another one.
type reference struct {
	target, anchor, heading string
}

// referencesIn are the references to documents in a file of the repository.
func referencesIn(file, text string) (found []reference) {
	for _, match := range plainReference.FindAllStringSubmatch(text, -1) {
		found = append(found, reference{target: match[1], anchor: match[2], heading: match[3]})
	}
	if path.Ext(file) != ".md" {
		return found
	}
	for _, match := range link.FindAllStringSubmatch(text, -1) {
		if strings.Contains(match[1], "://") {
			continue
		}
		target := file
		if match[1] != "" {
			target = path.Join(path.Dir(file), match[1])
		}
		found = append(found, reference{target: target, anchor: match[2], heading: match[3]})
	}
	return found
}

// headings are those of a document, and the bold words with which its paragraphs begin.
func headings(text string) (all, anchors []string) {
	for _, match := range headingLine.FindAllStringSubmatch(text, -1) {
		all = append(all, match[1])
		anchors = append(anchors, strings.ReplaceAll(notInAnAnchor.ReplaceAllString(strings.ToLower(match[1]), ""), " ", "-"))
	}
	for _, match := range boldLead.FindAllStringSubmatch(text, -1) {
		all = append(all, match[1])
	}
	return all, anchors
}

// dangling says which references of a file lead nowhere.
func dangling(repository fs.FS, file, text string) (problems []string) {
	for _, ref := range referencesIn(file, text) {
		info, err := fs.Stat(repository, ref.target)
		if err != nil {
			problems = append(problems, "no file "+ref.target)
			continue
		}
		if info.IsDir() || path.Ext(ref.target) != ".md" {
			continue
		}
		document, err := fs.ReadFile(repository, ref.target)
		if err != nil {
			problems = append(problems, err.Error())
			continue
		}
		all, anchors := headings(string(document))
		if ref.anchor != "" && !slices.Contains(anchors, ref.anchor) {
			problems = append(problems, ref.target+" has no heading #"+ref.anchor)
		}
		if heading := strings.Join(strings.Fields(strings.ReplaceAll(ref.heading, "//", " ")), " "); heading != "" && !slices.Contains(all, heading) {
			problems = append(problems, ref.target+" has no heading "+heading)
		}
	}
	return problems
}

// A document that a comment, a manifest or another document names exists, and
// so does the heading.
func TestReferencesToDocumentsLeadSomewhere(t *testing.T) {
	repository := os.DirFS(filepath.Join("..", ".."))
	references := 0
	err := fs.WalkDir(repository, ".", func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() {
			if file != "." && strings.HasPrefix(path.Base(file), ".") && file != ".github" || file == "bin" || path.Base(file) == "node_modules" {
				return fs.SkipDir
			}
			return nil
		}
		if !slices.Contains([]string{".md", ".go", ".yaml", ".yml", ".sh"}, path.Ext(file)) && path.Base(file) != "Makefile" ||
			!entry.Type().IsRegular() || file == "internal/arch/references_test.go" {
			return nil
		}
		text, err := fs.ReadFile(repository, file)
		if err != nil {
			return err
		}
		references += len(referencesIn(file, string(text)))
		for _, problem := range dangling(repository, file, string(text)) {
			t.Errorf("%s: %s", file, problem)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if references < 20 {
		t.Errorf("%d references to documents: this test looks at the wrong place", references)
	}
}

// Folders and files that a chapter of the design, or CONTRIBUTING.md, names
// exist: by their path, or a Go file by its name alone.
func TestTheDesignNamesSourcesThatExist(t *testing.T) {
	root := filepath.Join("..", "..")
	repository, goFiles := os.DirFS(root), map[string]bool{}
	err := fs.WalkDir(repository, ".", func(file string, _ fs.DirEntry, err error) error {
		if path.Ext(file) == ".go" {
			goFiles[path.Base(file)] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	named, texts := 0, documents(t, root)
	contributing, err := os.ReadFile(filepath.Join(root, "CONTRIBUTING.md"))
	if err != nil {
		t.Fatal(err)
	}
	texts["design/../../CONTRIBUTING.md"] = string(contributing)
	for document, text := range texts {
		if !strings.HasPrefix(document, "design/") {
			continue
		}
		for _, match := range namedSource.FindAllStringSubmatch(text, -1) {
			named++
			if match[2] != "" {
				if !goFiles[match[2]] {
					t.Errorf("%s names %s: there is no such file", document, match[2])
				}
			} else if _, err := fs.Stat(repository, match[1]); err != nil {
				t.Errorf("%s names %s: %v", document, match[1], err)
			}
		}
	}
	if named < 50 {
		t.Errorf("%d folders and files are named: this test looks at the wrong place", named)
	}
}

// Whom CODEOWNERS asks about a folder is not asked when it has moved.
func TestCodeOwnersNamePathsThatExist(t *testing.T) {
	root := filepath.Join("..", "..")
	text, err := os.ReadFile(filepath.Join(root, ".github", "CODEOWNERS"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] == "#" {
			continue
		}
		if _, err := os.Stat(filepath.Join(root, strings.TrimSuffix(fields[0], "*"))); err != nil {
			t.Error(err)
		}
		if len(fields) < 2 {
			t.Errorf("%s has no owner", fields[0])
		}
	}
}

func TestDangling(t *testing.T) {
	repository := fstest.MapFS{
		"docs/a.md":       {Data: []byte("# A\n\n## The ledger: one file\n\n* **A bold lead.** Text.\n")},
		"docs/room/b.md":  {Data: []byte("# B\n")},
		"manifests/a.txt": {},
	}
	for _, c := range []struct {
		file, text string
		want       int
	}{
		{"a.go", "// See docs/a.md.", 0},
		{"a.go", "// See docs/c.md.", 1},
		{"a.go", "// See docs/a.md, *The ledger: one file*.", 0},
		{"a.go", "// See docs/a.md,\n// *The ledger:\n// one file*.", 0},
		{"a.go", "// See docs/a.md, *Another*.", 1},
		{"a.go", "// See https://example.com/docs/c.md.", 0},
		{"a.go", "x := m[0](c.md)", 0},
		{"docs/a.md", "[b](room/b.md), [a text](../manifests/a.txt), [far](https://example.com/c.md)", 0},
		{"docs/a.md", "[b](b.md)", 1},
		{"docs/room/b.md", "[a](../a.md#the-ledger-one-file), *A bold lead*", 0},
		{"docs/room/b.md", "[a](../a.md#the-ledger)", 1},
		{"docs/room/b.md", "[a](../a.md), *Another lead*", 1},
		{"docs/a.md", "[above](#a), [below](#b)", 1},
	} {
		if got := dangling(repository, c.file, c.text); len(got) != c.want {
			t.Errorf("%s, %q: %q, want %d problems", c.file, c.text, got, c.want)
		}
	}
}
