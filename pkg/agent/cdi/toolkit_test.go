package cdi_test

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	toolkit "github.com/NVIDIA/nvidia-container-toolkit/api/config/v1"

	"stowage.dev/stowage/pkg/agent/cdi"
)

// What is told is what the toolkit itself reads in the same file.
func TestWhetherTheEnvironmentGivesGPUs(t *testing.T) {
	const (
		gives   = "gives it GPUs without a claim"
		unknown = "is not known"
	)
	file := cdi.ToolkitConfig[1:]
	write := func(text string) func(t *testing.T, root string) {
		return func(t *testing.T, root string) { put(t, filepath.Join(root, file), text) }
	}
	for name, tc := range map[string]struct {
		host func(t *testing.T, root string)
		want string // in the text; empty if there is none
		own  bool   // the toolkit cannot be asked: it would wait, or look elsewhere
	}{
		"forbidden": {host: write("accept-nvidia-visible-devices-envvar-when-unprivileged = false\n")},
		"forbidden, among others": {host: write(`#accept-nvidia-visible-devices-envvar-when-unprivileged = true
accept-nvidia-visible-devices-envvar-when-unprivileged = false
disable-require = false
[nvidia-container-cli]
environment = []
ldconfig = "@/sbin/ldconfig"
[nvidia-container-runtime]
runtimes = ["runc", "crun"]
[nvidia-container-runtime.modes.csv]
mount-spec-path = "/etc/nvidia-container-runtime/host-files-for-container.d"
`)},
		"allowed":                  {host: write("accept-nvidia-visible-devices-envvar-when-unprivileged = true\n"), want: gives},
		"a comment":                {host: write("#accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"), want: gives},
		"in another table":         {host: write("[nvidia-container-cli]\naccept-nvidia-visible-devices-envvar-when-unprivileged = false\n"), want: gives},
		"an empty file":            {host: write(""), want: gives},
		"a text":                   {host: write("accept-nvidia-visible-devices-envvar-when-unprivileged = \"false\"\n"), want: unknown},
		"no TOML":                  {host: write("accept-nvidia-visible-devices-envvar-when-unprivileged: false\n"), want: unknown},
		"neither runtime nor file": {host: func(*testing.T, string) {}, own: true},
		"a runtime without a file": {host: func(t *testing.T, root string) { put(t, filepath.Join(root, "usr/bin/nvidia-container-runtime"), "") }, want: gives},
		"a file without an end":    {host: write(strings.Repeat("#\n", 1<<20)), want: unknown, own: true},
		"a folder": {host: func(t *testing.T, root string) {
			if err := os.MkdirAll(filepath.Join(root, file), 0o755); err != nil {
				t.Fatal(err)
			}
		}, want: unknown, own: true},
		"a pipe": {host: func(t *testing.T, root string) {
			write("")(t, root)
			path := filepath.Join(root, file)
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if err := syscall.Mkfifo(path, 0o644); err != nil {
				t.Fatal(err)
			}
		}, want: unknown, own: true},
		"a link that is absolute on the host": {host: func(t *testing.T, root string) {
			put(t, filepath.Join(root, "opt/toolkit.toml"), "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n")
			write("")(t, root)
			path := filepath.Join(root, file)
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink("/opt/toolkit.toml", path); err != nil {
				t.Fatal(err)
			}
		}, own: true},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			tc.host(t, root)
			got := cdi.GPUsByEnvironment(root, cdi.ToolkitConfig)
			if tc.want == "" && got != "" || !strings.Contains(got, tc.want) {
				t.Errorf("%q, want %q", got, tc.want)
			}
			if tc.own {
				return
			}
			t.Setenv(toolkit.FilePathOverrideEnvVar, filepath.Join(root, file))
			config, err := toolkit.GetConfig()
			if known := err == nil; known != (tc.want != unknown) {
				t.Fatalf("the toolkit: %v", err)
			} else if known && config.AcceptEnvvarUnprivileged != (tc.want == gives) {
				t.Errorf("the toolkit accepts it: %t", config.AcceptEnvvarUnprivileged)
			}
		})
	}
}

// put writes a file and its folders.
func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
