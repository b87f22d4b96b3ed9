package cdi

import (
	"bytes"
	"context"
	"debug/buildinfo"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"

	"stowage.dev/stowage/pkg/agent/durable"
)

const (
	hookName = "nvidia-cdi-hook"
	// toolkitModule has both: the library that names hooks in a specification, and the program that carries them out.
	toolkitModule = "github.com/NVIDIA/nvidia-container-toolkit"
	// memoryLimitsHook opens the driver's library, which a program that is linked statically cannot.
	memoryLimitsHook = "apply-cuda-memory-limits"
)

// InstallHook copies the program nvidia-cdi-hook, which lies beside the agent, into a folder that the container runtime sees under the same path, and
// returns its path there. It has to be of the version of nvcdi: an older one fails on hooks that it does not know, and each container with it. The
// version is in the file's name, since containers that start again are prepared with the program that their specification names.
func InstallHook(ctx context.Context, source, folder string) (path string, err error) {
	info, err := buildinfo.ReadFile(source)
	if err != nil {
		return "", fmt.Errorf("%s: %w", hookName, err)
	}
	own, _ := debug.ReadBuildInfo()
	return installHook(ctx, durable.OS{}, source, folder, info, own)
}

func installHook(ctx context.Context, fsys durable.FS, source, folder string, hook, own *debug.BuildInfo) (path string, err error) {
	if hook.Main.Path != toolkitModule {
		return "", fmt.Errorf("%s is no %s: it is of the module %q, want %s", source, hookName, hook.Main.Path, toolkitModule)
	}
	wanted := versionOf(own, toolkitModule)
	if hook.Main.Version != wanted {
		return "", fmt.Errorf("%s has version %s, and the agent writes specifications for %s", source, hook.Main.Version, wanted)
	}
	program, err := fsys.ReadFile(source)
	if err != nil {
		return "", fmt.Errorf("%s: %w", hookName, err)
	}
	if err := fsys.MkdirAll(folder, 0o750); err != nil { // the plugin's, which it may make later
		return "", fmt.Errorf("folder of %s: %w", hookName, err)
	}
	path = filepath.Join(folder, hookName+"-"+wanted)
	// Two agents write during an upgrade.
	unlock, err := durable.Lock(ctx, path+".lock")
	if err != nil {
		return "", fmt.Errorf("install %s: %w", hookName, err)
	}
	defer unlock()
	if has, err := fsys.ReadFile(path); err == nil && bytes.Equal(has, program) && executable(path) {
		return path, nil
	}
	if err := durable.WriteFile(fsys, path, program, 0o755); err != nil {
		return "", fmt.Errorf("install %s: %w", hookName, err)
	}
	return path, nil
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 == 0o111
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
