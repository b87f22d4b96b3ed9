// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// Compile builds one of this module's commands, given by import path, into a static binary at output. The Go command must be in PATH
// and the working directory inside the module, as it is for a test and for what make starts.
func Compile(ctx context.Context, importPath, output string) error {
	if err := os.MkdirAll(filepath.Dir(output), 0o755); err != nil {
		return fmt.Errorf("making the folder for %s: %w", importPath, err)
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", output, importPath)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("compiling %s: %w\n%s", importPath, err, bytes.TrimSpace(out.Bytes()))
	}
	return nil
}
