// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

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

func must(t testing.TB, err error) {
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
	hook, err := newHook(source, filepath.Join(root, "var/lib/stowage"), filepath.Join(root, "var/lib/kubelet/plugins/gpu.nvidia.com"), root,
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
			hook, err := newHook("/image/hook", "/state", "/plugins/gpu", "/", tc.hook, tc.own)
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) || !strings.Contains(err.Error(), "/image/hook") {
					t.Errorf("%v, want an error with %q that names the file", err, tc.err)
				}
				return
			}
			must(t, err)
			name := "nvidia-cdi-hook-" + tc.hook.Main.Version
			if hook.inState.path != "/state/bin/"+name || hook.inPlugin.path != "/plugins/gpu/"+name {
				t.Errorf("it is in %s or %s, want %s in both folders", hook.inState.path, hook.inPlugin.path, name)
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
			path := agents[0].inState.path
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
					if got, err := agent.Install(t.Context()); err != nil || got != path || agent.Warning() != "" {
						t.Errorf("installed as %q, %v, want %s; warning %q", got, err, path, agent.Warning())
					}
				})
			}
			group.Wait()
			if _, err := os.Stat(filepath.Join(root, "var/lib/kubelet")); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("there is something in the kubelet's root: %v", err)
			}
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

// mountOn mounts a tmpfs on a folder that it makes, until the test's end or umount.
func mountOn(t *testing.T, path string, flags uintptr, options string) (umount func()) {
	t.Helper()
	makeFolder(t, path, 0o755)
	if err := unix.Mount("test", path, "tmpfs", flags, options+",mode=0755"); err != nil {
		t.Skip("nothing can be mounted here: ", err)
	}
	umount = sync.OnceFunc(func() { must(t, unix.Unmount(path, unix.MNT_DETACH)) })
	t.Cleanup(umount)
	return umount
}

// stateBehindLink makes the state folder a link to one in mnt/data.
func stateBehindLink(t *testing.T, root string) {
	t.Helper()
	makeFolder(t, filepath.Join(root, "var/lib"), 0o755)
	makeFolder(t, filepath.Join(root, "mnt/data/stowage"), 0o755)
	must(t, os.Symlink("../../mnt/data/stowage", filepath.Join(root, "var/lib/stowage")))
}

