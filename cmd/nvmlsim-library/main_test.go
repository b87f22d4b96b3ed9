// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/nvmlsim/install"
	"stowage.dev/stowage/pkg/nvmlsim/librarytest"
)

func TestMain(m *testing.M) { os.Exit(librarytest.Main(m)) }

// client is testdata/client.c, running.
type client struct {
	t    *testing.T
	to   io.Writer
	from *bufio.Scanner
}

// compile runs the C compiler with nvml.h.
func compile(t *testing.T, args ...string) {
	t.Helper()
	module, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", "github.com/NVIDIA/go-nvml").Output()
	if err != nil {
		t.Fatal(err)
	}
	args = append([]string{"-Wall", "-Wno-deprecated-declarations", "-DNVML_NO_UNVERSIONED_FUNC_DEFS", "-I", filepath.Join(strings.TrimSpace(string(module)), "pkg", "nvml")}, args...)
	if out, err := exec.CommandContext(t.Context(), "cc", args...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

func compiled(t *testing.T) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "client")
	compile(t, "-o", program, "testdata/client.c", "-ldl")
	return program
}

func start(t *testing.T, program string) *client {
	t.Helper()
	cmd := exec.Command(program) // it ends with its input
	to, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	from, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		to.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("the C program: %v", err)
		}
	})
	return &client{t, to, bufio.NewScanner(from)}
}

// says tells the program what to do, and returns how it ended.
func (c *client) says(words ...string) string {
	c.t.Helper()
	if _, err := fmt.Fprintln(c.to, strings.Join(words, " ")); err != nil {
		c.t.Fatal(err)
	}
	if !c.from.Scan() {
		c.t.Fatalf("%v: the program has ended: %v", words, c.from.Err())
	}
	return c.from.Text()
}

func (c *client) want(answer string, words ...string) {
	c.t.Helper()
	if got := c.says(words...); got != answer {
		c.t.Errorf("%v: %q, want %q", words, got, answer)
	}
}

func (c *client) list() (lines []string) {
	c.t.Helper()
	for line := c.says("list"); line != "listed"; line = c.from.Text() {
		lines = append(lines, line)
		if !c.from.Scan() {
			c.t.Fatalf("list: the program has ended: %v", c.from.Err())
		}
	}
	return lines
}

// shared is a machine that the C programs of this test see.
func shared(t *testing.T, profile string) *nvmlsim.Machine {
	t.Helper()
	m, _ := librarytest.Machine(t, librarytest.Profile(t, profile), "node-a")
	return m
}

func do(t *testing.T, m *nvmlsim.Machine, commands ...nvmlsim.Command) {
	t.Helper()
	for _, c := range commands {
		if _, err := m.Do(c); err != nil {
			t.Fatal(err)
		}
	}
}

// expected is the program's list, made within this process.
func expected(t *testing.T, m *nvmlsim.Machine) (lines []string) {
	t.Helper()
	lib := m.NVML()
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	defer lib.Shutdown()
	add := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
	processes := func(d nvml.Device) {
		infos, _ := d.GetComputeRunningProcesses()
		for _, p := range infos {
			add("    process %d %d", p.Pid, p.UsedGpuMemory)
		}
	}
	for i := range m.Profile().GPUs {
		d, _ := lib.DeviceGetHandleByIndex(i)
		name, _ := d.GetName()
		uuid, _ := d.GetUUID()
		pci, _ := d.GetPciInfo()
		memory, _ := d.GetMemoryInfo_v2()
		add("%d %s %s %s %d %d", i, name, uuid, text(pci.BusId[:]), memory.Total, memory.Reserved)
		processes(d)
		most, _ := d.GetMaxMigDeviceCount()
		for j := range most {
			mig, ret := d.GetMigDeviceHandleByIndex(j)
			if ret != nvml.SUCCESS {
				break
			}
			name, _ := mig.GetName()
			uuid, _ := mig.GetUUID()
			attributes, _ := mig.GetAttributes()
			add("  %d %s %s %d %d", j, name, uuid, attributes.MemorySizeMB, attributes.MultiprocessorCount)
			processes(mig)
		}
	}
	return lines
}

// smallest is the machine's smallest MIG profile.
func smallest(t *testing.T, m *nvmlsim.Machine) string {
	t.Helper()
	lib := m.NVML()
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	defer lib.Shutdown()
	d, _ := lib.DeviceGetHandleByIndex(0)
	info, ret := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_1_SLICE)
	if ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	return nvmlsim.GPUInstanceProfileName(d, info.Id)
}

func text(chars []int8) string {
	var b strings.Builder
	for _, c := range chars {
		if c == 0 {
			break
		}
		b.WriteByte(byte(c))
	}
	return b.String()
}

