package cdi

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func programOf(path, version string) *debug.BuildInfo {
	return &debug.BuildInfo{Main: debug.Module{Path: path, Version: version}}
}

func programWith(dep debug.Module) *debug.BuildInfo {
	return &debug.BuildInfo{Deps: []*debug.Module{{Path: "example.com/other", Version: "v1.0.0"}, &dep}}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// hostRoot is a folder that is the host's root and, under the path that it has here, is so for the host, too: as the agent's state folder.
func hostRoot(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(root, filepath.Dir(root)), 0o755))
	must(t, os.Symlink("/", filepath.Join(root, root)))
	return root
}

// makeFolder with these very modes.
func makeFolder(t *testing.T, path string, mode fs.FileMode) {
	t.Helper()
	must(t, os.MkdirAll(path, 0o755))
	must(t, os.Chmod(path, mode))
}

func modeOf(t *testing.T, path string) fs.FileMode {
	t.Helper()
	info, err := os.Stat(path)
	must(t, err)
	return info.Mode().Perm()
}

// hookBeside an agent, with the host in root and the state folder in its var/lib/stowage.
func hookBeside(t *testing.T, root string) *Hook {
	t.Helper()
	source := filepath.Join(t.TempDir(), "hook")
	must(t, os.WriteFile(source, []byte("program"), 0o700))
	hook, err := newHook(source, filepath.Join(root, "var/lib/stowage"), root,
		programOf(toolkitModule, "v1.20.1"), programWith(debug.Module{Path: toolkitModule, Version: "v1.20.1"}))
	must(t, err)
	return hook
}

func TestTheHookIsOfTheLibrarysVersion(t *testing.T) {
	own := programWith(debug.Module{Path: toolkitModule, Version: "v1.20.1"})
	tests := map[string]struct {
		hook, own *debug.BuildInfo
		err       string
	}{
		"the library's":          {hook: programOf(toolkitModule, "v1.20.1"), own: own},
		"older than the library": {hook: programOf(toolkitModule, "v1.17.0"), own: own, err: "has version v1.17.0, and the agent writes specifications for v1.20.1"},
		"newer than the library": {hook: programOf(toolkitModule, "v1.21.0"), own: own, err: "has version v1.21.0"},
		"another program":        {hook: programOf("example.com/true", "v1.20.1"), own: own, err: `it is of the module "example.com/true"`},
		"a library that is ours": {
			hook: programOf(toolkitModule, "v1.20.2"),
			own:  programWith(debug.Module{Path: toolkitModule, Version: "v1.20.1", Replace: &debug.Module{Version: "v1.20.2"}}),
		},
		"an agent that cannot tell": {hook: programOf(toolkitModule, "v1.20.1"), own: &debug.BuildInfo{}, err: "has version v1.20.1"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			hook, err := newHook("/image/hook", "/state", "/", tc.hook, tc.own)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) || !strings.Contains(err.Error(), "/image/hook") {
					t.Errorf("%v, want an error with %q that names the file", err, tc.err)
				}
				return
			}
			must(t, err)
			if want := "/state/bin/nvidia-cdi-hook-" + tc.hook.Main.Version; hook.Path() != want {
				t.Errorf("it is in %s, want %s", hook.Path(), want)
			}
		})
	}
}

