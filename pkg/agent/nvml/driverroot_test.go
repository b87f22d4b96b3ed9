// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"stowage.dev/stowage/pkg/nvmlsim/librarytest"
)

// driverAt puts a library of a version below a root, as packages do: a file with the version in its name, and a link.
func driverAt(t *testing.T, root, folder, version string) {
	t.Helper()
	file := writeFile(t, root, filepath.Join(folder, "libnvidia-ml.so."+version), "of version "+version)
	if err := os.Symlink(filepath.Base(file), filepath.Join(filepath.Dir(file), libraryName)); err != nil {
		t.Fatal(err)
	}
}

func TestTheDriverRootIsFound(t *testing.T) {
	const (
		container = "run/nvidia/driver/usr/lib/x86_64-linux-gnu"
		gke       = "home/kubernetes/bin/nvidia/lib64"
		host      = "usr/lib64"
		open      = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
		closed    = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.172.08  Tue Jul 8 18:24:40 UTC 2025\n"
	)
	tests := map[string]struct {
		drivers map[string]string // version by folder
		loaded  string
		want    string
		found   bool
	}{
		"no driver yet":                      {want: "/"},
		"on the host":                        {drivers: map[string]string{host: "570.172.08"}, want: "/", found: true},
		"a driver container":                 {drivers: map[string]string{container: "570.172.08"}, want: "/run/nvidia/driver", found: true},
		"GKE's installer":                    {drivers: map[string]string{gke: "570.172.08"}, want: "/home/kubernetes/bin/nvidia", found: true},
		"two, and none is loaded":            {drivers: map[string]string{host: "570.172.08", container: "580.65.06"}, want: "/", found: true},
		"two, and the container's is loaded": {drivers: map[string]string{host: "570.172.08", container: "580.65.06"}, loaded: open, want: "/run/nvidia/driver", found: true},
		"two, and the host's is loaded":      {drivers: map[string]string{host: "570.172.08", container: "580.65.06"}, loaded: closed, want: "/", found: true},
		"two, and another one is loaded":     {drivers: map[string]string{container: "580.65.06", gke: "535.1.1"}, loaded: closed, want: "/run/nvidia/driver", found: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			root, proc := t.TempDir(), t.TempDir()
			for folder, version := range tc.drivers {
				driverAt(t, root, folder, version)
			}
			if tc.loaded != "" {
				writeFile(t, proc, "driver/nvidia/version", tc.loaded)
			}
			if got, found := FindDriverRoot(root, proc); got != tc.want || found != tc.found {
				t.Errorf("%s, %t; want %s, %t", got, found, tc.want, tc.found)
			}
		})
	}
}

func TestALibraryThatIsBeingInstalledIsNotLoaded(t *testing.T) {
	whole, err := os.ReadFile(librarytest.Build(t))
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ content, says string }{
		"nothing yet":     {"", "EOF"},
		"no library":      {strings.Repeat("#", 4096), "bad magic"},
		"its headers":     {string(whole[:4096]), "is not whole"},
		"its first half":  {string(whole[:len(whole)/2]), "is not whole"},
		"all but its end": {string(whole[:len(whole)-64]), "is not whole"},
		"the whole":       {string(whole), ""},
	} {
		t.Run(name, func(t *testing.T) {
			path := writeFile(t, t.TempDir(), libraryName, tc.content)
			err := CheckLibrary(path)
			if (err == nil) != (tc.says == "") || err != nil && (!strings.Contains(err.Error(), tc.says) || !strings.Contains(err.Error(), path)) {
				t.Errorf("%v, want an error with %q and the path", err, tc.says)
			}
			if tc.says == "" {
				return
			}
			h, err := Open(path, OpenOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if err := h.Init(); !errors.Is(err, ErrLibraryNotFound) || !strings.Contains(err.Error(), tc.says) {
				t.Errorf("loaded: %v, want %v", err, ErrLibraryNotFound)
			}
		})
	}
}
