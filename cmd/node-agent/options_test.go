package main

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// TestDaemonsAreInTheSandboxUnlessAnAdministratorSaysSo: the other flags for them have no say in it.
func TestDaemonsAreInTheSandboxUnlessAnAdministratorSaysSo(t *testing.T) {
	for name, tc := range map[string]struct {
		args       []string
		unconfined bool
	}{
		"nothing said": {},
		"other flags":  {args: []string{"--mps-root=/run/mps", "--mps-shm-size=1Gi"}},
		"as it is":     {args: []string{"--mps-sandbox"}},
		"without":      {args: []string{"--mps-sandbox=false"}, unconfined: true},
	} {
		t.Run(name, func(t *testing.T) {
			opts := defaultOptions(func(string) (string, bool) { return "", false }, func() (string, error) { return "node-1", nil })
			flags := pflag.NewFlagSet("run", pflag.ContinueOnError)
			opts.addRunFlags(flags)
			if err := flags.Parse(tc.args); err != nil {
				t.Fatal(err)
			}
			daemons, err := opts.daemons()
			if err != nil || daemons.Unconfined != tc.unconfined {
				t.Errorf("unconfined %t, %v; want %t", daemons.Unconfined, err, tc.unconfined)
			}
		})
	}
}

// TestTheHooksFlagsSayWhoseItIs: one of the host's is warned of if root alone can run it, and nothing is brought along then.
func TestTheHooksFlagsSayWhoseItIs(t *testing.T) {
	root := t.TempDir()
	for folder, mode := range map[string]os.FileMode{"open": 0o755, "closed": 0o700} {
		path := filepath.Join(root, folder)
		if err := errors.Join(os.Mkdir(path, 0o755), os.WriteFile(filepath.Join(path, "hook"), nil, 0o755), os.Chmod(path, mode)); err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		hook       hookOptions
		err, warns string // nothing if it is empty
	}{
		"nvcdi's default":       {},
		"the host's":            {hook: hookOptions{path: "/open/hook"}},
		"the host's for root":   {hook: hookOptions{path: "/closed/hook"}, warns: "--nvidia-cdi-hook: a pod with hostUsers: false cannot run /closed/hook"},
		"the host's before any": {hook: hookOptions{path: "/open/hook", from: "/missing/hook"}},
		"one that is missing":   {hook: hookOptions{from: "/missing/hook"}, err: "--nvidia-cdi-hook-from: nvidia-cdi-hook: could not read Go build info: open /missing/hook"},
	} {
		t.Run(name, func(t *testing.T) {
			opts := &options{hook: tc.hook, hostRoot: root, stateDir: "/state", kubeletRoot: "/kubelet"}
			hook, err := opts.installedHook()
			if hook != nil || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("installed: %v, %v, want an error with %q", hook, err, tc.err)
			}
			if warning := opts.hostWarning(hook); (warning == "") != (tc.warns == "") || !strings.Contains(warning, tc.warns) {
				t.Errorf("warning %q, want one with %q", warning, tc.warns)
			}
		})
	}
}
