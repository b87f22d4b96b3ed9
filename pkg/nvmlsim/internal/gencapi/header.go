// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// header is what nvml.h declares.
type header struct {
	functions []function // in its order
	byName    map[string]function
	// words are the types of 32 bits: enumerations, and other names of unsigned int.
	words map[string]bool
	// versions of the structures whose type has none in its name.
	versions map[string]string
}

// function is nvmlReturn_t name(params).
type function struct {
	name   string
	params []param
}

// param has its C type without spaces before stars, "const char*" for one.
type param struct{ typ, name string }

var (
	comment     = regexp.MustCompile(`(?s)/\*.*?\*/|//[^\n]*`)
	declaration = regexp.MustCompile(`nvmlReturn_t\s+DECLDIR\s+(\w+)\s*\(([^)]*)\)\s*;`)
	declared    = regexp.MustCompile(`DECLDIR\s+[\w*]+`)
	enumeration = regexp.MustCompile(`(?s)typedef\s+enum\s*\w*\s*\{[^}]*\}\s*(\w+)\s*;`)
	otherName   = regexp.MustCompile(`typedef\s+unsigned\s+int\s+(\w+)\s*;`)
	versioned   = regexp.MustCompile(`typedef\s+nvml\w+_v(\d)_t\s+(nvml\w+_t)\s*;`)
	parameter   = regexp.MustCompile(`^(.*?)\s*(\w+)$`)
)

func parseHeader(text string) (*header, error) {
	text = comment.ReplaceAllString(text, "")
	h := &header{byName: map[string]function{}, words: map[string]bool{}, versions: map[string]string{}}
	for _, found := range declaration.FindAllStringSubmatch(text, -1) {
		f := function{name: found[1]}
		for _, p := range strings.Split(found[2], ",") {
			if p = strings.Join(strings.Fields(p), " "); p == "void" {
				continue
			}
			parts := parameter.FindStringSubmatch(p)
			if parts == nil {
				return nil, fmt.Errorf("%s: parameter %q: no type and name", f.name, p)
			}
			f.params = append(f.params, param{typ: strings.ReplaceAll(strings.TrimSpace(parts[1]), " *", "*"), name: goName(parts[2])})
		}
		if _, twice := h.byName[f.name]; twice {
			return nil, fmt.Errorf("%s is declared twice", f.name)
		}
		h.functions, h.byName[f.name] = append(h.functions, f), f
	}
	// One function returns something else, a text.
	h.byName["nvmlErrorString"] = function{name: "nvmlErrorString"}
	if all := len(declared.FindAllString(text, -1)) - strings.Count(text, "define DECLDIR __"); all != len(h.byName) {
		return nil, fmt.Errorf("nvml.h declares %d functions, and %d were understood", all, len(h.byName))
	}
	for _, pattern := range []*regexp.Regexp{enumeration, otherName} {
		for _, found := range pattern.FindAllStringSubmatch(text, -1) {
			h.words[found[1]] = true
		}
	}
	for _, found := range versioned.FindAllStringSubmatch(text, -1) {
		h.versions[found[2]] = found[1]
	}
	return h, nil
}

// goName is the name of a parameter where Go, or what is written around it, has no other use for the name.
func goName(name string) string {
	if token.IsKeyword(name) || slices.Contains([]string{"on", "l", "ret", "other", "version", "process", "text", "value"}, name) {
		return name + "Arg"
	}
	return name
}

// exportsIn returns the C functions that the hand-written files of a package export.
func exportsIn(folder string) (map[string]bool, error) {
	exported := map[string]bool{}
	return exported, eachFile(folder, func(file *ast.File) {
		for _, group := range file.Comments {
			for _, line := range group.List {
				if name, ok := strings.CutPrefix(line.Text, "//export nvml"); ok && !strings.HasPrefix(name, "sim") {
					exported["nvml"+name] = true
				}
			}
		}
	})
}

// methodsIn returns the exported methods of each type that the hand-written files of a package have.
func methodsIn(folder string) (map[string]map[string]bool, error) {
	methods := map[string]map[string]bool{}
	return methods, eachFile(folder, func(file *ast.File) {
		for _, declared := range file.Decls {
			f, ok := declared.(*ast.FuncDecl)
			if !ok || f.Recv == nil || !f.Name.IsExported() {
				continue
			}
			of := f.Recv.List[0].Type
			if star, ok := of.(*ast.StarExpr); ok {
				of = star.X
			}
			if name, ok := of.(*ast.Ident); ok {
				if methods[name.Name] == nil {
					methods[name.Name] = map[string]bool{}
				}
				methods[name.Name][f.Name.Name] = true
			}
		}
	})
}

// eachFile visits a package's files, tests and generated ones not among them.
func eachFile(folder string, visit func(*ast.File)) error {
	names, err := fs.Glob(os.DirFS(folder), "*.go")
	if err != nil {
		return err
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(folder, name), nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		if !ast.IsGenerated(file) {
			visit(file)
		}
	}
	return nil
}
