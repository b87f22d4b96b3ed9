// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"

	"stowage.dev/stowage/pkg/agent/durable"
)

const (
	hookName = "nvidia-cdi-hook"
	// hookFolder of the agent's state folder is open to all, unlike its other folders.
	hookFolder = "bin"
	// hookTimeout is for a disk that hangs.
	hookTimeout = 30 * time.Second
	// toolkitModule has both: the library that names hooks in a specification, and the program that carries them out.
	toolkitModule = "github.com/NVIDIA/nvidia-container-toolkit"
	// memoryLimitsHook opens the driver's library, which a program that is linked statically cannot.
	memoryLimitsHook = "apply-cuda-memory-limits"
)

// Hook is the program nvidia-cdi-hook that lies beside the agent and is brought to where the container runtime finds it: into the folder
// bin of the agent's state folder. A pod with hostUsers: false has its hooks run in its user namespace, where the host's root is nobody, so
// whoever it is must be able to run it; the kubelet's folder of plugins (0750) is closed to them. Where no program runs, as on a host with
// /var mounted noexec, other pods get theirs from the plugin's folder. The version is in the file's name, since containers that start again
// are prepared with the program that their specification names.
type Hook struct {
	source, state string
	host          host
	timeout       time.Duration

	runs singleflight.Group
	// inState is for everybody, and inPlugin for root. They are used in runs.
	inState, inPlugin hookPlace
	warning           atomic.Pointer[string]
}

// hookPlace is one that the program is brought to.
type hookPlace struct {
	path string
	// seen is the file that had the program's content; nil before.
	seen fs.FileInfo
}

// NewHook looks at the program, and installs nothing. It has to be of the version of nvcdi, else it is an error: an older one fails on
// hooks that it does not know, and each container with it. The state folder and the plugin's, below the kubelet's root, have the same paths
// here and on the host, whose root folder the agent sees in hostRoot.
func NewHook(source, stateDir, pluginDir, hostRoot string) (*Hook, error) {
	info, err := buildinfo.ReadFile(source)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", hookName, err)
	}
	own, _ := debug.ReadBuildInfo()
	return newHook(source, stateDir, pluginDir, hostRoot, info, own)
}

func newHook(source, stateDir, pluginDir, hostRoot string, hook, own *debug.BuildInfo) (*Hook, error) {
	if hook.Main.Path != toolkitModule {
		return nil, fmt.Errorf("%s is no %s: it is of the module %q, want %s", source, hookName, hook.Main.Path, toolkitModule)
	}
	wanted := versionOf(own, toolkitModule)
	if hook.Main.Version != wanted {
		return nil, fmt.Errorf("%s has version %s, and the agent writes specifications for %s", source, hook.Main.Version, wanted)
	}
	name := hookName + "-" + wanted
	return &Hook{
		source: source, state: filepath.Clean(stateDir), host: host(filepath.Clean(hostRoot)), timeout: hookTimeout,
		inState:  hookPlace{path: filepath.Join(stateDir, hookFolder, name)},
		inPlugin: hookPlace{path: filepath.Join(pluginDir, name)},
	}, nil
}

// Install returns the program's path on the host when it is there and can be run: by whoever it is or, if no place allows that, by root, of
// which [Hook.Warning] tells. It costs little where that is so already. It waits for 30 s at most, and not beyond the context.
func (h *Hook) Install(ctx context.Context) (path string, err error) {
	timeout := h.timeout
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	// A disk that hangs is waited for by one.
	result := h.runs.DoChan("", func() (any, error) { return h.install(timeout) })
	select {
	case r := <-result:
		if r.Err != nil {
			return "", fmt.Errorf("install %s: %w", h.inState.path, r.Err)
		}
		return r.Val.(string), nil
	case <-ctx.Done():
		return "", fmt.Errorf("install %s: the folder has not answered yet: %w", h.inState.path, context.Cause(ctx))
	}
}

// Warning says why the program that was installed last does not prepare containers in a user namespace; empty if nothing is
// in the way, or if none was installed yet.
func (h *Hook) Warning() string {
	if warning := h.warning.Load(); warning != nil {
		return *warning
	}
	return ""
}

