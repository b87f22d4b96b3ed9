// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
)

// target is a package with its syntax and types.
type target struct {
	dir, path, name string
	fset            *token.FileSet
	files           []*source
	info            *types.Info
}

type source struct {
	name   string // without folder
	text   []byte
	syntax *ast.File
}

// load parses and checks the package that a pattern names. The types of what it
// imports come from the build cache.
func load(ctx context.Context, pattern string) (*target, error) {
	type listed struct {
		Dir, ImportPath, Name, Export string
		GoFiles                       []string
		DepOnly                       bool
	}
	output, err := command(ctx, "go", "list", "-export", "-deps", "-json=Dir,ImportPath,Name,Export,GoFiles,DepOnly", pattern).Output()
	if err != nil {
		return nil, fmt.Errorf("listing the package: %w", err)
	}
	var found *listed
	exports := map[string]string{}
	for decoder := json.NewDecoder(bytes.NewReader(output)); ; {
		var l listed
		if err := decoder.Decode(&l); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, fmt.Errorf("reading what go list wrote: %w", err)
		}
		exports[l.ImportPath] = l.Export
		if !l.DepOnly {
			if found != nil {
				return nil, fmt.Errorf("names more than one package: %s and %s", found.ImportPath, l.ImportPath)
			}
			found = &l
		}
	}

	t := &target{
		dir: found.Dir, path: found.ImportPath, name: found.Name, fset: token.NewFileSet(),
		info: &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{}, Defs: map[*ast.Ident]types.Object{}},
	}
	var syntax []*ast.File
	for _, name := range found.GoFiles {
		text, err := os.ReadFile(filepath.Join(t.dir, name))
		if err != nil {
			return nil, err
		}
		file, err := parser.ParseFile(t.fset, name, text, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		t.files = append(t.files, &source{name, text, file})
		syntax = append(syntax, file)
	}
	config := types.Config{Importer: importer.ForCompiler(t.fset, "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(exports[path])
	})}
	if _, err := config.Check(t.path, t.fset, syntax, t.info); err != nil {
		return nil, fmt.Errorf("checking types: %w", err)
	}
	return t, nil
}

func command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stderr = os.Stderr
	return cmd
}
