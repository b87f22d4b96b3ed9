// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package librarytest builds the simulated libnvidia-ml.so.1 for tests, and makes machines for it to show.
package librarytest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/nvmlsim/install"
)

// Name of the library, as programs ask the dynamic loader for it.
const Name = "libnvidia-ml.so.1"

var (
	folder string // that Main made
	build  = sync.OnceValue(func() error {
		out, err := exec.Command("go", "build", "-buildvcs=false", "-buildmode=c-shared",
			"-ldflags=-extldflags=-Wl,-soname,"+Name, "-o", filepath.Join(folder, Name), "stowage.dev/stowage/cmd/nvmlsim-library").CombinedOutput()
		if err != nil {
			return fmt.Errorf("build the simulated NVML library: %w: %s", err, out)
		}
		return nil
	})
)

// Main runs the tests of a package that calls [Build], from its TestMain, and
// returns their exit code.
func Main(m *testing.M) int {
	var err error
	if folder, err = os.MkdirTemp("", "nvmlsim-library-"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(folder)
	return m.Run()
}

// Build returns the path of the library, which serves every kernel driver. It
// is built once in a process. It needs what building the agent needs: Go and a
// C compiler.
func Build(t testing.TB) string {
	t.Helper()
	if folder == "" {
		t.Fatal("TestMain does not call librarytest.Main")
	}
	if err := build(); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(folder, Name)
}

// Install puts the library of a driver version into a folder and returns its path.
func Install(t testing.TB, folder, version string) string {
	t.Helper()
	path := filepath.Join(folder, Name)
	if err := install.Library(Build(t), path, version); err != nil {
		t.Fatal(err)
	}
	return path
}

// Machine makes a machine of that profile and node in a folder of its own, and has the libraries of this process and of those that it
// starts see it.
func Machine(t testing.TB, p *nvmlsim.Profile, node string) (m *nvmlsim.Machine, folder string) {
	t.Helper()
	folder = filepath.Join(t.TempDir(), "sim") // OpenMachine makes it with its mode
	m, err := nvmlsim.OpenMachine(p, node, folder)
	if err != nil {
		t.Fatal(err)
	}
	t.Setenv("NVMLSIM_SOCKET", filepath.Join(folder, nvmlsim.ControlSocket))
	return m, folder
}

// Profile is the one of that name.
func Profile(t testing.TB, name string) *nvmlsim.Profile {
	t.Helper()
	p, err := nvmlsim.LoadProfile(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}
