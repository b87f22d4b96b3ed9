// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const capi = "../../capi"

func TestTheCommittedFilesAreWhatTheGeneratorWrites(t *testing.T) {
	files, err := generate(capi)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join(capi, name))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("%s: run `go generate ./pkg/nvmlsim/capi` (-generated, +committed):\n%s", name, diff)
		}
	}
}

// Every function of the header is exported once, by hand, by a rule or as a stub, and every answer of the simulation has a function.
func TestEveryFunctionOfTheHeaderIsExported(t *testing.T) {
	text, err := readHeader()
	if err != nil {
		t.Fatal(err)
	}
	h, err := parseHeader(text)
	if err != nil {
		t.Fatal(err)
	}
	exported, err := exportsIn(capi)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{goFile, cFile} {
		content, err := os.ReadFile(filepath.Join(capi, name))
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(content)) {
			name, ok := strings.CutPrefix(strings.TrimSpace(line), "//export ")
			if !ok && strings.HasPrefix(line, "ON_") {
				_, name, ok = strings.Cut(strings.TrimSuffix(strings.TrimSpace(line), ")"), "(")
			}
			if !ok {
				continue
			}
			if exported[name] {
				t.Errorf("%s is exported twice", name)
			}
			exported[name] = true
		}
	}
	for name := range h.byName {
		if !exported[name] {
			t.Errorf("%s is not exported", name)
		}
	}
	if len(exported) != len(h.byName) {
		t.Errorf("%d functions are exported, and nvml.h has %d", len(exported), len(h.byName))
	}
}

func TestWhatFitsNoRuleIsNotGuessed(t *testing.T) {
	const text = "const DECLDIR char* nvmlErrorString(nvmlReturn_t result);\n"
	header := func(declaration string) *header {
		h, err := parseHeader(text + declaration)
		if err != nil {
			t.Fatal(err)
		}
		return h
	}
	tests := map[string]struct{ declaration, method, want string }{
		"a structure for a number": {"nvmlReturn_t DECLDIR nvmlDeviceGetMinorNumber(nvmlDevice_t device, nvmlMinor_t *minor);", "GetMinorNumber", "nvmlMinor_t* minor"},
		"an argument too many":     {"nvmlReturn_t DECLDIR nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int a, unsigned int *b);", "GetMinorNumber", "unsigned int a"},
		"a result too few":         {"nvmlReturn_t DECLDIR nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *a);", "GetMigMode", "0 arguments, 1 results"},
		"a version of no number":   {"nvmlReturn_t DECLDIR nvmlDeviceGetAddressingMode(nvmlDevice_t device, nvmlDeviceAddressingMode_t *mode);", "GetAddressingMode", "nvmlDeviceAddressingMode_t* mode"},
		"a text without a length":  {"nvmlReturn_t DECLDIR nvmlDeviceGetName(nvmlDevice_t device, char *name);", "GetName", "char* name"},
		"another structure":        {"nvmlReturn_t DECLDIR nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_v2_t *memory);", "GetMemoryInfo", "nvmlMemory_v2_t* memory"},
		"handles of Go":            {"nvmlReturn_t DECLDIR nvmlGpuInstanceGetInfo(nvmlGpuInstance_t i, nvmlGpuInstanceInfo_t *info);", "GetInfo", "nvmlGpuInstanceInfo_t* info"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			on := map[string]map[string]bool{"device": {test.method: true}, "gpuInstance": {test.method: true}}
			_, err := write(header(test.declaration), nil, on)
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "write it by hand") {
				t.Errorf("error %v, want one that names %q", err, test.want)
			}
		})
	}
	if _, err := parseHeader(text + "nvmlReturn_t DECLDIR nvmlNew(unsigned int f(void));"); err == nil {
		t.Error("a declaration that is not understood is passed over")
	}
}

// The functions that older drivers lack are named as the header has them.
func TestWhatDriversLackIsInTheHeader(t *testing.T) {
	text, err := readHeader()
	if err != nil {
		t.Fatal(err)
	}
	h, err := parseHeader(text)
	if err != nil {
		t.Fatal(err)
	}
	since, err := os.ReadFile("../../install/since.txt")
	if err != nil {
		t.Fatal(err)
	}
	known := 0
	for line := range strings.Lines(string(since)) {
		_, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		if strings.HasPrefix(line, "#") {
			continue
		}
		if known++; h.byName[name].name == "" {
			t.Errorf("since.txt names %q, which is not in nvml.h", name)
		}
	}
	if known < 100 {
		t.Errorf("since.txt names %d functions, want more than 100", known)
	}
}