// TestEverybodyCanRunTheInstalledHook, also in a user namespace, and what else is in the state folder stays as closed as it was.
func TestEverybodyCanRunTheInstalledHook(t *testing.T) {
	tests := map[string]struct {
		before string // what is in its place
		mode   fs.FileMode
		folder fs.FileMode // of the hook, 0 for none
		state  fs.FileMode
		want   fs.FileMode // of the state folder
	}{
		"a new node":              {state: 0o755, want: 0o755},
		"a closed state folder":   {state: 0o700, want: 0o701},
		"it is there":             {state: 0o711, want: 0o711, folder: 0o755, before: "program", mode: 0o755},
		"a closed folder":         {state: 0o750, want: 0o751, folder: 0o700, before: "program", mode: 0o755},
		"an open folder":          {state: 0o755, want: 0o755, folder: 0o777, before: "program", mode: 0o755},
		"half of it is there":     {state: 0o755, want: 0o755, folder: 0o755, before: "prog", mode: 0o755},
		"it cannot be executed":   {state: 0o755, want: 0o755, folder: 0o755, before: "program", mode: 0o644},
		"root alone can run it":   {state: 0o755, want: 0o755, folder: 0o755, before: "program", mode: 0o700},
		"everybody can change it": {state: 0o755, want: 0o755, folder: 0o755, before: "program", mode: 0o777},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			root := hostRoot(t)
			// Two agents, as during an upgrade.
			agents := []*Hook{hookBeside(t, root), hookBeside(t, root)}
			path := agents[0].Path()
			secrets := filepath.Join(root, "var/lib/stowage/claims")
			makeFolder(t, secrets, 0o700)
			must(t, os.WriteFile(filepath.Join(secrets, "one"), nil, 0o600))
			if tc.folder != 0 {
				makeFolder(t, filepath.Dir(path), tc.folder)
				must(t, os.WriteFile(path, []byte(tc.before), tc.mode))
				must(t, os.Chmod(path, tc.mode))
			}
			must(t, os.Chmod(filepath.Join(root, "var/lib/stowage"), tc.state))
			var group sync.WaitGroup
			for _, agent := range agents {
				group.Go(func() {
					if err := agent.Install(t.Context()); err != nil {
						t.Error(err)
					}
				})
			}
			group.Wait()
			if text, err := os.ReadFile(path); err != nil || string(text) != "program" {
				t.Errorf("installed: %q, %v", text, err)
			}
			for path, want := range map[string]fs.FileMode{
				path: 0o755, filepath.Dir(path): 0o755, filepath.Join(root, "var/lib/stowage"): tc.want,
				secrets: 0o700, filepath.Join(secrets, "one"): 0o600,
			} {
				if mode := modeOf(t, path); mode != want {
					t.Errorf("%s has mode %04o, want %04o", path, mode, want)
				}
			}
		})
	}
}

// TestAHookThatNotAllCanRunIsNotInstalled: what is in the way is named, and once it is gone the next try succeeds.
func TestAHookThatNotAllCanRunIsNotInstalled(t *testing.T) {
	tests := map[string]struct {
		damage, mend func(t *testing.T, root, path string)
		want         []string
	}{
		"a closed folder above": {
			damage: func(t *testing.T, root, _ string) { makeFolder(t, filepath.Join(root, "var/lib"), 0o750) },
			mend:   func(t *testing.T, root, _ string) { makeFolder(t, filepath.Join(root, "var/lib"), 0o751) },
			want:   []string{"/var/lib has mode 0750", "hostUsers: false", "chmod o+x"},
		},
		"a closed folder behind a link": {
			damage: func(t *testing.T, root, _ string) {
				makeFolder(t, filepath.Join(root, "var/lib"), 0o755)
				makeFolder(t, filepath.Join(root, "mnt/data/stowage"), 0o755)
				must(t, os.Chmod(filepath.Join(root, "mnt/data"), 0o700))
				must(t, os.Symlink("../../mnt/data/stowage", filepath.Join(root, "var/lib/stowage")))
			},
			mend: func(t *testing.T, root, _ string) { must(t, os.Chmod(filepath.Join(root, "mnt/data"), 0o711)) },
			want: []string{": /mnt/data has mode 0700"},
		},
		"a link in a closed folder": {
			damage: func(t *testing.T, root, _ string) {
				makeFolder(t, filepath.Join(root, "mnt/stowage"), 0o755)
				makeFolder(t, filepath.Join(root, "var/lib"), 0o700)
				must(t, os.Symlink("../../mnt/stowage", filepath.Join(root, "var/lib/stowage")))
			},
			mend: func(t *testing.T, root, _ string) { must(t, os.Chmod(filepath.Join(root, "var/lib"), 0o755)) },
			want: []string{"/var/lib has mode 0700"},
		},
		"a file in the folder's place": {
			damage: func(t *testing.T, root, _ string) {
				makeFolder(t, filepath.Join(root, "var/lib/stowage"), 0o755)
				must(t, os.WriteFile(filepath.Join(root, "var/lib/stowage/bin"), nil, 0o600))
			},
			mend: func(t *testing.T, root, _ string) { must(t, os.Remove(filepath.Join(root, "var/lib/stowage/bin"))) },
			want: []string{"var/lib/stowage/bin: not a directory"},
		},
		"a folder in the program's place": {
			damage: func(t *testing.T, _, path string) { makeFolder(t, filepath.Join(path, "full"), 0o755) },
			mend:   func(t *testing.T, _, path string) { must(t, os.RemoveAll(path)) },
			want:   []string{"file exists"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			root := hostRoot(t)
			hook := hookBeside(t, root)
			tc.damage(t, root, hook.Path())
			for range 2 {
				err := hook.Install(t.Context())
				for _, want := range append(tc.want, "install "+hook.Path()) {
					if err == nil || !strings.Contains(err.Error(), want) {
						t.Errorf("%v, want an error with %q", err, want)
					}
				}
			}
			tc.mend(t, root, hook.Path())
			must(t, hook.Install(t.Context()))
			if got := modeOf(t, hook.Path()); got != 0o755 {
				t.Errorf("it has mode %04o", got)
			}
		})
	}
}

