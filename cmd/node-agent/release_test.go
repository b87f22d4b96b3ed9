// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"stowage.dev/stowage/pkg/agent/stepaside"
	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/nvmlsim/librarytest"
)

// asAgent, in the environment, makes this program the agent.
const asAgent = "STOWAGE_TEST_AS_AGENT"

// upgradedHost is a host with the C library of a driver, without an API server.
type upgradedHost struct {
	*testing.T
	machine *nvmlsim.Machine
	library string
	flags   []string
	state   string
}

func newUpgradedHost(t *testing.T) *upgradedHost {
	t.Helper()
	root, err := os.MkdirTemp("", "host-") // sockets lie in it: their paths must be short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	h := &upgradedHost{T: t, state: filepath.Join(root, "state")}
	h.machine, _ = librarytest.Machine(t, librarytest.Profile(t, "hgx-b200"), "node-1")
	libraries := filepath.Join(root, "usr", "lib64")
	for _, folder := range []string{libraries, filepath.Join(root, "kubelet", "plugins"), filepath.Join(root, "kubelet", "plugins_registry")} {
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	h.library = librarytest.Install(t, libraries, h.machine.DriverVersion())
	kubeconfig := filepath.Join(root, "kubeconfig")
	const away = "apiVersion: v1\nkind: Config\ncurrent-context: c\ncontexts: [{name: c, context: {cluster: c, user: u}}]\n" +
		"clusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\nusers: [{name: u, user: {token: t}}]\n"
	if err := os.WriteFile(kubeconfig, []byte(away), 0o600); err != nil {
		t.Fatal(err)
	}
	h.flags = []string{
		"--kubeconfig=" + kubeconfig, "--node-name=node-1", "--driver-root=" + root, "--kubelet-root-dir=" + filepath.Join(root, "kubelet"),
		"--state-dir=" + h.state, "--cdi-root=" + filepath.Join(root, "cdi"), "--health-address=", "--toolkit-config=",
	}
	t.Setenv(asAgent, "true")
	return h
}

func (h *upgradedHost) happens(commands ...nvmlsim.Command) {
	h.Helper()
	for _, c := range commands {
		if _, err := h.machine.Do(c); err != nil {
			h.Fatal(err)
		}
	}
}

// runningAgent is a process.
type runningAgent struct {
	h       *upgradedHost
	process *exec.Cmd
	lines   chan string
	log     bytes.Buffer
}

func (h *upgradedHost) startAgent() *runningAgent {
	h.Helper()
	a := &runningAgent{h: h, process: exec.Command(os.Args[0], h.flags...), lines: make(chan string, 1000)}
	out, err := a.process.StderrPipe()
	if err == nil {
		err = a.process.Start()
	}
	if err != nil {
		h.Fatal(err)
	}
	go func() {
		defer close(a.lines)
		for scanner := bufio.NewScanner(out); scanner.Scan(); {
			a.lines <- scanner.Text()
		}
	}()
	h.Cleanup(a.kill)
	return a
}

func (a *runningAgent) kill() {
	if a.process.ProcessState == nil {
		_ = a.process.Process.Kill()
		_ = a.process.Wait()
	}
}

// says waits for a line with all of these words. What comes before it must not have the word never, if that is not empty.
func (a *runningAgent) says(never string, words ...string) {
	a.h.Helper()
	timeout := time.After(time.Minute)
	for {
		select {
		case line, ok := <-a.lines:
			if !ok {
				a.h.Fatalf("the agent has ended, and has not said %q:\n%s", words, &a.log)
			}
			a.log.WriteString(line + "\n")
			if never != "" && strings.Contains(line, never) {
				a.h.Errorf("before it says %q it says: %s", words, line)
			}
			found := true
			for _, word := range words {
				found = found && strings.Contains(line, word)
			}
			if found {
				return
			}
		case <-timeout:
			a.h.Fatalf("the agent does not say %q:\n%s", words, &a.log)
		}
	}
}

// release runs the command for the driver beside the agent.
func (h *upgradedHost) release(args ...string) (text string, code int) {
	h.Helper()
	out, err := exec.Command(os.Args[0], append([]string{"release-driver", "--state-dir=" + h.state}, args...)...).CombinedOutput()
	var failed *exec.ExitError
	if err != nil && !errors.As(err, &failed) {
		h.Fatal(err)
	}
	if failed != nil {
		code = failed.ExitCode()
	}
	return string(out), code
}

const found = "GPUs are found"

// The library is replaced and the driver loaded anew under a process that has the old one for good. It gives way to a new
// one, which opens the new library; in between, while the module is the old one, it does not end again and again.
func TestAnInPlaceUpgradeIsFollowedByANewProcess(t *testing.T) {
	h := newUpgradedHost(t)
	a := h.startAgent()
	a.says("", found, `count=8`, `driverVersion="`+h.machine.DriverVersion()+`"`)
	for _, version := range []string{"999.1.2", "999.1.3"} {
		librarytest.Install(t, filepath.Dir(h.library), version)
		a.says("", "The agent keeps off the driver", h.library+" is another file")
		a.says("", "The agent has closed the driver")
		a.says("Starting", "a new process cannot open it yet", "different versions")
		h.happens(&nvmlsim.UnloadDriver{}, &nvmlsim.LoadDriver{Version: version})
		a.says(found, "Starting", "version=")
		a.says("", found, `count=8`, `driverVersion="`+version+`"`)
	}
}

// The module is loaded when the agent has the library of another version, and the library's path is not one that can be watched.
func TestAMismatchOfVersionsIsFollowedByANewProcess(t *testing.T) {
	h := newUpgradedHost(t)
	folder := filepath.Dir(h.library)
	for i, flag := range h.flags {
		if strings.HasPrefix(flag, "--driver-root=") {
			h.flags[i] = "--driver-root=" + t.TempDir() // it has no library: the dynamic loader finds one
		}
	}
	t.Setenv("LD_LIBRARY_PATH", folder)
	h.happens(&nvmlsim.UnloadDriver{})
	a := h.startAgent()
	a.says(found, "No GPUs can be used now", "driver not loaded")
	librarytest.Install(t, folder, "999.1.2")
	h.happens(&nvmlsim.LoadDriver{Version: "999.1.2"})
	a.says("", "The agent keeps off the driver", "different versions")
	a.says(found, "Starting", "version=")
	a.says("", found, `driverVersion="999.1.2"`)
}

// The command closes the driver, also over a death of the agent, and opens it again.
func TestTheCommandReleasesTheDriver(t *testing.T) {
	h := newUpgradedHost(t)
	if text, code := h.release(); code != 1 || !strings.Contains(text, h.state) {
		t.Errorf("without an agent's folder: exit code %d: %s", code, text)
	}
	a := h.startAgent()
	a.says("", found, `count=8`)
	if text, code := h.release("--for=new firmware"); code != 0 || !strings.Contains(text, "--end") {
		t.Fatalf("exit code %d: %s", code, text)
	}
	a.says("", "The agent keeps off the driver", "new firmware")
	a.kill()
	a = h.startAgent()
	a.says(found, "The agent keeps off the driver", "new firmware")
	if text, code := h.release("--end", "--timeout=30s"); code != 0 {
		t.Fatalf("exit code %d: %s", code, text)
	}
	a.says("", "Starting", "version=")
	a.says("", found, `count=8`)
	for want, args := range map[string][]string{"--timeout 0s": {"--timeout=0s"}, `--for "x"`: {"--end", "--for=x"}} {
		if text, code := h.release(args...); code != 1 || !strings.Contains(text, want) {
			t.Errorf("%q: exit code %d: %s", args, code, text)
		}
	}
	if text, code := h.release("--end", "--timeout=1s"); code != 0 {
		t.Errorf("ended twice: exit code %d: %s", code, text)
	}
	a.kill()
	if text, code := h.release("--end", "--timeout=1s"); code != 2 || !strings.Contains(text, stepaside.ErrStillReleased.Error()) {
		t.Errorf("without an agent: exit code %d: %s", code, text)
	}
}
