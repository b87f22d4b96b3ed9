// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// What the snippets import is read from its source once.
var (
	sources = token.NewFileSet()
	imports = importer.ForCompiler(sources, "source", nil)
)

// mutantsOf returns the mutants of a function body, and the code with all of them.
func mutantsOf(t *testing.T, signature, body string) (names []string, mutated string) {
	t.Helper()
	text := "package p\n\nimport (\n\t\"errors\"\n\t\"sync\"\n)\n\n" +
		"type pair struct{ a, b int }\n\nvar (\n\tmutex sync.Mutex\n\terrNone = errors.New(\"none\")\n)\n\nfunc use(...any) {}\n\n" +
		"func f" + signature + " {\n" + body + "\n}\n"
	target := &target{name: "p", fset: sources, info: &types.Info{
		Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{},
	}}
	syntax, err := parser.ParseFile(target.fset, "p.go", text, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	check := types.Config{Importer: imports}
	if _, err := check.Check("p", target.fset, []*ast.File{syntax}, target.info); err != nil {
		t.Fatal(err)
	}
	var mutants []mutant
	w := &walk{target: target, source: &source{"p.go", []byte(text), syntax}, mutants: &mutants, names: map[string]int{}, paired: map[ast.Stmt]bool{}}
	w.file()
	for _, m := range mutants {
		if m.function == "f" {
			names = append(names, m.what)
		}
	}
	mutated = w.mutated()

	// What comes out is Go, with the lines where they were.
	var files []*ast.File
	for name, text := range map[string]string{"p.go": mutated, "switches.go": switches("p", len(mutants))} {
		file, err := parser.ParseFile(sources, name, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatalf("%v in:\n%s", err, text)
		}
		files = append(files, file)
	}
	if _, err := check.Check("p", sources, files, nil); err != nil {
		t.Fatalf("%v in:\n%s", err, mutated)
	}
	if before, after := strings.Count(text, "\n"), strings.Count(mutated, "\n"); before != after {
		t.Errorf("%d lines instead of %d:\n%s", after, before, mutated)
	}
	return names, mutated
}

func TestOperators(t *testing.T) {
	tests := map[string]struct {
		signature, body string
		want            []string
	}{
		"statements are dropped": {
			"()", "use(1)\nn := 1\nn = 2\nn++\ndefer use(n)\ngo use(n)",
			[]string{"drop use(1)", "drop n = 2", "drop n++", "drop defer use(n)", "drop go use(n)"},
		},
		"equal ones are told apart": {
			"()", "use(1)\nuse(1)",
			[]string{"drop use(1)", "drop use(1) (2)"},
		},
		"conditions are decided": {
			"(a bool)", "if a {\n\tuse(1)\n}",
			[]string{"a is always true", "a is always false", "drop use(1)"},
		},
		"operands are left out": {
			"(a, b bool) bool", "return a && b",
			[]string{"a && b is always true", "a && b is always false", "without a in a && b", "without b in a && b"},
		},
		"boundaries are moved": {
			"(a, b int) bool", "return a <= b",
			[]string{"a <= b is always true", "a <= b is always false", "a <= b with <"},
		},
		"sums lose their second part": {
			"(a, b int) int", "return a - b",
			[]string{"return the zero value instead of a - b", "a - b without the second operand"},
		},
		"results become zero values": {
			"() (*pair, error)", "return &pair{a: 1, b: 2}, errNone",
			[]string{"return the zero value instead of &pair{a: 1, b: 2}", "return the zero value instead of errNone"},
		},
		"early returns are dropped where control may go on": {
			"(a bool) int", "if a {\n\treturn 1\n}\nreturn 2",
			[]string{"a is always true", "a is always false", "drop return 1"},
		},
		"loops are dropped, or end at once": {
			"(n int)", "for n > 0 {\n\tn--\n}\nfor range n {\n\tbreak\n}",
			[]string{"drop for n > 0 { n-- }", "n > 0 is always false", "n > 0 with >=", "drop n--", "drop for range n { break }", "drop break"},
		},
		"cases are decided, and what is in them is broken": {
			"(n int)", "switch {\ncase n == 1:\n\tuse(1)\ndefault:\n\tuse(2)\n}\nswitch n {\ncase 3:\n\tuse(3)\n}",
			[]string{"n == 1 is always true", "n == 1 is always false", "drop use(1)", "drop use(2)", "drop use(3)"},
		},
		"fields are not set": {
			"(n int) pair", "return pair{a: n, b: 2}",
			[]string{"return the zero value instead of pair{a: n, b: 2}", "a is not set to n"},
		},
		"a lock goes with its unlock": {
			"()", "mutex.Lock()\ndefer mutex.Unlock()\nuse(1)",
			[]string{"drop mutex.Lock() with its Unlock", "drop use(1)"},
		},
		"functions in expressions": {
			"()", "use(func(n int) bool { return n > 1 })",
			[]string{"drop use(func(n int) bool { return n > 1 })", "n > 1 is always true", "n > 1 is always false", "n > 1 with >="},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got, mutated := mutantsOf(t, tc.signature, tc.body)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("mutants differ (-want +got):\n%s\n%s", diff, mutated)
			}
		})
	}
}

// Nobody tests what is written to the log, or whether a context is cancelled in the end: vet does.
func TestLogsAreNotMutated(t *testing.T) {
	text := "package p\n\nfunc f(logger interface{ Info(...any) }, verbose bool, cancel func()) {\n\tdefer cancel()\n" +
		"\tdefer func() {\n\t\tif verbose {\n\t\t\tlogger.Info(0)\n\t\t}\n\t}()\n\tif verbose {\n\t\tlogger.Info(1)\n\t}\n\tlogger.Info(2)\n}\n"
	fset := token.NewFileSet()
	syntax, err := parser.ParseFile(fset, "p.go", text, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	info := &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{}}
	if _, err := (&types.Config{}).Check("p", fset, []*ast.File{syntax}, info); err != nil {
		t.Fatal(err)
	}
	var mutants []mutant
	w := &walk{target: &target{name: "p", fset: fset, info: info}, source: &source{"p.go", []byte(text), syntax}, mutants: &mutants, names: map[string]int{}, paired: map[ast.Stmt]bool{}}
	w.file()
	if len(mutants) > 0 {
		t.Errorf("mutants: %v", mutants)
	}
}
