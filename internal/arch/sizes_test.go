// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"bytes"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What is larger than this is a hall without walls: nobody sees what may change in it.
const (
	maxFiles   = 20  // of a package
	maxLines   = 500 // of a file
	maxFields  = 15  // of a struct, those of embedded ones not counted
	maxMethods = 40  // of a type
)

// tooLarge is what is larger all the same, and by how much. A number here may fall and not rise, and nothing may be added. Options and arguments, a
// field for each, are no halls.
var tooLarge = map[string]int{
	"cmd/node-agent.options: fields":          26,
	"internal/localcluster.Cluster: fields":   17,
	"internal/localcluster.Cluster: methods":  49,
	"internal/localcluster/node.Node: fields": 19,
	"pkg/agent/discovery.GPU: fields":         23,
	"pkg/agent/driver.Options: fields":        24,
	"pkg/agent/driver.publisher: fields":      20,
	"pkg/agent/driver.selfCheck: fields":      16,
	"pkg/agent/driver: files":                 31,
	"pkg/agent/prepare.Options: fields":       19,
	"pkg/inventory.NodePool: fields":          22,
	"pkg/inventory.Pool: fields":              22,
	"pkg/inventory.Slice: fields":             17,
	"pkg/nvmlsim.GPUState: fields":            16,
	"pkg/nvmlsim.Model: fields":               20,
	"pkg/nvmlsim.device: methods":             90,
	"pkg/nvmlsim: files":                      31,
	"test/chaos.run: fields":                  16,
	"test/liveness.history: fields":           29,
}

// sizes are what the limits are about, by its name.
type sizes map[string]struct{ is, limit int }