// TestAHookThatNotAllCanRunIsForPodsWithoutAUserNamespace: it is in the plugin's folder, or where it can be run at all, and the others are warned of. Once
// nothing is in the way it is for everybody.
func TestAHookThatNotAllCanRunIsForPodsWithoutAUserNamespace(t *testing.T) {
	tests := map[string]struct {
		// damage makes the state folder no place for everybody, and returns what mends it.
		damage  func(t *testing.T, root string) (mend func())
		inState bool     // is where it is all the same
		warns   []string // of nothing if it is empty
	}{
		"a closed folder above": {
			damage: func(t *testing.T, root string) func() {
				makeFolder(t, filepath.Join(root, "var/lib"), 0o750)
				return func() { makeFolder(t, filepath.Join(root, "var/lib"), 0o751) }
			},
			inState: true, warns: []string{"/var/lib has mode 0750", "chmod o+x"},
		},
		"a closed folder behind a link": {
			damage: func(t *testing.T, root string) func() {
				stateBehindLink(t, root)
				must(t, os.Chmod(filepath.Join(root, "mnt/data"), 0o700))
				return func() { must(t, os.Chmod(filepath.Join(root, "mnt/data"), 0o711)) }
			},
			inState: true, warns: []string{": /mnt/data has mode 0700"},
		},
		"a link in a closed folder": {
			damage: func(t *testing.T, root string) func() {
				stateBehindLink(t, root)
				must(t, os.Chmod(filepath.Join(root, "var/lib"), 0o700))
				return func() { must(t, os.Chmod(filepath.Join(root, "var/lib"), 0o755)) }
			},
			inState: true, warns: []string{"/var/lib has mode 0700"},
		},
		"a state folder without programs": {
			damage: func(t *testing.T, root string) func() {
				return mountOn(t, filepath.Join(root, "var/lib/stowage"), unix.MS_NOEXEC, "size=1m")
			},
			warns: []string{"it is mounted with noexec"},
		},
		"a state folder without programs, and everybody can pass to the plugin's": {
			damage: func(t *testing.T, root string) func() {
				makeFolder(t, filepath.Join(root, "var/lib/kubelet/plugins/gpu.nvidia.com"), 0o755)
				return mountOn(t, filepath.Join(root, "var/lib/stowage"), unix.MS_NOEXEC, "size=1m")
			},
		},
		"a closed folder above, and no programs in the plugin's": {
			damage: func(t *testing.T, root string) func() {
				mountOn(t, filepath.Join(root, "var/lib/kubelet"), unix.MS_NOEXEC, "size=1m")
				makeFolder(t, filepath.Join(root, "var/lib"), 0o700)
				return func() { makeFolder(t, filepath.Join(root, "var/lib"), 0o711) }
			},
			inState: true, warns: []string{"/var/lib has mode 0700"},
		},
		"a closed folder above, and no room for the plugin's": {
			damage: func(t *testing.T, root string) func() {
				makeFolder(t, filepath.Join(root, "var/lib"), 0o700)
				must(t, os.WriteFile(filepath.Join(root, "var/lib/kubelet"), nil, 0o600))
				return func() { makeFolder(t, filepath.Join(root, "var/lib"), 0o711) }
			},
			inState: true, warns: []string{"/var/lib has mode 0700"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			root := hostRoot(t)
			hook := hookBeside(t, root)
			mend := tc.damage(t, root)
			used := hook.inPlugin.path
			if tc.inState {
				used = hook.inState.path
			}
			for range 2 {
				path, err := hook.Install(t.Context())
				if text, _ := os.ReadFile(used); err != nil || path != used || string(text) != "program" || modeOf(t, used) != 0o755 {
					t.Fatalf("installed as %q with %q, %v, want %s", path, text, err, used)
				}
				warning := hook.Warning()
				if (warning == "") != (tc.warns == nil) {
					t.Errorf("warning %q, want one: %t", warning, tc.warns != nil)
				}
				for _, want := range tc.warns {
					if !strings.HasPrefix(warning, "pods with hostUsers: false that have a GPU do not start: --state-dir: ") || !strings.Contains(warning, want) {
						t.Errorf("warning %q, want one with %q", warning, want)
					}
				}
			}
			mend()
			path, err := hook.Install(t.Context())
			if err != nil || path != hook.inState.path || hook.Warning() != "" {
				t.Errorf("afterwards: installed as %q, %v, want %s; warning %q", path, err, hook.inState.path, hook.Warning())
			}
		})
	}
}

