// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/agent/config"
)

// driverAt makes files of a driver below a root, which the host sees as /run/nvidia/driver.
func driverAt(t *testing.T, files ...string) DriverOptions {
	t.Helper()
	root := filepath.Join(t.TempDir(), "driver")
	for _, file := range files {
		path := filepath.Join(root, file)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		mode := os.FileMode(0o755)
		if strings.HasSuffix(file, ".so.1") {
			mode = 0o644
		}
		if err := os.WriteFile(path, []byte("#!/bin/sh\n"), mode); err != nil {
			t.Fatal(err)
		}
	}
	return DriverOptions{DriverRoot: root, HostDriverRoot: "/run/nvidia/driver", HostRoot: "/host", MPSRoot: "/run/stowage/mps"}
}

func TestProgramsOfADriverInAFolder(t *testing.T) {
	container := []string{"usr/bin/env", "usr/bin/nvidia-smi", "usr/bin/nvidia-cuda-mps-control", "usr/lib64/libcuda.so.1"}
	files := []string{"bin/nvidia-smi", "bin/nvidia-cuda-mps-control", "lib64/libcuda.so.1", "usr/lib64/libnvidia-ml.so.1"}
	const path = "PATH=/run/nvidia/driver/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	const libraries = "LD_LIBRARY_PATH=/run/nvidia/driver/lib64:/run/nvidia/driver/usr/lib64"
	tests := map[string]struct {
		files []string
		// child is how nvidia-smi is run, and root where; unit how systemd runs it.
		child, root, unit string
		refused           string
	}{
		"a root file system": {
			files: container,
			child: "/usr/bin/nvidia-smi -L", root: "DRIVER", unit: "chroot /run/nvidia/driver /usr/bin/nvidia-smi -L",
		},
		"the driver's files alone": {
			files: files,
			child: libraries + " " + path + " /run/nvidia/driver/bin/nvidia-smi -L", root: "/host", unit: "/run/nvidia/driver/bin/nvidia-smi -L",
		},
		"nothing":                {refused: "has no nvidia-smi"},
		"a file of no program":   {files: []string{"usr/bin/nvidia-smi.so.1"}, refused: "has no nvidia-smi"},
		"a folder of that name":  {files: []string{"bin/nvidia-smi/x"}, refused: "has no nvidia-smi"},
		"a program of the other": {files: []string{"usr/bin/nvidia-cuda-mps-control"}, refused: "usr/bin, usr/local/bin, bin"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			opts := driverAt(t, tc.files...)
			p, err := opts.find("nvidia-smi")
			if tc.refused != "" {
				if err == nil || !strings.Contains(err.Error(), tc.refused) || !strings.Contains(err.Error(), opts.DriverRoot) {
					t.Errorf("%+v, %v: want an error that says %q and where", p, err, tc.refused)
				}
				// What needs it says so, and names the GPU.
				if err := NewDriver(opts).TimeSlicer.SetTimeSlice(t.Context(), "GPU-1", config.IntervalLong); err == nil || !strings.Contains(err.Error(), tc.refused) || !strings.Contains(err.Error(), "GPU-1") {
					t.Errorf("setting a time slice: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			cmd := opts.command(t.Context(), p, "-L")
			got := []string{
				strings.Join(append(cmd.env, cmd.args...), " "), strings.Replace(cmd.root, opts.DriverRoot, "DRIVER", 1), strings.Join(p.line("-L"), " "),
			}
			if diff := cmp.Diff([]string{tc.child, tc.root, tc.unit}, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// TestADriverOfTheHostIsNotLookedFor: its programs are found by the host's PATH, in the root that the agent sees it in.
func TestADriverOfTheHostIsNotLookedFor(t *testing.T) {
	for _, opts := range []DriverOptions{{DriverRoot: "/", HostRoot: "/"}, {DriverRoot: "/host", HostDriverRoot: "/", HostRoot: "/"}} {
		p, err := opts.find("nvidia-smi")
		if err != nil {
			t.Fatal(err)
		}
		cmd := opts.command(t.Context(), p)
		if diff := cmp.Diff([]string{"nvidia-smi", opts.DriverRoot}, []string{strings.Join(cmd.args, " "), cmd.root}); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
}

// TestMPSDaemonOfADriverContainer: daemon and commands run in the driver's root, where the daemon's folders are shown to them.
func TestMPSDaemonOfADriverContainer(t *testing.T) {
	opts, calls := host(t)
	of := driverAt(t, "usr/bin/env", "usr/bin/nvidia-cuda-mps-control")
	opts.DriverRoot, opts.HostDriverRoot = of.DriverRoot, of.HostDriverRoot
	if err := NewDriver(opts).Daemons.Start(t.Context(), Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}, ActiveThreadPercentage: 50}); err != nil {
		t.Fatal(err)
	}
	const sees = " --property=BindPaths=DIR/mps/claim-1/shm:/run/nvidia/driver/dev/shm" +
		" --property=BindPaths=DIR/mps/claim-1/pipe:/run/nvidia/driverDIR/mps/claim-1/pipe" +
		" --property=BindPaths=DIR/mps/claim-1/log:/run/nvidia/driverDIR/mps/claim-1/log" +
		" --setenv=CUDA_MPS_PIPE_DIRECTORY=DIR/mps/claim-1/pipe"
	const program = " chroot /run/nvidia/driver /usr/bin/nvidia-cuda-mps-control"
	const tell = "systemd-run --quiet --collect --wait --pipe" + sees + program
	want := []string{
		"systemd-run --quiet --collect --unit=stowage-mps-claim-1.service --description=NVIDIA MPS control daemon of Stowage" + sandboxed(" CAP_SYS_CHROOT", "read-only") + sees +
			" --setenv=CUDA_VISIBLE_DEVICES=GPU-1 --setenv=CUDA_MPS_LOG_DIRECTORY=DIR/mps/claim-1/log" + program + " -f",
		tell, // not ready yet
		tell, "mps: get_server_list",
		tell, "mps: set_default_active_thread_percentage 50",
	}
	if diff := cmp.Diff(want, calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

// TestMPSDaemonOfADriverInAFolder runs on the host, with the driver's libraries.
func TestMPSDaemonOfADriverInAFolder(t *testing.T) {
	opts, calls := host(t)
	of := driverAt(t, "bin/nvidia-cuda-mps-control", "lib64/libcuda.so.1")
	opts.DriverRoot = of.DriverRoot // the host sees it there too
	program, err := os.ReadFile(filepath.Join(filepath.Dir(opts.MPSRoot), control))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(opts.DriverRoot, "bin", control), program, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := NewDriver(opts).Daemons.Start(t.Context(), Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}}); err != nil {
		t.Fatal(err)
	}
	environment := " --setenv=LD_LIBRARY_PATH=" + opts.DriverRoot + "/lib64 --setenv=PATH=" + opts.DriverRoot + "/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	want := []string{
		"systemd-run --quiet --collect --unit=stowage-mps-claim-1.service --description=NVIDIA MPS control daemon of Stowage" + sandboxed("", "read-only") +
			" --property=BindPaths=DIR/mps/claim-1/shm:/dev/shm" + environment + " --setenv=CUDA_MPS_PIPE_DIRECTORY=DIR/mps/claim-1/pipe" +
			" --setenv=CUDA_VISIBLE_DEVICES=GPU-1 --setenv=CUDA_MPS_LOG_DIRECTORY=DIR/mps/claim-1/log " + opts.DriverRoot + "/bin/nvidia-cuda-mps-control -f",
		"nvidia-cuda-mps-control ", // not ready yet
		"nvidia-cuda-mps-control ", "mps: get_server_list",
	}
	if diff := cmp.Diff(want, calls()); diff != "" {
		t.Errorf("calls (-want +got):\n%s", diff)
	}
}

// TestMPSWithoutItsProgramLeavesNothing: what is missing is said, and no folder made.
func TestMPSWithoutItsProgramLeavesNothing(t *testing.T) {
	opts, calls := host(t)
	opts.DriverRoot = driverAt(t, "usr/bin/env").DriverRoot
	err := NewDriver(opts).Daemons.Start(t.Context(), Daemon{Name: "claim-1", GPUs: []string{"GPU-1"}})
	if err == nil || !strings.Contains(err.Error(), "claim-1") || !strings.Contains(err.Error(), "has no nvidia-cuda-mps-control") {
		t.Errorf("error %v", err)
	}
	if got := calls(); len(got) != 1 || got[0] != "" {
		t.Errorf("calls %q", got)
	}
	if _, err := os.Stat(opts.MPSRoot); !os.IsNotExist(err) {
		t.Errorf("its folder: %v", err)
	}
}

// TestAProgramOfAnotherRootNeedsNothingElseThere: neither env nor a shell. It is found as the host's PATH says, links of that root followed there.
func TestAProgramOfAnotherRootNeedsNothingElseThere(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: chroot")
	}
	root := t.TempDir()
	for _, dir := range []string{"opt/driver", "usr/bin", "sbin"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	copyProgram(t, self, filepath.Join(root, "opt/driver/tool"), root)
	for link, to := range map[string]string{"usr/bin/nvidia-smi": "/opt/driver/tool", "sbin/nvidia-cuda-mps-control": "../usr/bin/nvidia-smi"} {
		if err := os.Symlink(to, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", "relative:/none:/usr/bin:/sbin")
	for _, name := range []string{"nvidia-smi", "nvidia-cuda-mps-control", "/opt/driver/tool"} {
		said, err := output(command{ctx: t.Context(), root: root, env: []string{asTool + "=" + name, "LD_LIBRARY_PATH=/lib"}, args: []string{name, "-L"}}, "in")
		// The race detector warns first that there is no /proc.
		if want := name + " says -L in"; err != nil || !strings.HasSuffix(said, want) {
			t.Errorf("%s: %q, %v; want %q at the end", name, said, err, want)
		}
	}
	for _, name := range []string{"systemctl", "/usr/bin/systemctl"} {
		_, err := output(command{ctx: t.Context(), root: root, args: []string{name, "is-active"}}, "")
		if !errors.Is(err, exec.ErrNotFound) || !strings.Contains(err.Error(), name+" is-active") || !strings.Contains(err.Error(), root) {
			t.Errorf("%s: %v; want it named, and where it is not", name, err)
		}
	}
}

// copyProgram copies a program into another root, with what it is linked to.
func copyProgram(t *testing.T, from, to, root string) {
	t.Helper()
	cp := func(from, to string) {
		data, err := os.ReadFile(from)
		if err == nil {
			err = errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, data, 0o755))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	cp(from, to)
	file, err := elf.Open(from)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, part := range file.Progs {
		if part.Type == elf.PT_INTERP {
			name, err := io.ReadAll(part.Open())
			if err != nil {
				t.Fatal(err)
			}
			loader := strings.TrimRight(string(name), "\x00")
			cp(loader, filepath.Join(root, loader))
		}
	}
	libraries, err := file.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	for _, library := range libraries {
		for _, dir := range []string{"/lib/*", "/lib64", "/usr/lib64", "/usr/lib/*"} {
			if found, _ := filepath.Glob(filepath.Join(dir, library)); len(found) > 0 {
				cp(found[0], filepath.Join(root, "lib", library))
				break
			}
		}
	}
}

// asTool has the test's program be another one, that says what it is told by its environment, its arguments and its input.
const asTool = "STOWAGE_TEST_TOOL"

func TestMain(m *testing.M) {
	beAnother()
	if name := os.Getenv(asTool); name != "" {
		input, _ := io.ReadAll(os.Stdin)
		fmt.Println(name, "says", strings.Join(os.Args[1:], " "), string(input))
		os.Exit(0)
	}
	os.Exit(m.Run())
}