// TestAnInstalledHookIsLookedAtEachTime: what becomes of it meanwhile is put right.
func TestAnInstalledHookIsLookedAtEachTime(t *testing.T) {
	hook := hookBeside(t, hostRoot(t))
	must(t, hook.Install(t.Context()))
	for name, damage := range map[string]func() error{
		"gone":        func() error { return os.Remove(hook.Path()) },
		"closed":      func() error { return os.Chmod(hook.Path(), 0o700) },
		"another one": func() error { return os.WriteFile(hook.Path(), []byte("some other program"), 0o755) },
	} {
		must(t, damage())
		must(t, hook.Install(t.Context()))
		if text, err := os.ReadFile(hook.Path()); err != nil || string(text) != "program" || modeOf(t, hook.Path()) != 0o755 {
			t.Errorf("%s: %q, %v, mode %04o", name, text, err, modeOf(t, hook.Path()))
		}
	}
	// It is not read each time: it has 11 MB.
	must(t, os.Remove(hook.source))
	if err := hook.Install(t.Context()); err != nil {
		t.Errorf("all is as it was: %v", err)
	}
}

// TestADiskThatHangsIsNotWaitedFor, and once it answers the program is there.
func TestADiskThatHangsIsNotWaitedFor(t *testing.T) {
	hook := hookBeside(t, hostRoot(t))
	must(t, os.Remove(hook.source))
	must(t, unix.Mkfifo(hook.source, 0o600)) // which is not opened before there is something to read
	hook.timeout = time.Millisecond
	for range 2 {
		if err := hook.Install(t.Context()); err == nil || !strings.Contains(err.Error(), "the folder has not answered yet: context deadline exceeded") {
			t.Errorf("%v, want an error that says so", err)
		}
	}
	hook.timeout = time.Minute
	written := make(chan error)
	go func() {
		written <- os.WriteFile(hook.source, []byte("program"), 0)
	}()
	err := hook.Install(t.Context())
	must(t, errors.Join(err, <-written))
	if text, err := os.ReadFile(hook.Path()); err != nil || string(text) != "program" {
		t.Errorf("installed: %q, %v", text, err)
	}
}

// TestAHookThatNotAllCanRunIsWarnedOf, if it is the host's own: pods that have no user namespace go on using it.
func TestAHookThatNotAllCanRunIsWarnedOf(t *testing.T) {
	for name, tc := range map[string]struct {
		folder, file fs.FileMode
		warns        string
	}{
		"all can":                {folder: 0o755, file: 0o755},
		"a closed folder":        {folder: 0o750, file: 0o755, warns: "/opt/toolkit has mode 0750"},
		"a program for its user": {folder: 0o755, file: 0o750, warns: "/opt/toolkit/hook has mode 0750"},
		"no program":             {folder: 0o750, file: 0o644}, // for which claims are refused
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			makeFolder(t, filepath.Join(root, "opt/toolkit"), 0o755)
			must(t, os.WriteFile(filepath.Join(root, "opt/toolkit/hook"), nil, 0o600))
			must(t, os.Chmod(filepath.Join(root, "opt/toolkit/hook"), tc.file))
			must(t, os.Chmod(filepath.Join(root, "opt/toolkit"), tc.folder))
			warning := HookWarning(root, "/opt/toolkit/hook")
			if (warning == "") != (tc.warns == "") || !strings.Contains(warning, tc.warns) {
				t.Errorf("warning %q, want one with %q", warning, tc.warns)
			}
			if HookWarning(root, "/opt/other") != "" {
				t.Error("there is a warning about no program")
			}
		})
	}
}

// TestAFileSystemWithoutProgramsIsSaid.
func TestAFileSystemWithoutProgramsIsSaid(t *testing.T) {
	root := hostRoot(t)
	state := filepath.Join(root, "var/lib/stowage")
	makeFolder(t, state, 0o755)
	if err := unix.Mount("test", state, "tmpfs", unix.MS_NOEXEC, "size=1m,mode=0755"); err != nil {
		t.Skip("nothing can be mounted here: ", err)
	}
	t.Cleanup(func() { must(t, unix.Unmount(state, unix.MNT_DETACH)) })
	if err := hookBeside(t, root).Install(t.Context()); err == nil || !strings.Contains(err.Error(), "it is mounted with noexec") {
		t.Errorf("%v, want an error that says so", err)
	}
}