// measure counts what is in the files of one package, tests and generated files not included.
func (s sizes) measure(folder string, files map[string][]byte) error {
	fields, methods, count := map[string]int{}, map[string]int{}, 0
	for _, name := range slices.Sorted(maps.Keys(files)) {
		content := files[name]
		file, err := parser.ParseFile(token.NewFileSet(), name, content, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		if strings.HasSuffix(name, "_test.go") || ast.IsGenerated(file) {
			continue
		}
		count++
		s.add(filepath.Join(folder, name)+": lines", bytes.Count(content, []byte("\n")), maxLines)
		for _, declaration := range file.Decls {
			if function, ok := declaration.(*ast.FuncDecl); ok && function.Recv != nil {
				methods[receiver(function.Recv.List[0].Type)]++
			}
		}
		ast.Inspect(file, func(node ast.Node) bool {
			if spec, ok := node.(*ast.TypeSpec); ok {
				if structure, ok := spec.Type.(*ast.StructType); ok {
					for _, field := range structure.Fields.List {
						fields[spec.Name.Name] += max(1, len(field.Names))
					}
				}
			}
			return true
		})
	}
	s.add(folder+": files", count, maxFiles)
	for name, n := range fields {
		s.add(fmt.Sprintf("%s.%s: fields", folder, name), n, maxFields)
	}
	for name, n := range methods {
		s.add(fmt.Sprintf("%s.%s: methods", folder, name), n, maxMethods)
	}
	return nil
}

func (s sizes) add(name string, is, limit int) {
	s[name] = struct{ is, limit int }{is, limit}
}

// receiver is the name of a method's type.
func receiver(expr ast.Expr) string {
	switch expr := expr.(type) {
	case *ast.StarExpr:
		return receiver(expr.X)
	case *ast.IndexExpr:
		return receiver(expr.X)
	case *ast.IndexListExpr:
		return receiver(expr.X)
	case *ast.Ident:
		return expr.Name
	}
	return ""
}

// judge says what is too large, and which exception says more than there is.
func (s sizes) judge(exceptions map[string]int) (problems []string) {
	for _, name := range slices.Sorted(maps.Keys(s)) {
		size := s[name]
		exception, known := exceptions[name]
		switch {
		case !known && size.is > size.limit:
			problems = append(problems, fmt.Sprintf("%s: %d, at most %d are allowed", name, size.is, size.limit))
		case known && size.is > exception:
			problems = append(problems, fmt.Sprintf("%s: %d, and its exception allows %d: it may only fall", name, size.is, exception))
		case known && size.is <= size.limit:
			problems = append(problems, fmt.Sprintf("%s: %d, at most %d are allowed: its exception can go", name, size.is, size.limit))
		case known && size.is < exception:
			problems = append(problems, fmt.Sprintf("%s: %d, and its exception allows %d: let it fall, too", name, size.is, exception))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(exceptions)) {
		if _, ok := s[name]; !ok {
			problems = append(problems, name+" has an exception and is not there")
		}
	}
	return problems
}

func TestNoRoomIsAHall(t *testing.T) {
	root, all := filepath.Join("..", ".."), sizes{}
	for _, top := range []string{"cmd", "internal", "pkg", "test"} {
		err := filepath.WalkDir(filepath.Join(root, top), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.IsDir() || entry.Name() == "testdata" {
				return err
			}
			names, err := filepath.Glob(filepath.Join(path, "*.go"))
			if err != nil || len(names) == 0 {
				return err
			}
			files := map[string][]byte{}
			for _, name := range names {
				if files[filepath.Base(name)], err = os.ReadFile(name); err != nil {
					return err
				}
			}
			folder, err := filepath.Rel(root, path)
			if err != nil {
				return err
			}
			return all.measure(filepath.ToSlash(folder), files)
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, problem := range all.judge(tooLarge) {
		t.Error(problem)
	}
}

func TestSizesAreCounted(t *testing.T) {
	s := sizes{}
	if err := s.measure("a", map[string][]byte{
		"b.go":      []byte("package a\n\ntype T[K any] struct {\n\tx, y int\n\tfmt.Stringer\n}\n\nfunc (t *T[K]) A() {}\nfunc (T[K]) B() {}\nfunc C() {}\n"),
		"c.go":      []byte("package a\n\nfunc (t *T[K]) D() {\n\ttype inner struct{ z int }\n}\n"),
		"d.go":      []byte("// Code generated by hand. DO NOT EDIT.\n\npackage a\n\nfunc (t *T[K]) E() {}\n"),
		"b_test.go": []byte("package a\n\nfunc (t *T[K]) F() {}\n"),
	}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int{"a: files": 2, "a/b.go: lines": 10, "a/c.go: lines": 5, "a.T: fields": 3, "a.T: methods": 3, "a.inner: fields": 1} {
		if got := s[name].is; got != want {
			t.Errorf("%s: %d, want %d", name, got, want)
		}
	}
	if len(s) != 6 {
		t.Errorf("%d sizes are known, want 6: %v", len(s), s)
	}
}

func TestAnExceptionMayOnlyFall(t *testing.T) {
	tests := map[string]struct {
		is         int
		exceptions map[string]int
		want       string
	}{
		"within the limit":                   {is: 20},
		"over it":                            {is: 21, want: "a: files: 21, at most 20 are allowed"},
		"an exception":                       {is: 30, exceptions: map[string]int{"a: files": 30}},
		"more than the exception":            {is: 31, exceptions: map[string]int{"a: files": 30}, want: "a: files: 31, and its exception allows 30: it may only fall"},
		"less than the exception":            {is: 29, exceptions: map[string]int{"a: files": 30}, want: "a: files: 29, and its exception allows 30: let it fall, too"},
		"an exception that is not needed":    {is: 20, exceptions: map[string]int{"a: files": 30}, want: "a: files: 20, at most 20 are allowed: its exception can go"},
		"an exception for what is not there": {is: 20, exceptions: map[string]int{"b: files": 30}, want: "b: files has an exception and is not there"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := sizes{}
			s.add("a: files", tc.is, maxFiles)
			if got := strings.Join(s.judge(tc.exceptions), "; "); got != tc.want {
				t.Errorf("problems: %q, want %q", got, tc.want)
			}
		})
	}
}
