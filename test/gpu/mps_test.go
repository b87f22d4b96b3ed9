// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// checkMPSSandbox: a control daemon takes commands in the sandbox that systemd makes or, without it, the agent, and starts a server for a user.
func checkMPSSandbox(t *testing.T) {
	if _, err := exec.LookPath("nvidia-cuda-mps-control"); err != nil {
		t.Skip("not run: the driver has no MPS daemon")
	}
	if os.Geteuid() != 0 {
		t.Skip("not run: needs root")
	}
	handle, err := nvml.Open(nvml.SpecAuto, nvml.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := handle.Init(); err != nil {
		t.Fatal(err)
	}
	found, err := discovery.Discover(t.Context(), handle, handle.Sysfs)
	if err := handle.Shutdown(); err != nil {
		t.Error(err)
	}
	if err != nil || len(found.GPUs) == 0 {
		t.Fatalf("GPUs: %v, %v", found, err)
	}
	root, err := os.MkdirTemp("/run", "stowage-test-gpu")
	if err != nil {
		t.Fatal(err)
	}
	const name = "test-gpu"
	daemons := sharing.NewDriver(sharing.DriverOptions{DriverRoot: "/", HostRoot: "/", ProcRoot: "/proc", MPSRoot: root}).Daemons
	defer func() {
		if err := daemons.Stop(t.Context(), name); err != nil {
			t.Error(err)
		}
		if err := os.Remove(root); err != nil {
			t.Error(err)
		}
	}()
	if err := daemons.Start(t.Context(), sharing.Daemon{Name: name, GPUs: []string{found.GPUs[0].UUID}, ActiveThreadPercentage: 50}); err != nil {
		t.Fatal(err)
	}
	pid := daemonProcess(t, name)
	status, err := os.ReadFile(filepath.Join("/proc", pid, "status"))
	if err != nil || !strings.Contains(string(status), "NoNewPrivs:\t1\n") {
		t.Errorf("it may get new privileges: %v\n%s", err, status)
	}
	mounts, err := os.ReadFile(filepath.Join("/proc", pid, "mountinfo"))
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for line := range strings.Lines(string(mounts)) {
		if !strings.Contains(line, " stowage-mps ") {
			continue
		}
		seen++
		if !strings.Contains(line, "nosymfollow") {
			t.Errorf("links are followed there: %s", line)
		}
	}
	if seen < 2 {
		t.Errorf("its folder and /dev/shm are not among its mounts:\n%s", mounts)
	}
	pipe := "CUDA_MPS_PIPE_DIRECTORY=" + filepath.Join(root, name, "pipe")
	output(t, "start_server -uid 65534\n", "env", pipe, "nvidia-cuda-mps-control")
	if servers := strings.TrimSpace(output(t, "get_server_list\n", "env", pipe, "nvidia-cuda-mps-control")); servers == "" {
		t.Error("it has no server for a user that is not root")
	} else {
		t.Log("server ", servers)
	}
}

// daemonProcess is the control daemon of that name, by the table of processes.
func daemonProcess(t *testing.T, name string) (pid string) {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	tools := sharing.NewDriver(sharing.DriverOptions{DriverRoot: "/", HostRoot: "/", ProcRoot: "/proc"})
	for _, path := range lines {
		line, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(line), "nvidia-cuda-mps-control") {
			continue // it has ended, or is another
		}
		pid := filepath.Base(filepath.Dir(path))
		number, err := strconv.ParseUint(pid, 10, 32)
		if err != nil {
			t.Fatal(err)
		}
		if of, err := tools.Processes.DaemonOf(uint32(number)); err == nil && of == name {
			return pid
		}
	}
	t.Fatalf("no process is daemon %s", name)
	return ""
}

func output(t *testing.T, input string, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.WaitDelay = time.Second
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}
