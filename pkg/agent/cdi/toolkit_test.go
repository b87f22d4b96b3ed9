// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"cmp"
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
	const (
		file     = "etc/nvidia-container-runtime/config.toml"
		operator = "usr/local/nvidia/toolkit"
	)
	write := func(text string) func(t *testing.T, root string) {
		return func(t *testing.T, root string) { put(t, filepath.Join(root, file), text) }
	}
	for name, tc := range map[string]struct {
		host func(t *testing.T, root string)
		file string // that is given; empty for none
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
		"allowed":                             {host: write("accept-nvidia-visible-devices-envvar-when-unprivileged = true\n"), want: gives},
		"a comment":                           {host: write("#accept-nvidia-visible-devices-envvar-when-unprivileged = false\n"), want: gives},
		"in another table":                    {host: write("[nvidia-container-cli]\naccept-nvidia-visible-devices-envvar-when-unprivileged = false\n"), want: gives},
		"an empty file":                       {host: write(""), want: gives},
		"a text":                              {host: write("accept-nvidia-visible-devices-envvar-when-unprivileged = \"false\"\n"), want: unknown},
		"no TOML":                             {host: write("accept-nvidia-visible-devices-envvar-when-unprivileged: false\n"), want: unknown},
		"neither runtime nor file":            {host: func(*testing.T, string) {}, own: true},
		"a runtime without a file":            {host: func(t *testing.T, root string) { put(t, filepath.Join(root, "usr/bin/nvidia-container-runtime"), "") }, want: gives},
		"a file that is given":                {file: "/opt/x.toml", host: func(t *testing.T, root string) { put(t, filepath.Join(root, "opt/x.toml"), "") }, want: "/opt/x.toml", own: true},
		"a file that is given and missing":    {file: "/opt/x.toml", host: func(*testing.T, string) {}, want: "/opt/x.toml cannot be read: no such file", own: true},
		"the usual file is given and missing": {file: "/" + file, host: func(*testing.T, string) {}, want: unknown, own: true},
		"the GPU operator's toolkit forbids it": {host: func(t *testing.T, root string) {
			put(t, filepath.Join(root, operator, "nvidia-container-runtime"), "")
			put(t, filepath.Join(root, operator, ".config/nvidia-container-runtime/config.toml"), "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n")
		}, own: true},
		"the GPU operator's toolkit allows it, the distribution's forbids it": {host: func(t *testing.T, root string) {
			put(t, filepath.Join(root, operator, ".config/nvidia-container-runtime/config.toml"), "")
			write("accept-nvidia-visible-devices-envvar-when-unprivileged = false\n")(t, root)
		}, want: "in the host's /" + operator + "/.config/nvidia-container-runtime/config.toml", own: true},
		"the GPU operator's toolkit forbids it, the distribution's allows it": {host: func(t *testing.T, root string) {
			put(t, filepath.Join(root, operator, ".config/nvidia-container-runtime/config.toml"), "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n")
			write("")(t, root)
		}, want: "in the host's /" + file, own: true},
		"the GPU operator's toolkit without a file": {host: func(t *testing.T, root string) {
			put(t, filepath.Join(root, operator, "nvidia-container-runtime"), "")
		}, want: gives, own: true},
		"a file without an end": {host: write(strings.Repeat("#\n", 1<<20)), want: unknown, own: true},
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
			got := cdi.GPUsByEnvironment(root, cmp.Or(tc.file, cdi.AutoToolkitConfig))
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
