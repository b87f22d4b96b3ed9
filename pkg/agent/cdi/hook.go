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

// Hook is the program nvidia-cdi-hook that lies beside the agent and is brought to where the container runtime finds it: into the folder bin of the
// agent's state folder. A pod with hostUsers: false has its hooks run in its user namespace, where the host's root is nobody, so whoever it is must be
// able to run it; the kubelet's folder of plugins (0750) is closed to them. The version is in the file's name, since containers that start again are
// prepared with the program that their specification names.
type Hook struct {
	source, state, name string
	host                host
	timeout             time.Duration

	runs singleflight.Group
	// seen is the file that had the program's content; nil before. It is read and written in runs.
	seen fs.FileInfo
}

// NewHook looks at the program, and installs nothing. It has to be of the version of nvcdi, else it is an error: an older one fails on hooks that it
// does not know, and each container with it. The state folder has the same path here and on the host, whose root folder the agent sees in hostRoot.
func NewHook(source, stateDir, hostRoot string) (*Hook, error) {
	info, err := buildinfo.ReadFile(source)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", hookName, err)
	}
	own, _ := debug.ReadBuildInfo()
	return newHook(source, stateDir, hostRoot, info, own)
}

func newHook(source, stateDir, hostRoot string, hook, own *debug.BuildInfo) (*Hook, error) {
	if hook.Main.Path != toolkitModule {
		return nil, fmt.Errorf("%s is no %s: it is of the module %q, want %s", source, hookName, hook.Main.Path, toolkitModule)
	}
	wanted := versionOf(own, toolkitModule)
	if hook.Main.Version != wanted {
		return nil, fmt.Errorf("%s has version %s, and the agent writes specifications for %s", source, hook.Main.Version, wanted)
	}
	return &Hook{
		source: source, state: filepath.Clean(stateDir), name: hookName + "-" + wanted, host: host(filepath.Clean(hostRoot)), timeout: hookTimeout,
	}, nil
}

// Path is the program's on the host, once it is installed.
func (h *Hook) Path() string { return filepath.Join(h.state, hookFolder, h.name) }

// Install returns when the program is where it has to be, and can be run there by whoever it is. It costs little where that is so already. It waits
// for 30 s at most, and not beyond the context.
func (h *Hook) Install(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, h.timeout)
	defer cancel()
	// A disk that hangs is waited for by one.
	result := h.runs.DoChan("", func() (any, error) { return nil, h.install() })
	select {
	case r := <-result:
		if r.Err != nil {
			return fmt.Errorf("install %s: %w", h.Path(), r.Err)
		}
		return nil
	case <-ctx.Done():
		return fmt.Errorf("install %s: the folder has not answered yet: %w", h.Path(), context.Cause(ctx))
	}
}

func (h *Hook) install() error {
	ctx, cancel := context.WithTimeout(context.Background(), h.timeout)
	defer cancel()
	if err := h.open(); err != nil {
		return err
	}
	if info, err := os.Lstat(h.Path()); err != nil || !h.same(info) {
		if err := h.write(ctx); err != nil {
			return err
		}
	}
	return h.host.programForAll(h.Path())
}

// open makes the folder, and lets everybody pass through the state folder to it: what else is there keeps its modes. Where that cannot be done it is
// judged in the end.
func (h *Hook) open() error {
	folder := filepath.Dir(h.Path())
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

// same tells whether it is the file that was looked at before, as it was then.
func (h *Hook) same(info fs.FileInfo) bool {
	return h.seen != nil && os.SameFile(h.seen, info) && h.seen.Mode() == info.Mode() && h.seen.Size() == info.Size() && h.seen.ModTime().Equal(info.ModTime())
}

func (h *Hook) write(ctx context.Context) error {
	program, err := os.ReadFile(h.source)
	if err != nil {
		return err
	}
	// Two agents write during an upgrade.
	unlock, err := durable.Lock(ctx, h.Path()+".lock")
	if err != nil {
		return err
	}
	defer unlock()
	info, err := os.Lstat(h.Path())
	if err != nil || !info.Mode().IsRegular() || info.Mode().Perm() != 0o755 || !hasContent(h.Path(), program) {
		if err := durable.WriteFile(durable.OS{}, h.Path(), program, 0o755); err != nil {
			return err
		}
		if info, err = os.Lstat(h.Path()); err != nil {
			return err
		}
	}
	h.seen = info
	return nil
}

func hasContent(path string, content []byte) bool {
	is, err := os.ReadFile(path)
	return err == nil && bytes.Equal(is, content)
}

// HookWarning says why a program of the host's, by its path there, does not prepare containers in a user namespace; empty if nothing is in the way. It
// is no reason to refuse claims: pods without hostUsers: false have it run by root. A program that is missing is not told of here.
func HookWarning(hostRoot, path string) string {
	h := host(filepath.Clean(hostRoot))
	if h.program(path) != nil {
		return ""
	}
	if err := h.programForAll(path); err != nil {
		return fmt.Sprintf("pods with hostUsers: false that have a GPU do not start: --nvidia-cdi-hook: %v", err)
	}
	return ""
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
