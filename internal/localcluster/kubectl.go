package localcluster

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// Apply applies manifests as the administrator, in the order given, with the
// real kubectl and server-side. A folder with a kustomization is built with
// kustomize; another folder is applied with all that is below it.
func (c *Cluster) Apply(ctx context.Context, paths ...string) error {
	for _, path := range paths {
		source := []string{"-f", path}
		info, err := os.Stat(path)
		switch {
		case err != nil:
			return fmt.Errorf("applying manifests: %w", err)
		case info.IsDir() && isKustomization(path):
			source = []string{"-k", path}
		case info.IsDir():
			source = append(source, "--recursive")
		}
		args := append([]string{"apply", "--server-side", "--field-manager=stowage-localcluster"}, source...)
		if _, err := c.Kubectl(ctx, args...); err != nil {
			return fmt.Errorf("applying %s: %w", path, err)
		}
	}
	return nil
}

// Delete deletes what Apply made from the same paths, in reverse order. What
// does not exist is no error.
func (c *Cluster) Delete(ctx context.Context, paths ...string) error {
	var errs []error
	for i := len(paths) - 1; i >= 0; i-- {
		flag := "-f"
		if isKustomization(paths[i]) {
			flag = "-k"
		}
		if _, err := c.Kubectl(ctx, "delete", "--ignore-not-found", flag, paths[i]); err != nil {
			errs = append(errs, fmt.Errorf("deleting %s: %w", paths[i], err))
		}
	}
	return errors.Join(errs...)
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
