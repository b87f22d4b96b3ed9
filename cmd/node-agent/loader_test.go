// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/nvmlsim/librarytest"
)

func TestMain(m *testing.M) {
	if os.Getenv(asAgent) != "" {
		main()
		return
	}
	os.Exit(librarytest.Main(m))
}

// An agent without any flag of simulation finds a library below --driver-root, loads it as it loads the driver's, and would
// publish what it publishes of the same GPUs simulated in itself. The kernel of this machine knows nothing of them.
func TestTheAgentPublishesTheGPUsOfTheLibraryBelowTheDriverRoot(t *testing.T) {
	root := t.TempDir()
	libraries := filepath.Join(root, "usr", "lib64")
	if err := os.MkdirAll(libraries, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(librarytest.Build(t), filepath.Join(libraries, librarytest.Name)); err != nil {
		t.Fatal(err)
	}
	m, folder := librarytest.Machine(t, librarytest.Profile(t, "hgx-b200"), "node-1")
	for _, c := range []nvmlsim.Command{&nvmlsim.SetMIG{GPU: "1", Enabled: true}, &nvmlsim.CreateMIG{GPU: "1", Profile: "1g.23gb"}, &nvmlsim.RemoveGPU{GPU: "2"}} {
		if _, err := m.Do(c); err != nil {
			t.Fatal(err)
		}
	}
	booted := filepath.Join(root, "run/systemd/system")
	if err := os.MkdirAll(booted, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, partitions := range []string{"static", "dynamic"} {
		loaded := discovered(t, "--driver-root="+root, "--host-root="+root, "--partitions="+partitions)
		simulated := discovered(t, "--nvml=sim:hgx-b200", "--sim-dir="+folder, "--partitions="+partitions)
		devices := 0
		for _, slices := range [][]resourceapi.ResourceSlice{loaded, simulated} {
			for _, slice := range slices {
				devices += len(slice.Spec.Devices)
				for _, device := range slice.Spec.Devices {
					for name := range device.Attributes {
						if strings.HasSuffix(string(name), "pcieRoot") || strings.HasSuffix(string(name), "numaNode") {
							delete(device.Attributes, name)
						}
					}
				}
			}
		}
		if diff := cmp.Diff(simulated, loaded); diff != "" || devices < 2*7 {
			t.Errorf("--partitions=%s: %d devices (-simulated +loaded):\n%s", partitions, devices, diff)
		}
	}
	// Without systemd MPS daemons are in cgroups of their own, which this host has not.
	if err := os.Remove(booted); err != nil {
		t.Fatal(err)
	}
	for _, slice := range discovered(t, "--driver-root="+root, "--host-root="+root) {
		for _, device := range slice.Spec.Devices {
			if got := device.Attributes[discovery.AttributeSharingStrategies]; got.StringValue == nil || *got.StringValue != "TimeSlicing" {
				t.Errorf("%s on a host without systemd and cgroups is shared by %v", device.Name, got)
			}
		}
	}
}

// discovered are the slices that an agent with these flags would publish.
func discovered(t *testing.T, flags ...string) (slices []resourceapi.ResourceSlice) {
	t.Helper()
	cmd := newCommand()
	var out bytes.Buffer
	cmd.SetArgs(append([]string{"discover", "-o", "yaml", "--node-name=node-1"}, flags...))
	cmd.SetOut(&out)
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatalf("%v: %v", flags, err)
	}
	decoder := utilyaml.NewYAMLOrJSONDecoder(&out, 4096)
	for {
		var slice resourceapi.ResourceSlice
		err := decoder.Decode(&slice)
		if errors.Is(err, io.EOF) {
			return slices
		}
		if err != nil {
			t.Fatal(err)
		}
		slices = append(slices, slice)
	}
}

// With --sim-library simulated GPUs are asked through the library, which finds those of --sim-dir by itself: what somebody does to them
// shows, and a library of another version than the kernel's driver is refused, as on a node.
func TestSimulatedGPUsAreAskedThroughALibrary(t *testing.T) {
	for _, name := range []string{nvmlsim.EnvSocket, nvmlsim.EnvProfile, nvmlsim.EnvNode} {
		t.Setenv(name, "") // which the agent sets, and agents of the tests to come must not inherit
	}
	folder, libraries := filepath.Join(t.TempDir(), "sim"), t.TempDir()
	p := librarytest.Profile(t, "l40s")
	m, err := nvmlsim.OpenMachine(p, "node-1", folder)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Do(&nvmlsim.RemoveGPU{GPU: "2"}); err != nil {
		t.Fatal(err)
	}
	flags := []string{"--nvml=sim:l40s", "--sim-dir=" + folder}
	simulated := discovered(t, flags...)
	loaded := discovered(t, append(flags, "--sim-library="+librarytest.Install(t, libraries, p.System.DriverVersion))...)
	if diff := cmp.Diff(simulated, loaded); diff != "" || len(loaded) != 7 {
		t.Errorf("%d slices (-simulated +loaded):\n%s", len(loaded), diff)
	}
	for want, args := range map[string][]string{
		"--sim-library /lib.so: want --nvml=sim:<profile> with it, not auto": {"--nvml=auto", "--sim-library=/lib.so"},
		"library /lib.so: simulated GPUs that are asked through a library":   {"--nvml=sim:l40s", "--sim-library=/lib.so"},
		"NVML library not found": {"--nvml=sim:l40s", "--sim-dir=" + folder, "--sim-library=" + filepath.Join(libraries, "none.so")},
	} {
		cmd := newCommand()
		cmd.SetArgs(append([]string{"discover", "--node-name=node-1"}, args...))
		cmd.SetOut(io.Discard)
		cmd.SetErr(io.Discard)
		if err := cmd.ExecuteContext(t.Context()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", args, err, want)
		}
	}
}
