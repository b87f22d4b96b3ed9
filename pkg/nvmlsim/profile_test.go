// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTheBuiltInProfiles(t *testing.T) {
	want := []string{"a100-40gb", "dgx-a100", "dgx-h100", "gb200", "gb300", "hgx-b200", "l40s", "t4"}
	if diff := cmp.Diff(want, Profiles()); diff != "" {
		t.Errorf("names (-want +got):\n%s", diff)
	}
	for _, name := range want {
		p, err := LoadProfile(name)
		if err != nil {
			t.Fatal(err)
		}
		if p.Name != name || p.Description == "" || len(p.Sources) == 0 {
			t.Errorf("profile %s: name %q, description %q, %d sources: want all three", name, p.Name, p.Description, len(p.Sources))
		}
	}
}

func TestAnUnknownProfileNamesTheKnownOnes(t *testing.T) {
	_, err := New("dgx-a1000", "node-a")
	if !errors.Is(err, ErrUnknownProfile) {
		t.Fatalf("error %v, want %v", err, ErrUnknownProfile)
	}
	for _, want := range append(Profiles(), `"dgx-a1000"`) {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error %q does not name %s", err, want)
		}
	}
}

func TestAProfileFileIsRead(t *testing.T) {
	data, err := embedded.ReadFile("profiles/t4.yaml")
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "mine.yaml")
	mine := strings.Replace(string(data), "Tesla T4", "Tesla T4G", 1)
	if err := os.WriteFile(file, []byte(mine), 0o600); err != nil {
		t.Fatal(err)
	}
	lib, err := New(file, "node-a")
	if err != nil {
		t.Fatal(err)
	}
	if got := lib.Profile().GPU.ProductName; got != "Tesla T4G" {
		t.Errorf("product name %q, want the file's", got)
	}
	if _, err := New(file+".yaml", "node-a"); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "mine.yaml.yaml") {
		t.Errorf("error %v, want one that names the missing file", err)
	}
}