// TestAHookThatNobodyCanRunIsNotInstalled: what is in the way is named, and once it is gone the next try succeeds.
func TestAHookThatNobodyCanRunIsNotInstalled(t *testing.T) {
	tests := map[string]struct {
		damage func(t *testing.T, root, path string) (mend func())
		want   []string
	}{
		"a file in the folder's place": {
			damage: func(t *testing.T, root, _ string) func() {
				makeFolder(t, filepath.Join(root, "var/lib/stowage"), 0o755)
				must(t, os.WriteFile(filepath.Join(root, "var/lib/stowage/bin"), nil, 0o600))
				return func() { must(t, os.Remove(filepath.Join(root, "var/lib/stowage/bin"))) }
			},
			want: []string{"var/lib/stowage/bin: not a directory"},
		},
		"a folder in the program's place": {
			damage: func(t *testing.T, _, path string) func() {
				makeFolder(t, filepath.Join(path, "full"), 0o755)
				return func() { must(t, os.RemoveAll(path)) }
			},
			want: []string{"file exists"},
		},
		"a state folder that is full": {
			damage: func(t *testing.T, root, _ string) func() {
				return mountOn(t, filepath.Join(root, "var/lib/stowage"), 0, "nr_inodes=1")
			},
			want: []string{"no space left on device"},
		},
		"no programs in either place": {
			damage: func(t *testing.T, root, _ string) func() {
				mountOn(t, filepath.Join(root, "var/lib/kubelet"), unix.MS_NOEXEC, "size=1m")
				return mountOn(t, filepath.Join(root, "var/lib/stowage"), unix.MS_NOEXEC, "size=1m")
			},
			want: []string{
				"the file system of ", "/stowage/bin/nvidia-cdi-hook-v1.20.1: it is mounted with noexec; instead of it ",
				"/gpu.nvidia.com/nvidia-cdi-hook-v1.20.1: it is mounted with noexec",
			},
		},
		"no programs in the state folder, and the plugin's is full": {
			damage: func(t *testing.T, root, _ string) func() {
				mountOn(t, filepath.Join(root, "var/lib/kubelet/plugins/gpu.nvidia.com"), 0, "nr_inodes=1")
				return mountOn(t, filepath.Join(root, "var/lib/stowage"), unix.MS_NOEXEC, "size=1m")
			},
			want: []string{"it is mounted with noexec", "no space left on device"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			root := hostRoot(t)
			hook := hookBeside(t, root)
			mend := tc.damage(t, root, hook.inState.path)
			for range 2 {
				path, err := hook.Install(t.Context())
				for _, want := range append(tc.want, "install "+hook.inState.path) {
					if err == nil || !strings.Contains(err.Error(), want) || path != "" {
						t.Errorf("%q, %v, want an error with %q", path, err, want)
					}
				}
			}
			mend()
			path, err := hook.Install(t.Context())
			must(t, err)
			if got := modeOf(t, hook.inState.path); got != 0o755 || path != hook.inState.path {
				t.Errorf("afterwards it is in %s and has mode %04o", path, got)
			}
		})
	}
}

// TestAProgramThatIsReplacedMeanwhileCanBeRun, as by the other agent of the node during an upgrade.
func TestAProgramThatIsReplacedMeanwhileCanBeRun(t *testing.T) {
	root := t.TempDir()
	path := filepath.Join(root, "hook")
	replace := func() {
		must(t, os.WriteFile(path+".new", nil, 0o755))
		must(t, os.Rename(path+".new", path))
	}
	replace()
	stop := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				replace()
			}
		}
	})
	for range 2000 {
		if err := host(root).programForAll("/hook"); err != nil {
			t.Error(err)
			break
		}
	}
	close(stop)
	group.Wait()
}

// TestAnInstalledHookIsLookedAtEachTime: what becomes of it meanwhile is put right.
func TestAnInstalledHookIsLookedAtEachTime(t *testing.T) {
	hook := hookBeside(t, hostRoot(t))
	install := func() error {
		_, err := hook.Install(t.Context())
		return err
	}
	path := hook.inState.path
	must(t, install())
	for name, damage := range map[string]func() error{
		"gone":        func() error { return os.Remove(path) },
		"closed":      func() error { return os.Chmod(path, 0o700) },
		"another one": func() error { return os.WriteFile(path, []byte("some other program"), 0o755) },
	} {
		must(t, damage())
		must(t, install())
		if text, err := os.ReadFile(path); err != nil || string(text) != "program" || modeOf(t, path) != 0o755 {
			t.Errorf("%s: %q, %v, mode %04o", name, text, err, modeOf(t, path))
		}
	}
	// It is not read each time: it has 11 MB.
	must(t, os.Remove(hook.source))
	if err := install(); err != nil {
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
		if _, err := hook.Install(t.Context()); err == nil || !strings.Contains(err.Error(), "the folder has not answered yet: context deadline exceeded") {
			t.Errorf("%v, want an error that says so", err)
		}
	}
	hook.timeout = time.Minute
	written := make(chan error)
	go func() {
		written <- os.WriteFile(hook.source, []byte("program"), 0)
	}()
	path, err := hook.Install(t.Context())
	must(t, errors.Join(err, <-written))
	if text, err := os.ReadFile(path); err != nil || string(text) != "program" {
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
