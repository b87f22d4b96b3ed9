// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"stowage.dev/stowage/pkg/agent/hostcheck"
)

// libraryBelow puts a library, whatever is in it, where a driver has its own.
func libraryBelow(t *testing.T, root string) {
	t.Helper()
	folder := filepath.Join(root, "lib64")
	if err := os.MkdirAll(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "libnvidia-ml.so.1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

// A driver is found by itself, as the agent sees it and as the container runtime does, and a flag wins.
func TestTheDriverRootIsFoundUnlessAFlagSaysIt(t *testing.T) {
	for name, tc := range map[string]struct {
		driver       string // on the host; none if it is empty
		args         []string
		here, onHost string // HOST stands for the host's root
	}{
		"none yet":           {here: "HOST", onHost: "/"},
		"on the host":        {driver: "/", here: "HOST", onHost: "/"},
		"a driver container": {driver: "/run/nvidia/driver", here: "HOST/run/nvidia/driver", onHost: "/run/nvidia/driver"},
		"a flag":             {driver: "/run/nvidia/driver", args: []string{"--driver-root=/opt/driver"}, here: "/opt/driver"},
		"both flags":         {driver: "/run/nvidia/driver", args: []string{"--driver-root=/host", "--host-driver-root=/"}, here: "/host", onHost: "/"},
	} {
		t.Run(name, func(t *testing.T) {
			host := t.TempDir()
			if tc.driver != "" {
				libraryBelow(t, filepath.Join(host, tc.driver))
			}
			opts := defaultOptions(func(string) (string, bool) { return "", false }, func() (string, error) { return "node-1", nil })
			flags := pflag.NewFlagSet("run", pflag.ContinueOnError)
			opts.addHardwareFlags(flags)
			if err := flags.Parse(append(tc.args, "--host-root="+host)); err != nil {
				t.Fatal(err)
			}
			if err := opts.validateHardware(); err != nil {
				t.Fatal(err)
			}
			if want := strings.Replace(tc.here, "HOST", host, 1); opts.driverRoot != want || opts.hostDriverRoot != tc.onHost {
				t.Errorf("driver root %s, on the host %s; want %s and %s", opts.driverRoot, opts.hostDriverRoot, want, tc.onHost)
			}
		})
	}
}

// A driver container that comes later is waited for, and the agent begins anew with it; a driver that comes at the host's root it just opens.
func TestADriverThatComesLaterIsWaitedFor(t *testing.T) {
	host := t.TempDir()
	opts := defaultOptions(func(string) (string, bool) { return "", false }, func() (string, error) { return "node-1", nil })
	opts.host.root, opts.stateDir = host, t.TempDir()
	opts.settleDriverRoot()
	keeper := newKeeper(opts, clients{})
	if keeper.Start(t.Context()); keeper.Why() != nil {
		t.Fatalf("without a driver: %v", keeper.Why())
	}
	libraryBelow(t, filepath.Join(host, "run/nvidia/driver"))
	if _, err := keeper.Enter(t.Context(), ""); err == nil || !strings.Contains(err.Error(), "/run/nvidia/driver") {
		t.Errorf("with a driver container: %v", err)
	}
	opts.settleDriverRoot() // it is settled
	if opts.driverRoot != host {
		t.Errorf("the driver root has become %s", opts.driverRoot)
	}
}

// What an older driver left on the host does not keep the agent from the driver container's, and an upgrade of that ends the agent no second time.
func TestTheDriverThatTheKernelLoadsLaterWins(t *testing.T) {
	const container, version = "/run/nvidia/driver", "driver/nvidia/version"
	host, proc := t.TempDir(), t.TempDir()
	library := func(root, version string) {
		t.Helper()
		libraryBelow(t, filepath.Join(host, root))
		name := filepath.Join(host, root, "lib64/libnvidia-ml.so.")
		if err := os.Rename(name+"1", name+version); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("libnvidia-ml.so."+version, name+"1"); err != nil {
			t.Fatal(err)
		}
	}
	load := func(module string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(proc, filepath.Dir(version)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(proc, version), []byte("NVRM version: NVIDIA UNIX x86_64 Kernel Module  "+module+"  Tue\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	start := func() *options {
		opts := defaultOptions(func(string) (string, bool) { return "", false }, func() (string, error) { return "node-1", nil })
		opts.host.root, opts.host.proc = host, proc
		opts.settleDriverRoot()
		return opts
	}
	expect := func(when string, opts *options, want string) {
		t.Helper()
		if onHost, elsewhere := opts.driverElsewhere(); elsewhere != (want != "") || elsewhere && onHost != want {
			t.Errorf("%s: elsewhere %t, in %q; want %q", when, elsewhere, onHost, want)
		}
	}
	library("/", "535.183.01")
	opts := start()
	expect("an old library", opts, "")
	library(container, "570.172.08")
	expect("a container that has loaded nothing yet", opts, "")
	load("570.172.08")
	expect("a container that has loaded its driver", opts, container)
	opts = start()
	if opts.hostDriverRoot != container {
		t.Fatalf("begun anew in %s", opts.hostDriverRoot)
	}
	expect("begun anew", opts, "")
	if err := os.RemoveAll(proc + "/driver"); err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(filepath.Join(host, container)); err != nil {
		t.Fatal(err)
	}
	expect("in the midst of an upgrade", opts, "")
	library(container, "580.65.06")
	load("580.65.06")
	expect("upgraded", opts, "")
}

// An agent that ends knows no less of its host than before: its Node would be told that nothing is wrong any more, and again by the next agent.
func TestTheHostIsNotTakenForMendedWhileTheAgentEnds(t *testing.T) {
	opts := defaultOptions(func(string) (string, bool) { return "", false }, func() (string, error) { return "node-1", nil })
	opts.host.root, opts.host.proc = t.TempDir(), t.TempDir()
	opts.settleDriverRoot()
	if err := os.WriteFile(filepath.Join(opts.host.proc, "devices"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, end := context.WithCancel(t.Context())
	warning := opts.hostWarning(ctx, nil)
	before := warning()
	if !strings.Contains(before, "nvidia-uvm: ") {
		t.Fatalf("without modprobe: %q", before)
	}
	end()
	for range 20 {
		if after := warning(); after != before {
			t.Errorf("%q, want %q", after, before)
		}
	}
}

// The command prints each finding with what to do, as a table and as JSON, and scripts tell the worst by its exit code.
func TestCheckTellsWhatToDo(t *testing.T) {
	host := t.TempDir() // it has nothing
	run := func(args ...string) (string, error) {
		cmd := newCommand()
		var out bytes.Buffer
		cmd.SetArgs(append([]string{"check", "--host-root=" + host, "--node-name=node-1"}, args...))
		cmd.SetOut(&out)
		cmd.SetErr(io.Discard)
		err := cmd.ExecuteContext(t.Context())
		return out.String(), err
	}
	text, err := run()
	if code := exitCode(err); code != 2 || !strings.Contains(text, "driver-files") || !strings.Contains(text, "-> Install the NVIDIA driver") {
		t.Errorf("exit code %d, %v:\n%s", code, err, text)
	}
	text, err = run("-o", "json")
	var findings []hostcheck.Finding
	if code := exitCode(err); code != 2 || json.Unmarshal([]byte(text), &findings) != nil || len(findings) != len(hostcheck.Table()) {
		t.Errorf("exit code %d, %v:\n%s", code, err, text)
	}
	if _, err := run("-o", "xml"); exitCode(err) != 1 || !strings.Contains(err.Error(), "xml") {
		t.Errorf("output of no kind: %v", err)
	}
	for status, code := range map[hostcheck.Status]int{hostcheck.Missing: 2, hostcheck.Warning: 3, hostcheck.Unknown: 4} {
		if got := exitCode(&checkError{status}); got != code {
			t.Errorf("%s: exit code %d, want %d", status, got, code)
		}
	}
}
