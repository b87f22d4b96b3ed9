// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"debug/buildinfo"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestTheImageHasTheHookOfItsLibrary runs the line of the Dockerfile by which nvidia-cdi-hook comes into the image: the program needs no library of a
// host, and knows what specifications name.
func TestTheImageHasTheHookOfItsLibrary(t *testing.T) {
	if testing.Short() {
		t.Skip("builds a program: run without -short")
	}
	dockerfile, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`(?m)^RUN (CGO_ENABLED=1 GOBIN=/out go install (?:.*\\\n)*.*)$`).FindStringSubmatch(string(dockerfile))
	if line == nil {
		t.Fatal("the Dockerfile has no such line")
	}
	out := t.TempDir()
	build := exec.CommandContext(t.Context(), "sh", "-c", strings.Replace(line[1], "GOBIN=/out", "GOBIN="+out, 1))
	build.Dir, build.Env = root, append(os.Environ(), "CGO_CFLAGS=-Wno-deprecated-declarations")
	if said, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	hook := filepath.Join(out, "nvidia-cdi-hook")
	info, err := buildinfo.ReadFile(hook)
	if err != nil {
		t.Fatal(err)
	}
	list := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Path}} {{.Version}}", "github.com/NVIDIA/nvidia-container-toolkit")
	list.Dir = root
	want, err := list.Output()
	if got := info.Main.Path + " " + info.Main.Version; err != nil || got != strings.TrimSpace(string(want)) {
		t.Errorf("it is of %s, and the agent's library is %s, %v", got, want, err)
	}
	help, err := exec.CommandContext(t.Context(), hook, "--help").CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, help)
	}
	for _, hook := range []string{"update-ldcache", "create-symlinks", "enable-cuda-compat", "disable-device-node-modification", "update-application-profile"} {
		if !strings.Contains(string(help), hook) {
			t.Errorf("it does not know %s:\n%s", hook, help)
		}
	}
	// A program with an interpreter needs the C library of where it was built.
	if said, err := exec.CommandContext(t.Context(), "readelf", "--program-headers", hook).CombinedOutput(); err != nil || strings.Contains(string(said), "INTERP") {
		t.Errorf("%v: the program is not linked statically:\n%s", err, said)
	}
}
