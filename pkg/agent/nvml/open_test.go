// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"stowage.dev/stowage/pkg/nvmlsim"
)

func TestOpenTakesTheFormsOfTheFlag(t *testing.T) {
	driverRoot := t.TempDir()
	library := writeFile(t, driverRoot, "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", "")
	tests := map[string]struct {
		spec       string
		driverRoot string
		simulated  bool
		source     string
	}{
		"simulation":                      {"sim:t4", "/", true, "sim:t4"},
		"path":                            {"/opt/libnvidia-ml.so.1", "/", false, "/opt/libnvidia-ml.so.1"},
		"name for the dynamic loader":     {"libnvidia-ml.so.1", "/", false, "libnvidia-ml.so.1"},
		"auto below the driver root":      {"auto", driverRoot, false, library},
		"auto with an empty driver root":  {"auto", t.TempDir(), false, "libnvidia-ml.so.1"},
		"auto with a root that is no dir": {"auto", library, false, "libnvidia-ml.so.1"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			h, err := Open(test.spec, OpenOptions{NodeName: "node-a", DriverRoot: test.driverRoot, ProcRoot: t.TempDir()})
			if err != nil {
				t.Fatal(err)
			}
			if h.Simulated != test.simulated || h.Source != test.source {
				t.Errorf("simulated %t from %q, want %t from %q", h.Simulated, h.Source, test.simulated, test.source)
			}
			if h.Raw == nil || h.Library == nil || h.Sysfs == nil {
				t.Error("a part of the handle is missing")
			}
		})
	}
}

func TestOpenRefusesWhatItCantMeetWithAReason(t *testing.T) {
	withDriver := t.TempDir()
	writeFile(t, withDriver, "driver/nvidia/version",
		"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.172.08\nGCC version: 12\n")
	without := t.TempDir()
	unreadable := t.TempDir()
	writeFile(t, unreadable, "driver/nvidia", "")
	tests := map[string]struct {
		spec string
		opts OpenOptions
		is   error
		says string
	}{
		"nothing":                     {"", OpenOptions{ProcRoot: without}, nil, `NVML "": want "auto", the path of a library, or sim:<profile>`},
		"a word":                      {"fake", OpenOptions{ProcRoot: without}, nil, "dgx-a100"},
		"unknown profile":             {"sim:dgx", OpenOptions{NodeName: "n", ProcRoot: without}, nvmlsim.ErrUnknownProfile, "hgx-b200"},
		"missing profile file":        {"sim:/x/y.yaml", OpenOptions{NodeName: "n", ProcRoot: without}, os.ErrNotExist, "/x/y.yaml"},
		"simulation without a name":   {"sim:t4", OpenOptions{ProcRoot: without}, nil, "need a node name"},
		"simulation beside a driver":  {"sim:t4", OpenOptions{NodeName: "n", ProcRoot: withDriver}, ErrRealDriver, "570.172.08): simulated GPUs on this machine would hide its own"},
		"simulation beside who knows": {"sim:t4", OpenOptions{NodeName: "n", ProcRoot: unreadable}, nil, "look for a loaded NVIDIA driver"},
		"simulation of nothing":       {"sim:", OpenOptions{NodeName: "n", ProcRoot: without}, nvmlsim.ErrUnknownProfile, `""`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := Open(test.spec, test.opts)
			if err == nil {
				t.Fatal("opened")
			}
			if test.is != nil && !errors.Is(err, test.is) {
				t.Errorf("error %v is not %v", err, test.is)
			}
			if !strings.Contains(err.Error(), test.says) {
				t.Errorf("error %q does not say %q", err, test.says)
			}
		})
	}
}

func TestAMissingLibraryIsFoundOutByInitAndNamed(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "libnvidia-ml.so.1")
	h, err := Open(missing, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // a driver may be installed later: Init may be tried again
		err = h.Init()
		if !errors.Is(err, ErrLibraryNotFound) || !strings.Contains(err.Error(), missing) {
			t.Errorf("error %v, want %v naming %s", err, ErrLibraryNotFound, missing)
		}
	}
}

func TestAutoNamesThePlacesWhereItLooked(t *testing.T) {
	root := t.TempDir()
	h, err := Open(SpecAuto, OpenOptions{DriverRoot: root})
	if err != nil {
		t.Fatal(err)
	}
	err = h.Init()
	if err == nil {
		if err := h.Shutdown(); err != nil {
			t.Error(err)
		}
		t.Skip("this machine has an NVIDIA driver")
	}
	if !errors.Is(err, ErrLibraryNotFound) || !strings.Contains(err.Error(), "below "+root+" and by the dynamic loader") {
		t.Errorf("error %v, want %v naming %s", err, ErrLibraryNotFound, root)
	}
}

func TestARealDriverIsSeenByItsFileInProc(t *testing.T) {
	proc := t.TempDir()
	if loaded, _, err := RealDriverLoaded(proc); loaded || err != nil {
		t.Errorf("empty /proc: %t, %v, want no driver", loaded, err)
	}
	writeFile(t, proc, "driver/nvidia/version", "NVRM version: 570\nGCC version: 12\n")
	loaded, version, err := RealDriverLoaded(proc)
	if !loaded || version != "NVRM version: 570" || err != nil {
		t.Errorf("%t, %q, %v, want the first line of the file", loaded, version, err)
	}
}

func writeFile(t *testing.T, root, name, content string) string {
	t.Helper()
	path := filepath.Join(root, name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSimulatedGPUsAreKeptInTheirFolder(t *testing.T) {
	opts := OpenOptions{NodeName: "node-a", SimDir: filepath.Join(t.TempDir(), "sim"), ProcRoot: t.TempDir()}
	open := func() *Handle {
		h, err := Open("sim:dgx-h100", opts)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	boot, err := open().BootID()
	if err != nil || boot == "" {
		t.Fatalf("boot ID %q, %v", boot, err)
	}
	if _, err := open().Machine.Do(&nvmlsim.RemoveGPU{GPU: "0"}); err != nil {
		t.Fatal(err)
	}
	if n, err := initialized(t, open()).DeviceCount(); n != 7 || err != nil {
		t.Errorf("%d GPUs, %v, want the 7 that were left", n, err)
	}
	if _, err := open().Machine.Do(&nvmlsim.Reboot{}); err != nil {
		t.Fatal(err)
	}
	if again, err := open().BootID(); err != nil || again == boot {
		t.Errorf("boot ID %q, %v, want another one", again, err)
	}
	opts.NodeName = "node-b"
	if _, err := Open("sim:dgx-h100", opts); err == nil || !strings.Contains(err.Error(), opts.SimDir) {
		t.Errorf("error %v, want one that names the folder of the other node", err)
	}
}

func TestTheBootIDOfARealMachineIsTheKernels(t *testing.T) {
	proc := t.TempDir()
	h, err := Open(t.TempDir()+"/libnvidia-ml.so.1", OpenOptions{ProcRoot: proc})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.BootID(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("error %v, want %v", err, os.ErrNotExist)
	}
	writeFile(t, proc, "sys/kernel/random/boot_id", "5b0f\n")
	if got, err := h.BootID(); got != "5b0f" || err != nil {
		t.Errorf("%q, %v, want 5b0f", got, err)
	}
}