// Two C programs see the machine of this process, and all that happens to it.
func TestACProgramSeesTheMachine(t *testing.T) {
	library, program := librarytest.Build(t), compiled(t)
	for _, profile := range nvmlsim.Profiles() {
		t.Run(profile, func(t *testing.T) {
			m := shared(t, profile)
			clients := []*client{start(t, program), start(t, program)}
			same := func(when string) {
				t.Helper()
				want := expected(t, m)
				for i, c := range clients {
					if diff := cmp.Diff(want, c.list()); diff != "" {
						t.Errorf("%s, program %d (-want +got):\n%s", when, i, diff)
					}
				}
			}
			for _, c := range clients {
				c.want("opened", "open", library)
				c.want("Uninitialized", "shutdown")
				c.want("Success", "init")
			}
			same("at first")
			if m.Profile().GPU.MIG != nil {
				do(t, m, &nvmlsim.SetMIG{GPU: "0", Enabled: true})
				if !m.State().GPUs[0].MIG {
					for _, c := range clients {
						if _, err := m.Do(&nvmlsim.ResetGPU{GPU: "0"}); err == nil || !strings.Contains(err.Error(), "has a session open") {
							t.Errorf("a GPU that programs have open is reset: %v", err)
						}
						c.want("Success", "shutdown")
					}
					do(t, m, &nvmlsim.ResetGPU{GPU: "0"})
					for _, c := range clients {
						c.want("Success", "init")
					}
				}
				for range 2 {
					do(t, m, &nvmlsim.CreateMIG{GPU: "0", Profile: smallest(t, m)})
				}
				instance := m.State().GPUs[0].Instances[1].ID
				do(t, m, &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 5, Kind: nvmlsim.ProcessCompute, MemoryMiB: 3, Instance: &nvmlsim.Instance{GPU: instance}}})
				same("with MIG devices")
			}
			last := strconv.Itoa(len(m.Profile().GPUs) - 1)
			if last != "0" {
				do(t, m, &nvmlsim.AddProcess{GPU: last, Process: nvmlsim.Process{PID: 6, Kind: nvmlsim.ProcessCompute, MemoryMiB: 4}})
				same("with a process")
			}
			do(t, m, &nvmlsim.LoseGPU{GPU: last})
			lost := clients[0].list()
			if diff := cmp.Diff(lost, clients[1].list()); diff != "" || !strings.Contains(strings.Join(lost, "\n"), "GPU: GPU is lost") {
				t.Errorf("with a lost GPU: %v\n%s", lost, diff)
			}
			for _, c := range clients {
				c.want("Success", "shutdown")
				c.want("Uninitialized", "shutdown")
				c.want("closed", "close")
			}
		})
	}
}

// A driver's library is replaced under a running program, as by an in-place upgrade, and then the kernel's driver. The loader
// keeps the file that it has mapped: the program's own library is the old one until the program is a new one.
func TestALibraryIsReplacedUnderARunningProgram(t *testing.T) {
	m, program, folder := shared(t, "dgx-h100"), compiled(t), t.TempDir()
	before, after := m.DriverVersion(), "999.1.2"
	path := librarytest.Install(t, folder, before)
	running := start(t, program)
	running.want("opened", "open", path)
	running.want("Success", "init")

	librarytest.Install(t, folder, after)
	running.want("Success", "shutdown")
	running.want("Success", "init")
	another := start(t, program)
	another.want("opened", "open", path)
	another.want("Driver/library version mismatch", "init")

	running.want("Success", "shutdown")
	do(t, m, &nvmlsim.UnloadDriver{})
	another.want("Driver Not Loaded", "init")
	do(t, m, &nvmlsim.LoadDriver{Version: after})
	another.want("Success", "init")
	for range 2 {
		running.want("Driver/library version mismatch", "init")
		running.want("closed", "close")
		running.want("opened", "open", path)
	}
	if diff := cmp.Diff(expected(t, m), another.list()); diff != "" {
		t.Errorf("the new program (-want +got):\n%s", diff)
	}
	again := start(t, program)
	again.want("opened", "open", path)
	again.want("Success", "init")
}

func TestAnOlderDriverLacksFunctions(t *testing.T) {
	program := compiled(t)
	tests := map[string]map[string]string{
		"525.60.13":  {"nvmlDeviceGetGpuFabricInfo": "there", "nvmlDeviceGetCurrentClocksEventReasons": "lacking", "nvmlDeviceGetGpuFabricInfoV": "lacking"},
		"535.216.03": {"nvmlDeviceGetCurrentClocksEventReasons": "there", "nvmlDeviceGetGpuFabricInfoV": "lacking", "nvmlDeviceGetMarginTemperature": "lacking"},
		"570.172.08": {"nvmlDeviceGetMarginTemperature": "there", "nvmlDeviceGetAddressingMode": "lacking", "nvmlEventSetWait_v3": "lacking"},
		"580.65.06":  {"nvmlDeviceGetAddressingMode": "there", "nvmlInit_v2": "there"},
	}
	for version, functions := range tests {
		t.Run(version, func(t *testing.T) {
			c := start(t, program)
			c.want("opened", "open", librarytest.Install(t, t.TempDir(), version))
			for function, want := range functions {
				c.want(want, "lack", function)
			}
		})
	}
}

// A program of C has dynamic symbols too, and not the one that the version is written to.
func TestAnotherFileIsNoLibrary(t *testing.T) {
	if err := install.Library(compiled(t), filepath.Join(t.TempDir(), "to"), "570.1"); !errors.Is(err, install.ErrNotSimulated) || !strings.Contains(err.Error(), "nvmlsimDriver") {
		t.Errorf("%v, want %v that names the symbol", err, install.ErrNotSimulated)
	}
}

// The structures that Go fills in are as large as the header's.
func TestStructuresAreAsLargeAsTheHeaders(t *testing.T) {
	source := filepath.Join(t.TempDir(), "sizes.c")
	var b strings.Builder
	b.WriteString("#include \"nvml.h\"\n")
	for name, size := range sizes {
		fmt.Fprintf(&b, "_Static_assert(sizeof(%s) == %d, \"%s\");\n", name, size, name)
	}
	if err := os.WriteFile(source, []byte(b.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	compile(t, "-fsyntax-only", source)
}
