// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command tidy runs `go mod tidy` on the embedded build modules and writes the
// result back. Run it by `go generate` in the folder above.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"stowage.dev/stowage/internal/localcluster/build"
)

func main() {
	for _, name := range build.Modules() {
		if err := tidy(name); err != nil {
			fmt.Fprintf(os.Stderr, "tidying build module %s: %v\n", name, err)
			os.Exit(1)
		}
	}
}

func tidy(name string) error {
	dir, err := os.MkdirTemp("", "stowage-tidy-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := build.WriteModule(name, dir); err != nil {
		return err
	}
	cmd := exec.Command("go", "mod", "tidy")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return err
	}
	for _, file := range []string{"go.mod", "go.sum"} {
		data, err := os.ReadFile(filepath.Join(dir, file))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(name, file+".in"), data, 0o644); err != nil {
			return err
		}
	}
	return nil
}
