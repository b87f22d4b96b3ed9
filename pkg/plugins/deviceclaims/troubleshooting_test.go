// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// Troubleshooting has a row for each message that a golden test has, and shows nothing that no test has: each piece of text in a row's first
// cell is one of a golden's.
func TestTroubleshootingHasAllMessages(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "..", "docs", "troubleshooting.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, chapter, _ := strings.Cut(string(text), "\n## A pod waits\n")
	chapter, _, _ = strings.Cut(chapter, "\n## ")
	// These are kube-scheduler's words.
	theirs := []string{
		"Insufficient nvidia.com/gpu", "preempted by DefaultPreemption",
		"1 node(s) didn't match PersistentVolume's node affinity", "1 node(s) did not have enough free storage",
	}
	var rows [][]string
	for line := range strings.Lines(chapter) {
		if shown, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " | "); strings.HasPrefix(line, "| `") {
			rows = append(rows, pieces(shown))
		}
	}
	goldens, all := goldenTexts(t)
	if len(goldens) < 20 || len(rows) < 25 {
		t.Fatalf("only %d goldens and %d rows are found", len(goldens), len(rows))
	}
	for _, golden := range goldens {
		if !slices.ContainsFunc(rows, func(row []string) bool { return hasAll(golden, row) }) {
			t.Errorf("no row of docs/troubleshooting.md has the message\n\t%s", golden)
		}
	}
	for _, row := range rows {
		isTheirs := !slices.ContainsFunc(row, func(piece string) bool { return !slices.Contains(theirs, piece) })
		if !isTheirs && !slices.ContainsFunc(all, func(golden string) bool { return hasAll(golden, row) }) {
			t.Errorf("docs/troubleshooting.md has %q, which no test has", row)
		}
	}
}

// pieces are the texts that a cell shows as code, without what it leaves out.
func pieces(cell string) []string {
	var found []string
	for _, code := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
		for piece := range strings.SplitSeq(code[1], "…") {
			if piece = strings.TrimSpace(piece); piece != "" {
				found = append(found, piece)
			}
		}
	}
	return found
}

// hasAll tells whether the text has all pieces.
func hasAll(text string, pieces []string) bool {
	return !slices.ContainsFunc(pieces, func(piece string) bool { return !strings.Contains(text, piece) })
}

// goldenTexts are what the tables of messages want, and all texts of the tests of this package and of the allocator.
func goldenTexts(t *testing.T) (goldens, all []string) {
	t.Helper()
	tables := []string{"TestWhatAWaitingPodIsTold", "TestWhatAWaitingGroupIsTold"}
	files, err := filepath.Glob("*_test.go")
	if err != nil {
		t.Fatal(err)
	}
	others, err := filepath.Glob(filepath.Join("..", "..", "allocator", "*_test.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range append(files, others...) {
		if file == "troubleshooting_test.go" {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range parsed.Decls {
			function, _ := decl.(*ast.FuncDecl)
			isTable := function != nil && slices.Contains(tables, function.Name.Name)
			ast.Inspect(decl, func(node ast.Node) bool {
				if pair, ok := node.(*ast.KeyValueExpr); ok && isTable {
					if key, _ := pair.Key.(*ast.Ident); key != nil && key.Name == "want" {
						goldens = append(goldens, literal(pair.Value))
					}
				}
				if expr, ok := node.(ast.Expr); ok {
					if value := literal(expr); value != "" {
						all = append(all, value)
						return false
					}
				}
				return true
			})
		}
	}
	return goldens, all
}

// literal is the value of a string, or of a sum of strings of which some may be none.
func literal(expr ast.Expr) string {
	switch e := expr.(type) {
	case *ast.BasicLit:
		if e.Kind == token.STRING {
			value, _ := strconv.Unquote(e.Value)
			return value
		}
	case *ast.BinaryExpr:
		if e.Op == token.ADD {
			return literal(e.X) + literal(e.Y)
		}
	}
	return ""
}
