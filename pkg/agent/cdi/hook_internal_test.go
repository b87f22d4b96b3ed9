package cdi

import (
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"testing"

	"stowage.dev/stowage/pkg/agent/durable"
)

func programOf(path, version string) *debug.BuildInfo {
	return &debug.BuildInfo{Main: debug.Module{Path: path, Version: version}}
}

func programWith(dep debug.Module) *debug.BuildInfo {
	return &debug.BuildInfo{Deps: []*debug.Module{{Path: "example.com/other", Version: "v1.0.0"}, &dep}}
}

func TestTheHookThatIsInstalledIsTheLibrarys(t *testing.T) {
	own := programWith(debug.Module{Path: toolkitModule, Version: "v1.20.1"})
	tests := map[string]struct {
		hook, own *debug.BuildInfo
		before    string // what is in its place
		mode      os.FileMode
		err       string
	}{
		"a new node":                {hook: programOf(toolkitModule, "v1.20.1"), own: own},
		"it is there":               {hook: programOf(toolkitModule, "v1.20.1"), own: own, before: "program", mode: 0o755},
		"half of it is there":       {hook: programOf(toolkitModule, "v1.20.1"), own: own, before: "prog", mode: 0o755},
		"it cannot be executed":     {hook: programOf(toolkitModule, "v1.20.1"), own: own, before: "program", mode: 0o644},
		"older than the library":    {hook: programOf(toolkitModule, "v1.17.0"), own: own, err: "has version v1.17.0, and the agent writes specifications for v1.20.1"},
		"newer than the library":    {hook: programOf(toolkitModule, "v1.21.0"), own: own, err: "has version v1.21.0"},
		"another program":           {hook: programOf("example.com/true", "v1.20.1"), own: own, err: `it is of the module "example.com/true"`},
		"a library that is ours":    {hook: programOf(toolkitModule, "v1.20.2"), own: programWith(debug.Module{Path: toolkitModule, Version: "v1.20.1", Replace: &debug.Module{Version: "v1.20.2"}})},
		"an agent that cannot tell": {hook: programOf(toolkitModule, "v1.20.1"), own: &debug.BuildInfo{}, err: "has version v1.20.1"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			source, folder := filepath.Join(dir, "source"), filepath.Join(dir, "plugins", "gpu.nvidia.com")
			if err := os.WriteFile(source, []byte("program"), 0o700); err != nil {
				t.Fatal(err)
			}
			want := filepath.Join(folder, "nvidia-cdi-hook-"+tc.hook.Main.Version)
			if tc.before != "" {
				if err := os.MkdirAll(folder, 0o750); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(want, []byte(tc.before), tc.mode); err != nil {
					t.Fatal(err)
				}
			}
			// Two agents, as during an upgrade.
			var agents sync.WaitGroup
			for range 2 {
				agents.Go(func() {
					path, err := installHook(t.Context(), durable.OS{}, source, folder, tc.hook, tc.own)
					if tc.err != "" {
						if err == nil || !strings.Contains(err.Error(), tc.err) || !strings.Contains(err.Error(), source) {
							t.Errorf("%v, want an error with %q that names the file", err, tc.err)
						}
						return
					}
					if err != nil || path != want {
						t.Errorf("%s, %v: want %s", path, err, want)
					}
				})
			}
			agents.Wait()
			if tc.err != "" {
				if _, err := os.Stat(folder); !os.IsNotExist(err) {
					t.Errorf("there is something in %s: %v", folder, err)
				}
				return
			}
			text, err := os.ReadFile(want)
			info, statErr := os.Stat(want)
			if err != nil || statErr != nil || string(text) != "program" || info.Mode().Perm() != 0o755 {
				t.Errorf("installed: %q, %v, %v", text, err, statErr)
			}
		})
	}
}
