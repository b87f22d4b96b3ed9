// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Apply applies manifests as the administrator, in the order given, with the
// real kubectl and server-side. A folder with a kustomization is built with
// kustomize; another folder is applied with all that is below it.
func (c *Cluster) Apply(ctx context.Context, paths ...string) error {
	for _, path := range paths {
		source, err := sourceArgs(path)
		if err != nil {
			return fmt.Errorf("applying manifests: %w", err)
		}
		args := append([]string{"apply", "--server-side", "--field-manager=stowage-localcluster"}, source...)
		if _, err := c.Kubectl(ctx, args...); err != nil {
			return fmt.Errorf("applying %s: %w", path, err)
		}
	}
	return nil
}

// Delete deletes what Apply made from the same paths, in reverse order, and
// waits until it is gone. What does not exist is no error.
func (c *Cluster) Delete(ctx context.Context, paths ...string) error {
	var errs []error
	for _, path := range slices.Backward(paths) {
		source, err := sourceArgs(path)
		if err == nil {
			_, err = c.Kubectl(ctx, append([]string{"delete", "--ignore-not-found"}, source...)...)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("deleting %s: %w", path, err))
		}
	}
	return errors.Join(errs...)
}

// sourceArgs tell kubectl how to read a path.
func sourceArgs(path string) ([]string, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case info.IsDir() && isKustomization(path):
		return []string{"-k", path}, nil
	case info.IsDir():
		return []string{"-f", path, "--recursive"}, nil
	}
	return []string{"-f", path}, nil
}

func isKustomization(dir string) bool {
	for _, name := range []string{"kustomization.yaml", "kustomization.yml", "Kustomization"} {
		if pathExists(filepath.Join(dir, name)) {
			return true
		}
	}
	return false
}

// Kubectl runs kubectl as the administrator and returns what it prints to
// stdout. When it fails the error carries what it prints to stderr.
func (c *Cluster) Kubectl(ctx context.Context, args ...string) (string, error) {
	return c.KubectlAs(ctx, c.adminConf, args...)
}

// KubectlAs is Kubectl with another kubeconfig file.
func (c *Cluster) KubectlAs(ctx context.Context, kubeconfig string, args ...string) (string, error) {
	global := []string{"--kubeconfig=" + kubeconfig, "--cache-dir=" + filepath.Join(c.dir, "kubectl-cache")}
	cmd := exec.CommandContext(ctx, c.binaries.Kubectl(), append(global, args...)...)
	cmd.WaitDelay = 5 * time.Second
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.SysProcAttr = childAttributes()
	var err error
	onSpawnThread(func() { err = cmd.Start() })
	if err == nil {
		err = cmd.Wait()
	}
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return stdout.String(), fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
