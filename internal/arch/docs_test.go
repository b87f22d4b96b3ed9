// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var (
	testFunction = regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	// namedTest is a test that a document names, with the case of its table.
	namedTest = regexp.MustCompile("`(Test[A-Z]\\w*)(?:/([^`]+))?`")
	// folderOrTest is what the column "shown by" consists of.
	folderOrTest = regexp.MustCompile("`((?:cmd|internal|pkg|test)/[\\w/-]+)`|" + namedTest.String())
)

// folder is what the tests of a folder of this repository are called, and their source.
type folder struct {
	tests  map[string]bool
	source string
}

// folders are those of this repository that have tests, by their path.
func folders(t *testing.T, root string) map[string]*folder {
	t.Helper()
	found := map[string]*folder{}
	err := filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(file, "_test.go") {
			return err
		}
		source, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(root, filepath.Dir(file))
		if err != nil {
			return err
		}
		f := found[filepath.ToSlash(name)]
		if f == nil {
			f = &folder{tests: map[string]bool{}}
			found[filepath.ToSlash(name)] = f
		}
		f.source += string(source)
		for _, match := range testFunction.FindAllSubmatch(source, -1) {
			f.tests[string(match[1])] = true
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// documents are the texts below docs/, by their path in it.
func documents(t *testing.T, root string) map[string]string {
	t.Helper()
	texts := map[string]string{}
	docs := os.DirFS(filepath.Join(root, "docs"))
	err := fs.WalkDir(docs, ".", func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || path.Ext(name) != ".md" {
			return err
		}
		text, err := fs.ReadFile(docs, name)
		texts[name] = string(text)
		return err
	})
	if err != nil || len(texts) == 0 {
		t.Fatalf("%d documents, %v", len(texts), err)
	}
	return texts
}

// Documents that name tests as proof name tests that exist.
func TestDocumentsNameTestsThatExist(t *testing.T) {
	root := filepath.Join("..", "..")
	exists := map[string]bool{}
	for _, f := range folders(t, root) {
		for test := range f.tests {
			exists[test] = true
		}
	}
	named := 0
	for document, text := range documents(t, root) {
		for _, match := range namedTest.FindAllStringSubmatch(text, -1) {
			named++
			if !exists[match[1]] {
				t.Errorf("%s names the test %s, which does not exist", document, match[1])
			}
		}
	}
	if named == 0 {
		t.Error("no document names a test: this one looks at the wrong place")
	}
}

// A table whose last column is "shown by" names tests of test/integration, or of the folder before them up to the next semicolon, and
// with a slash a case of the test.
func TestTablesNameTestsWhereTheyAre(t *testing.T) {
	root := filepath.Join("..", "..")
	all := folders(t, root)
	rows := map[string]int{}
	for document, text := range documents(t, root) {
		for _, row := range shownBy(text) {
			rows[document]++
			for _, problem := range misplaced(all, row[len(row)-1]) {
				t.Errorf("%s, %q: %s", document, row[0], problem)
			}
		}
	}
	for _, document := range []string{"parity.md", "known-bugs.md", "requirements.md", "security.md"} {
		if rows[document] == 0 {
			t.Errorf("%s has no table of tests: this one looks at the wrong place", document)
		}
	}
}

// Each of others' bugs has a thread to read and a test that shows what ours does.
func TestKnownBugsHaveAThreadAndATest(t *testing.T) {
	thread := regexp.MustCompile(`\]\(https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+\)`)
	for _, row := range shownBy(documents(t, filepath.Join("..", ".."))["known-bugs.md"]) {
		if len(row) != 4 {
			t.Errorf("%q: %d columns, want situation, seen, what ours does, test", row[0], len(row))
			continue
		}
		if !thread.MatchString(row[1]) {
			t.Errorf("%q: no link to a thread", row[0])
		}
		if !namedTest.MatchString(row[3]) {
			t.Errorf("%q: no test", row[0])
		}
	}
}

// Each requirement has an identifier, a state, and a test, or says what is missing.
func TestRequirementsAreShownOrSayWhatIsMissing(t *testing.T) {
	identifier := regexp.MustCompile(`^([A-F])([0-9]+)$`)
	next := map[string]int{}
	for _, row := range shownBy(documents(t, filepath.Join("..", ".."))["requirements.md"]) {
		if len(row) != 4 {
			t.Errorf("%q: %d columns, want id, what is asked, state, test", row[0], len(row))
			continue
		}
		if problem := requirement(row); problem != "" {
			t.Errorf("%s: %s", row[0], problem)
		}
		id := identifier.FindStringSubmatch(row[0])
		if id == nil {
			t.Errorf("%q is no identifier", row[0])
			continue
		}
		if next[id[1]]++; strconv.Itoa(next[id[1]]) != id[2] {
			t.Errorf("%s: want %s%d, each once and in order", row[0], id[1], next[id[1]])
		}
	}
	want := map[string]int{"A": 19, "B": 7, "C": 9, "D": 4, "E": 5, "F": 1}
	if diff := cmp.Diff(want, next); diff != "" {
		t.Errorf("rows of each section (-want +got):\n%s", diff)
	}
}

// requirement says what is wrong with a row: id, what is asked, state, test.
func requirement(row []string) string {
	state, missing, _ := strings.Cut(row[2], ": ")
	shown := namedTest.MatchString(row[3])
	switch {
	case state == "shown" && missing == "" && shown, state == "part" && missing != "" && shown, state == "missing" && missing != "":
		return ""
	case state == "shown" && missing != "":
		return "it is shown, and something is missing"
	case state == "part" && missing == "", state == "missing":
		return "what is missing is not said"
	case state == "shown", state == "part":
		return "no test"
	}
	return "no state: " + row[2]
}

func TestRequirement(t *testing.T) {
	for want, rows := range map[string][][]string{
		"": {
			{"A1", "", "shown", "`TestA`"}, {"A1", "", "part: half of it", "`pkg/a` `TestA`"}, {"A1", "", "missing: all of it", ""},
		},
		"it is shown, and something is missing": {{"A1", "", "shown: half of it", "`TestA`"}},
		"what is missing is not said":           {{"A1", "", "part", "`TestA`"}, {"A1", "", "missing", ""}},
		"no test":                               {{"A1", "", "shown", "by hand"}, {"A1", "", "part: half of it", ""}},
		"no state: soon":                        {{"A1", "", "soon", "`TestA`"}},
	} {
		for _, row := range rows {
			if got := requirement(row); got != want {
				t.Errorf("%q: %q, want %q", row, got, want)
			}
		}
	}
}

func TestMisplaced(t *testing.T) {
	all := map[string]*folder{
		"test/integration": {tests: map[string]bool{"TestA": true}},
		"pkg/b":            {tests: map[string]bool{"TestB": true}, source: `"a case": {`},
	}
	for cell, want := range map[string]int{
		"`TestA`":                                 0,
		"`TestA`, `pkg/b` `TestB`":                0,
		"`pkg/b` `TestB`; `TestA`":                0,
		"`pkg/b` `TestB/a case`":                  0,
		"`pkg/b` `TestB/another case`":            1,
		"`TestB`":                                 1,
		"`pkg/b` `TestA`":                         1,
		"`pkg/c` `TestC`":                         1,
		"the limit: `pkg/b` `TestB`, and `TestA`": 1,
	} {
		if got := misplaced(all, cell); len(got) != want {
			t.Errorf("%s: %q, want %d problems", cell, got, want)
		}
	}
}

// shownBy returns the cells of all rows of a document's tables whose last column is "shown by".
func shownBy(text string) (rows [][]string) {
	inside := false
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") {
			inside = false
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case cells[len(cells)-1] == "shown by":
			inside = true
		case inside && strings.Trim(cells[0], "-") != "":
			rows = append(rows, cells)
		}
	}
	return rows
}

// misplaced says which tests of a cell are not where it says that they are.
func misplaced(all map[string]*folder, cell string) (problems []string) {
	for part := range strings.SplitSeq(cell, ";") {
		in := path.Join("test", "integration")
		for _, match := range folderOrTest.FindAllStringSubmatch(part, -1) {
			where, test, tableCase := match[1], match[2], match[3]
			if where != "" {
				in = where
				continue
			}
			switch f := all[in]; {
			case f == nil || !f.tests[test]:
				problems = append(problems, in+" has no test "+test)
			case tableCase != "" && !strings.Contains(f.source, `"`+tableCase+`"`):
				problems = append(problems, in+" has no case "+tableCase)
			}
		}
	}
	return problems
}
