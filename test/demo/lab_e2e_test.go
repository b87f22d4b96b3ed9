// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package main

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// screen is what a program has written to its terminal.
type screen struct {
	mutex sync.Mutex
	text  bytes.Buffer
	grown chan struct{}
}

func (s *screen) Write(p []byte) (int, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	n, err := s.text.Write(bytes.ReplaceAll(p, []byte("\r"), nil))
	select {
	case s.grown <- struct{}{}:
	default:
	}
	return n, err
}

// await waits until the screen has the text, and returns all that it has.
func (s *screen) await(t *testing.T, want string, exited <-chan struct{}) string {
	t.Helper()
	timeout := time.After(10 * time.Minute)
	for {
		s.mutex.Lock()
		text := s.text.String()
		s.mutex.Unlock()
		if strings.Contains(text, want) {
			return text
		}
		select {
		case <-s.grown:
		case <-exited:
			t.Fatalf("it has ended without %q:\n%s", want, text)
		case <-timeout:
			t.Fatalf("it does not write %q:\n%s", want, text)
		}
	}
}

// machineState is what a lab must leave as it was: mounts, network namespaces and interfaces.
func machineState(t *testing.T) map[string]string {
	t.Helper()
	state := map[string]string{}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if fields := strings.Fields(line); !strings.HasPrefix(fields[4], "/proc") {
			state["mount "+fields[4]] = fields[3]
		}
	}
	for _, pattern := range []string{"/run/netns/*", "/var/run/netns/*", "/sys/class/net/*"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			state[name] = ""
		}
	}
	return state
}

// make lab on a terminal: it says where everything is, doctor finds no error, the way into the node leads into it, a program that dies is
// told of with its log, and Ctrl-C ends it with status 0 and leaves nothing.
func TestTheLab(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("a real node needs root")
	}
	before := machineState(t)
	primary, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer primary.Close()
	number, err := unix.IoctlGetInt(int(primary.Fd()), unix.TIOCGPTN)
	if err := errors.Join(err, unix.IoctlSetPointerInt(int(primary.Fd()), unix.TIOCSPTLCK, 0)); err != nil {
		t.Fatal(err)
	}
	secondary, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	lab := exec.CommandContext(t.Context(), "make", "-C", "../..", "lab", "LAB=-nodes h100,l40s -examples one-gpu,unsatisfiable")
	lab.Stdin, lab.Stdout, lab.Stderr = secondary, secondary, secondary
	lab.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	lab.Cancel = func() error { return lab.Process.Signal(syscall.SIGTERM) }
	if err := errors.Join(lab.Start(), secondary.Close()); err != nil {
		t.Fatal(err)
	}
	s, exited := &screen{grown: make(chan struct{}, 1)}, make(chan struct{})
	go func() { // reading ends with EIO when the last program on the terminal has ended
		buffer := make([]byte, 4096)
		for {
			n, err := primary.Read(buffer)
			_, _ = s.Write(buffer[:n])
			if err != nil {
				return
			}
		}
	}()
	go func() { _ = lab.Wait(); close(exited) }()

	text := s.await(t, "gpu lose 0\n", exited)
	find := func(pattern string) string {
		t.Helper()
		match := regexp.MustCompile(pattern).FindStringSubmatch(text)
		if match == nil {
			t.Fatalf("no %s in:\n%s", pattern, text)
		}
		return match[1]
	}
	kubeconfig, logs := find(`export KUBECONFIG=(\S+)`), find(`(?m)^logs +(\S+)$`)
	if !strings.Contains(text, "demo/one-gpu") {
		t.Errorf("the table of GPUs does not show the pod:\n%s", text)
	}
	for _, path := range []string{kubeconfig, logs, find(`simulator +(\S+)`), find(`agent's state +(\S+)`), find(`agent's log +(\S+)`)} {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("it names %s: %v", path, err)
		}
	}
	page, err := http.Get(find(`(?m)^map +(http://[^#]+)#token=\S+$`))
	if err != nil {
		t.Fatalf("the map: %v", err)
	}
	if page.Body.Close(); page.StatusCode != http.StatusOK {
		t.Errorf("the map answers %s", page.Status)
	}
	report, err := exec.CommandContext(t.Context(), "../../bin/kubectl-stowage", "--kubeconfig", kubeconfig, "doctor").Output()
	if len(report) == 0 || strings.Contains(string(report), "Error: ") { // of warnings the host may have some
		t.Errorf("doctor: %v, it finds:\n%s", err, report)
	}
	enter := strings.Fields(find(`enter it +(.+)`))
	if out, err := exec.CommandContext(t.Context(), enter[0], append(enter[1:], "-c", "ls /var/lib/kubelet/plugins")...).CombinedOutput(); err != nil ||
		!strings.Contains(string(out), "gpu.nvidia.com") {
		t.Errorf("the way into the node: %v, %s", err, out)
	}
	for _, node := range []string{"h100", "l40s"} {
		pid, err := strconv.Atoi(find(`node ` + node + ` +agent +PID (\d+)`))
		if err != nil {
			t.Fatal(err)
		}
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		s.await(t, filepath.Join(logs, node+"-agent.log")+" ends with", exited)
	}

	if _, err := primary.Write([]byte{3}); err != nil { // Ctrl-C
		t.Fatal(err)
	}
	select {
	case <-exited:
	case <-time.After(5 * time.Minute):
		t.Fatal("Ctrl-C does not end it")
	}
	if code := lab.ProcessState.ExitCode(); code != 0 {
		t.Errorf("it ends with %s:\n%s", lab.ProcessState, s.text.String())
	}
	dir := filepath.Dir(logs)
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its folder is left: %v", err)
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range commands {
		if command, err := os.ReadFile(file); err == nil && bytes.Contains(command, []byte(dir)) {
			t.Errorf("a process is left: %s: %q", file, command)
		}
	}
	if diff := cmp.Diff(before, machineState(t)); diff != "" {
		t.Errorf("the machine (-before +after):\n%s", diff)
	}
}