func (h *Hook) install(timeout time.Duration) (path string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if err := h.open(); err != nil {
		return "", err
	}
	if err := h.inState.install(ctx, h.source); err != nil {
		return "", err
	}
	closed := h.host.programForAll(h.inState.path)
	if closed == nil {
		return h.use(h.inState, nil), nil
	}
	if h.host.programForRoot(h.inState.path) == nil { // so claims that are prepared keep their path, and are mended with the folder
		return h.use(h.inState, closed), nil
	}
	failed := os.MkdirAll(filepath.Dir(h.inPlugin.path), 0o750) // as the plugin, which may make it later
	if failed == nil {
		failed = h.inPlugin.install(ctx, h.source)
	}
	if failed == nil {
		failed = h.host.programForRoot(h.inPlugin.path)
	}
	switch {
	case failed == nil && h.host.programForAll(h.inPlugin.path) == nil:
		return h.use(h.inPlugin, nil), nil
	case failed == nil:
		return h.use(h.inPlugin, closed), nil
	}
	return "", fmt.Errorf("%w; instead of it %s: %w", closed, h.inPlugin.path, failed)
}

// use the program of a place, which is closed to users other than root for that reason; nil if it is not.
func (h *Hook) use(p hookPlace, closed error) (path string) {
	warning := ""
	if closed != nil {
		warning = warningOfHook("--state-dir", closed)
	}
	h.warning.Store(&warning)
	return p.path
}

// open makes the folder, and lets everybody pass through the state folder to it: what else is there keeps its modes. Where
// that cannot be done it is judged in the end.
func (h *Hook) open() error {
	folder := filepath.Dir(h.inState.path)
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	if info, err := os.Stat(h.state); err == nil && info.Mode().Perm()&0o001 == 0 {
		_ = os.Chmod(h.state, info.Mode().Perm()|0o001)
	}
	if info, err := os.Stat(folder); err == nil && info.Mode().Perm() != 0o755 { // whatever the umask
		_ = os.Chmod(folder, 0o755)
	}
	return nil
}

// install writes the program if it is not there.
func (p *hookPlace) install(ctx context.Context, source string) error {
	if info, err := os.Lstat(p.path); err == nil && p.same(info) {
		return nil
	}
	return p.write(ctx, source)
}

// same tells whether it is the file that was looked at before, as it was then.
func (p *hookPlace) same(info fs.FileInfo) bool {
	return p.seen != nil && os.SameFile(p.seen, info) && p.seen.Mode() == info.Mode() && p.seen.Size() == info.Size() &&
		p.seen.ModTime().Equal(info.ModTime())
}

func (p *hookPlace) write(ctx context.Context, source string) error {
	program, err := os.ReadFile(source)
	if err != nil {
		return err
	}
	// Two agents write during an upgrade.
	unlock, err := durable.Lock(ctx, p.path+".lock")
	if err != nil {
		return err
	}
	defer unlock()
	info, err := os.Lstat(p.path)
	if err != nil || !info.Mode().IsRegular() || info.Mode().Perm() != 0o755 || !hasContent(p.path, program) {
		if err := durable.WriteFile(durable.OS{}, p.path, program, 0o755); err != nil {
			return err
		}
		if info, err = os.Lstat(p.path); err != nil {
			return err
		}
	}
	p.seen = info
	return nil
}

func hasContent(path string, content []byte) bool {
	is, err := os.ReadFile(path)
	return err == nil && bytes.Equal(is, content)
}

// HookWarning says why a program of the host's, by its path there, does not prepare containers in a user namespace; empty
// if nothing is in the way. It is no reason to refuse claims: pods without hostUsers: false have it run by root. A
// program that is missing is not told of here.
func HookWarning(hostRoot, path string) string {
	h := host(filepath.Clean(hostRoot))
	if h.program(path) != nil {
		return ""
	}
	if err := h.programForAll(path); err != nil {
		return warningOfHook("--nvidia-cdi-hook", err)
	}
	return ""
}

func warningOfHook(flag string, err error) string {
	return fmt.Sprintf("pods with hostUsers: false that have a GPU do not start: %s: %v", flag, err)
}

// versionOf a module in a program, or of what is used in its place.
func versionOf(program *debug.BuildInfo, module string) string {
	if program == nil {
		return ""
	}
	for _, dep := range program.Deps {
		if dep.Path == module {
			if dep.Replace != nil {
				return dep.Replace.Version
			}
			return dep.Version
		}
	}
	return ""
}
