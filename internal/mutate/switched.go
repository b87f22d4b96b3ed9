// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"strings"
)

// switched writes code with all seeded bugs, each behind its switch, and go's overlay for it: a build takes longer than most tests. A
// function that a bug changes begins by asking whether it is on, and calls a copy of itself that has the bug. The first bug's switch is 1.
func (n notes) switched(t *target, work string) (overlay string, err error) {
	type file struct {
		text   string
		edits  []edit
		copies strings.Builder
	}
	files, packages := map[string]*file{}, map[string]string{} // by their paths; the packages' names by their folders
	named := map[string]bool{}                                 // functions all of whose parameters have been named
	for i, s := range n.Seeds {
		texts, err := s.changed(t.dir)
		if err != nil {
			return "", fmt.Errorf("seed %q: %w", s.Name, err)
		}
		for path, text := range texts {
			f := files[path]
			if f == nil {
				original, err := os.ReadFile(path)
				if err != nil {
					return "", err
				}
				f = &file{text: string(original)}
				files[path] = f
			}
			name, pairs, err := functions(f.text, text)
			if err != nil {
				return "", fmt.Errorf("seed %q: %s: %w", s.Name, path, err)
			}
			packages[filepath.Dir(path)] = name
			for _, p := range pairs {
				call, naming := p.call(fmt.Sprintf("%sMutant%d", p.decl.Name, i+1))
				if key := fmt.Sprint(path, p.decl.Pos()); !named[key] {
					named[key] = true
					f.edits = append(f.edits, naming...)
				}
				if p.decl.Type.Results == nil {
					call += "; return"
				} else {
					call = "return " + call
				}
				begin := int(p.decl.Body.Lbrace) // behind the brace
				f.edits = append(f.edits, edit{begin, begin, fmt.Sprintf(" if mutantOn == %d { %s };", i+1, call), len(f.edits)})
				fmt.Fprintf(&f.copies, "\n%s%sMutant%d%s\n", p.before, p.decl.Name, i+1, p.after)
			}
		}
	}
	replace := map[string]string{}
	write := func(path, text string) error {
		replace[path] = filepath.Join(work, fmt.Sprintf("%d-%s", len(replace), filepath.Base(path)))
		return os.WriteFile(replace[path], []byte(text), 0o600)
	}
	for path, f := range files {
		w := walk{source: &source{text: []byte(f.text)}, edits: f.edits}
		if err := write(path, w.mutated()+f.copies.String()); err != nil {
			return "", err
		}
	}
	for folder, name := range packages {
		if err := write(filepath.Join(folder, "mutant_switch.go"), fmt.Sprintf(`package %s

import (
	mutantOS "os"
	mutantStrconv "strconv"
)

var mutantOn = func() int { n, _ := mutantStrconv.Atoi(mutantOS.Getenv(%q)); return n }()
`, name, environment)); err != nil {
			return "", err
		}
	}
	return writeOverlay(work, replace)
}

// pair is a function, and the text of its changed self before and after its name.
type pair struct {
	decl          *ast.FuncDecl
	before, after string
}

// functions are those that differ in two texts of a file of a package.
func functions(original, changed string) (pkg string, pairs []pair, err error) {
	rest := map[string]string{} // of the texts, without the functions
	decls := func(text string) (found []*ast.FuncDecl) {
		// Positions are places in the text plus 1, as it is the only file.
		syntax, parseErr := parser.ParseFile(token.NewFileSet(), "", text, parser.SkipObjectResolution)
		if parseErr != nil {
			err = parseErr
			return nil
		}
		pkg = syntax.Name.Name
		at := 0
		for _, decl := range syntax.Decls {
			if f, ok := decl.(*ast.FuncDecl); ok && f.Body != nil {
				found = append(found, f)
				rest[text] += text[at : f.Body.Pos()-1]
				at = int(f.Body.End()) - 1
			}
		}
		rest[text] += text[at:]
		return found
	}
	before, after := decls(original), decls(changed)
	if err != nil {
		return "", nil, err
	}
	if rest[original] != rest[changed] {
		return "", nil, errors.New("something outside of functions' bodies is changed")
	}
	for i, f := range before {
		other := after[i]
		if original[f.Body.Pos()-1:f.Body.End()-1] != changed[other.Body.Pos()-1:other.Body.End()-1] {
			pairs = append(pairs, pair{f, changed[other.Pos()-1 : other.Name.Pos()-1], changed[other.Name.End()-1 : other.End()-1]})
		}
	}
	return pkg, pairs, nil
}

// call calls another function with the same parameters, which naming names where they have no names.
func (p pair) call(other string) (call string, naming []edit) {
	nameless := 0
	names := func(list *ast.FieldList) (all []string) {
		for _, field := range list.List {
			if len(field.Names) == 0 {
				nameless++
				at := int(field.Pos()) - 1
				naming = append(naming, edit{at, at, fmt.Sprintf("mutantArg%d ", nameless), 0})
				all = append(all, fmt.Sprintf("mutantArg%d", nameless))
			}
			for _, name := range field.Names {
				if name.Name == "_" {
					nameless++
					name := int(name.Pos()) - 1
					naming = append(naming, edit{name, name + 1, fmt.Sprintf("mutantArg%d", nameless), 0})
					all = append(all, fmt.Sprintf("mutantArg%d", nameless))
					continue
				}
				all = append(all, name.Name)
			}
			if _, variadic := field.Type.(*ast.Ellipsis); variadic {
				all[len(all)-1] += "..."
			}
		}
		return all
	}
	if p.decl.Recv != nil {
		other = names(p.decl.Recv)[0] + "." + other
	}
	return other + "(" + strings.Join(names(p.decl.Type.Params), ", ") + ")", naming
}
