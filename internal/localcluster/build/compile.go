// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package build

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"syscall"
	"time"
)

// compiler runs "go build" with the arguments in the module folder dir and
// writes the program to output.
type compiler func(ctx context.Context, dir, output string, args []string) error

// goBuild is the compiler that calls the go command.
func goBuild(ctx context.Context, dir, output string, args []string) error {
	goCommand, err := findGo()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, goCommand, append([]string{"build", "-o", output}, args...)...)
	cmd.Dir = dir
	// Neither a workspace nor the caller's build flags may change what is
	// built, or the cache key would be wrong.
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=", "CGO_ENABLED=1", "GOOS=", "GOARCH=")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	// The go command's compilers are its own children: end the whole group.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second

	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("go build %s: %w\n%s", args[len(args)-1], err, tail(out.Bytes()))
	}
	return nil
}

// findGo finds the go command, in PATH or where the running program's Go was
// installed.
func findGo() (string, error) {
	path, err := exec.LookPath("go")
	if err == nil {
		return path, nil
	}
	if root := os.Getenv("GOROOT"); root != "" {
		candidate := filepath.Join(root, "bin", "go")
		if _, statErr := os.Stat(candidate); statErr == nil {
			return candidate, nil
		}
	}
	return "", errors.Join(
		fmt.Errorf("the cluster's programs are built from source and need the go command (%s or later)", runtime.Version()), err)
}