func TestABadProfileIsRefusedNamingFieldAndValue(t *testing.T) {
	tests := map[string]struct{ profile, old, new, want string }{
		"unknown field":               {"t4", "multiprocessors:", "multiProcessors:", `unknown field "gpu.multiProcessors"`},
		"field twice":                 {"t4", "name: t4\n", "name: t4\nname: t4\n", "already set"},
		"text for a number":           {"t4", "memoryMiB: 15360", "memoryMiB: 15Gi", "memoryMiB of type uint64"},
		"no name":                     {"t4", "name: t4\n", "", `name: ""`},
		"driver version":              {"t4", "595.91.07", "r595", `system.driverVersion: "r595"`},
		"CUDA version":                {"t4", `"13.2"`, `"13"`, `system.cudaDriverVersion: "13"`},
		"no product name":             {"t4", "Tesla T4", `""`, `gpu.productName: ""`},
		"brand":                       {"t4", "brand: Nvidia", "brand: AMD", `gpu.brand: "AMD": want one of GeForce,`},
		"architecture":                {"t4", "Turing", "Babbage", `gpu.architecture: "Babbage": want one of Ada Lovelace,`},
		"compute capability":          {"t4", `"7.5"`, `"75"`, `gpu.cudaComputeCapability: "75"`},
		"no memory":                   {"t4", "memoryMiB: 15360", "memoryMiB: 0", "gpu.memoryMiB: 0"},
		"more reserved than there is": {"t4", "reservedMiB: 448", "reservedMiB: 15360", "gpu.reservedMiB: 15360: want less than gpu.memoryMiB, 15360"},
		"no multiprocessors":          {"t4", "multiprocessors: 40", "multiprocessors: -1", "gpu.multiprocessors: -1"},
		"too few cores":               {"t4", "cudaCores: 2560", "cudaCores: 4", "gpu.cudaCores: 4"},
		"PCI device ID":               {"t4", "0x1EB810DE", "0", "gpu.pciDeviceID: 0"},
		"PCIe generation":             {"t4", "generation: 3", "generation: 30", "gpu.pcie.generation: 30"},
		"PCIe width":                  {"t4", "width: 16", "width: 12", "gpu.pcie.width: 12"},
		"more lanes than the card":    {"t4", "linkWidth: 8", "linkWidth: 32", "gpu.pcie.linkWidth: 32"},
		"fewer lanes than the port":   {"t4", "linkWidth: 8", "linkWidth: 8, portWidth: 4", "gpu.pcie.linkWidth: 8: want at most"},
		"a port of three lanes":       {"t4", "linkWidth: 8", "linkWidth: 1, portWidth: 3", "gpu.pcie.portWidth: 3"},
		"a card slower than its link": {"t4", "linkWidth: 8", "deviceGeneration: 2", "gpu.pcie.deviceGeneration: 2"},
		"an idle clock above the top": {"t4", "idle: {graphics: 1590", "idle: {graphics: 1591", "gpu.clocks.idle.graphics: 1591: want at most gpu.clocks.highest.graphics, 1590"},
		"power limits upside down":    {"t4", "minWatts: 60", "minWatts: 80", "gpu.power: {IdleWatts:33 MinWatts:80"},
		"one threshold":               {"t4", "thermal: {slowdownC: 93, shutdownC: 96}", "thermal: {slowdownC: 93}", "gpu.thermal: {SlowdownC:93"},
		"thresholds upside down":      {"t4", "slowdownC: 93", "slowdownC: 99", "gpu.thermal: {SlowdownC:99"},
		"thresholds of both kinds":    {"t4", "slowdownC: 93", "idleMarginC: 30, slowdownC: 93", "gpu.thermal: {SlowdownC:93"},
		"margins upside down":         {"l40s", "slowdownMarginC: -2", "slowdownMarginC: -6", "gpu.thermal: {SlowdownC:0"},
		"MIG devices":                 {"dgx-a100", "maxDevices: 7", "maxDevices: 8", "gpu.mig.maxDevices: 8"},
		"VBIOS version":               {"t4", "vbiosVersion: ", "vbiosVersion: 90.04.96.00.02.90.04.96.00.02.", "gpu.vbiosVersion: "},
		"part number":                 {"t4", "boardPartNumber: ", "boardPartNumber: " + strings.Repeat("9", 80), "gpu.boardPartNumber: "},
		"addressing mode":             {"dgx-a100", "addressingMode: HMM", "addressingMode: hmm", `gpu.addressingMode: "hmm": want one of ATS, HMM, None`},
		"NVLink version":              {"dgx-a100", "version: 3", "version: 0", "gpu.nvlink.version: 0"},
		"NVLinks":                     {"dgx-a100", "links: 12", "links: 37", "gpu.nvlink.links: 37: want 1 to 36"},
		"NVSwitch address":            {"dgx-a100", "0000:c4:00.0", "c4", `gpu.nvlink.switches[0].address: "c4"`},
		"NVSwitch links":              {"dgx-a100", `"0000:c5:00.0", links: 2`, `"0000:c5:00.0", links: 1`, "gpu.nvlink.switches: 11: the links to all switches must add up to gpu.nvlink.links, 12"},
		"NVSwitch without links":      {"dgx-a100", `"0000:c5:00.0", links: 2`, `"0000:c5:00.0"`, "gpu.nvlink.switches[1].links: 0"},
		"cluster UUID":                {"gb200", "5f6d2f3e-", "rack-", `fabric.clusterUUID: "rack-`},
		"fabric without NVLink":       {"t4", "gpus:\n", "fabric: {clusterUUID: 5f6d2f3e-0c8b-4f0e-9d55-6a7f2b1c9e10, cliqueID: 1}\ngpus:\n", "fabric: set: a GPU without gpu.nvlink"},
		"PCI path without root":       {"t4", "pci0000:00/0000:00:1b.0", "0000:00:1b.0", `gpus[0].pci: "0000:00:1b.0"`},
		"PCI path with a bad bridge":  {"t4", "pci0000:00/0000:00:1b.0", "pci0000:00/1b/0000:00:1b.0", `gpus[0].pci: "pci0000:00/1b/0000:00:1b.0"`},
		"PCI address twice":           {"t4", "0000:00:1c.0", "0000:00:1b.0", `gpus[1].pci: "pci0000:00/0000:00:1b.0": gpus[0] has that address`},
		"NUMA node":                   {"l40s", `0000:18:00.0", numaNode: 0`, `0000:18:00.0", numaNode: -2`, "gpus[0].numaNode: -2"},
		"minor twice":                 {"t4", `1c.0", numaNode: -1`, `1c.0", numaNode: -1, minor: 0`, "gpus[1].minor: 0: gpus[0] has that minor"},
		"minor of the control node":   {"t4", `1c.0", numaNode: -1`, `1c.0", numaNode: -1, minor: 255`, "gpus[1].minor: 255"},
		"board":                       {"gb200", "board: 1", "board: -1", "gpus[2].board: -1"},
		"MIG on a GPU without":        {"t4", `1c.0", numaNode: -1`, `1c.0", numaNode: -1, migEnabled: true`, "gpus[1].migEnabled: true"},
		"peers on some GPUs only":     {"t4", `1c.0", numaNode: -1`, `1c.0", numaNode: -1, nvlinkPeers: [0]`, "gpus[1].nvlinkPeers: [0]: want it on all GPUs or on none"},
		"peers without NVLink":        {"t4", `1b.0", numaNode: -1`, `1b.0", numaNode: -1, nvlinkPeers: [1]`, "gpus[0].nvlinkPeers: [1]: the GPU has no gpu.nvlink"},
		"peers beside switches":       {"dgx-a100", `07:00.0", numaNode: 3`, `07:00.0", numaNode: 3, nvlinkPeers: [1]`, "gpus[0].nvlinkPeers: [1]: the links end at gpu.nvlink.switches"},
		"peers fewer than links":      {"gb200", "board: 0}", "board: 0, nvlinkPeers: [1]}", "gpus[0].nvlinkPeers: [1]: want one peer for each of the 18 links"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			data, err := embedded.ReadFile("profiles/" + test.profile + ".yaml")
			if err != nil {
				t.Fatal(err)
			}
			if !strings.Contains(string(data), test.old) {
				t.Fatalf("profile %s has no %q to replace", test.profile, test.old)
			}
			checkRefused(t, strings.Replace(string(data), test.old, test.new, 1), test.want)
		})
	}
}

func TestAProfileWithoutGPUsOrWithTooManyIsRefused(t *testing.T) {
	data, err := embedded.ReadFile("profiles/t4.yaml")
	if err != nil {
		t.Fatal(err)
	}
	common, _, _ := strings.Cut(string(data), "gpus:\n")
	checkRefused(t, common, "gpus: 0: want 1 to 64 GPUs")
	var many strings.Builder
	for bus := range 65 {
		fmt.Fprintf(&many, "- {pci: \"pci0000:00/0000:%02x:00.0\", numaNode: 0}\n", bus)
	}
	checkRefused(t, common+"gpus:\n"+many.String(), "gpus: 65: want 1 to 64 GPUs")
}

func TestAllFaultsOfAProfileAreReported(t *testing.T) {
	checkRefused(t, "name: none\n", "system.driverVersion", "gpu.productName", "gpu.memoryMiB", "gpu.power", "gpus: 0")
}

// checkRefused checks that the error says each of want, and where it came from.
func checkRefused(t *testing.T, profile string, want ...string) {
	t.Helper()
	_, err := ParseProfile("mine.yaml", []byte(profile))
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range append(want, `"mine.yaml"`) {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error does not say %q:\n%v", want, err)
		}
	}
}
