// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"encoding/binary"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

func TestABadCommandIsRefusedNamingFieldAndValue(t *testing.T) {
	hot, much := uint32(151), uint32(1401)
	process := func(p Process) Command { return &AddProcess{GPU: "0", Process: p} }
	two := uint32(2)
	tests := map[string]struct {
		profile string
		before  []Command
		command Command
		want    string
	}{
		"no GPU":                   {"t4", nil, &LoseGPU{}, `gpu lose: gpu: "": want an index from 0 to 3, or a UUID such as GPU-`},
		"index beyond the last":    {"t4", nil, &HangGPU{GPU: "4"}, `gpu: "4"`},
		"index below the first":    {"t4", nil, &RemoveGPU{GPU: "-1"}, `gpu: "-1"`},
		"UUID of no GPU":           {"t4", nil, &RaiseXID{GPU: "GPU-1", Code: 1}, `gpu: "GPU-1"`},
		"lost twice":               {"t4", []Command{&LoseGPU{GPU: "0"}}, &LoseGPU{GPU: "0"}, `gpu: "0": the GPU is lost or removed`},
		"restored, not lost":       {"t4", nil, &RestoreGPU{GPU: "0"}, "is not lost"},
		"released, not hung":       {"t4", nil, &UnhangGPU{GPU: "0"}, "does not hang"},
		"removed twice":            {"t4", []Command{&RemoveGPU{GPU: "0"}}, &RemoveGPU{GPU: "0"}, "there is none in that place"},
		"added twice":              {"t4", nil, &AddGPU{GPU: "0"}, "there is one in that place"},
		"slower than a minute":     {"t4", nil, &SlowGPU{GPU: "0", Milliseconds: 60_001}, "milliseconds: 60001"},
		"reset in use":             {"t4", []Command{process(Process{PID: 5, Kind: ProcessCompute})}, &ResetGPU{GPU: "0"}, "in use by process 5"},
		"XID 0":                    {"t4", nil, &RaiseXID{GPU: "0"}, "code: 0"},
		"XID of no instance":       {"dgx-h100", nil, &RaiseXID{GPU: "0", Code: 43, Instance: &Instance{GPU: 9}}, "instance: 9/0"},
		"no errors":                {"t4", nil, &CountECC{GPU: "0"}, "corrected, uncorrected: 0"},
		"hotter than hot":          {"t4", nil, &SetTemperature{GPU: "0", Celsius: &hot}, "celsius: 151"},
		"more power than a socket": {"dgx-h100", nil, &SetPower{GPU: "0", Watts: &much}, "watts: 1401"},
		"faster than the slot":     {"t4", nil, &SetPCIe{GPU: "0", Link: &PCIe{Generation: 4, Width: 1}}, "link.generation: 4: want 1 to 3"},
		"three lanes":              {"t4", nil, &SetPCIe{GPU: "0", Link: &PCIe{Generation: 1, Width: 3}}, "link.width: 3"},
		"fewer replays":            {"t4", nil, &SetPCIe{GPU: "0", Replays: -1}, "replays: -1"},
		"throttled by nobody":      {"t4", nil, &SetThrottle{GPU: "0", Reasons: []string{"mood"}}, `reasons: "mood": want some of hw-power-brake`},
		"more load than all":       {"t4", nil, &SetLoad{GPU: "0", Load: Load{SM: 101}}, "load.sm: 101: want 0 to 100"},
		"load of no instance":      {"dgx-h100", nil, &SetLoad{GPU: "0", Instance: &two}, "instance: 2: ERROR_NOT_FOUND"},
		"recovery of no kind":      {"t4", nil, &SetRecovery{GPU: "0", Action: "pray"}, `action: "pray": want one of drain-and-reset, `},
		"rows of a T4":             {"t4", nil, &RemapRows{GPU: "0", Rows: Rows{Corrected: 1}}, "before Ampere"},
		"fewer rows":               {"dgx-h100", nil, &RemapRows{GPU: "0", Rows: Rows{Uncorrected: -1}}, "uncorrected: -1"},
		"no process ID":            {"t4", nil, process(Process{Kind: ProcessCompute}), "pid: 0"},
		"process of no kind":       {"t4", nil, process(Process{PID: 1, Kind: "game"}), `kind: "game"`},
		"process twice":            {"t4", []Command{process(Process{PID: 1, Kind: ProcessCompute})}, process(Process{PID: 1, Kind: ProcessMPS}), "pid: 1: the process is on the GPU already"},
		"process without memory":   {"t4", nil, process(Process{PID: 1, Kind: ProcessCompute, MemoryMiB: 15360}), "memoryMiB: 15360: only "},
		"process on a prohibited":  {"t4", []Command{&SetComputeMode{GPU: "0", Mode: ComputeProhibited}}, process(Process{PID: 1, Kind: ProcessCompute}), "compute mode is Prohibited"},
		"second on an exclusive": {
			"t4",
			[]Command{&SetComputeMode{GPU: "0", Mode: ComputeExclusiveProcess}, process(Process{PID: 1, Kind: ProcessCompute})},
			process(Process{PID: 2, Kind: ProcessCompute}), "process 1 has it",
		},
		"process beside instances": {"dgx-h100", []Command{&SetMIG{GPU: "0", Enabled: true}}, process(Process{PID: 1, Kind: ProcessCompute}), "instance: none: the GPU has MIG enabled"},
		"process in no instance":   {"dgx-h100", []Command{&SetMIG{GPU: "0", Enabled: true}}, process(Process{PID: 1, Kind: ProcessCompute, Instance: &Instance{GPU: 7}}), "instance: 7/0"},
		"instance without MIG":     {"dgx-h100", nil, process(Process{PID: 1, Kind: ProcessCompute, Instance: &Instance{}}), "does not have MIG enabled"},
		"process that is not":      {"t4", nil, &RemoveProcess{GPU: "0", PID: 3}, "pid: 3"},
		"compute mode of no kind":  {"t4", nil, &SetComputeMode{GPU: "0", Mode: "Exclusive_Thread"}, `mode: "Exclusive_Thread": want one of Default, Exclusive_Process, Prohibited`},
		"compute mode under MIG":   {"dgx-h100", []Command{&SetMIG{GPU: "0", Enabled: true}}, &SetComputeMode{GPU: "0", Mode: ComputeProhibited}, "ERROR_NOT_SUPPORTED"},
		"time slice of no kind":    {"t4", nil, &SetTimeSlice{GPU: "0", Time: "Endless"}, `time: "Endless": want Short, Medium, Long`},
		"more leaked than there":   {"t4", nil, &LeakMemory{GPU: "0", MemoryMiB: 15360}, "memoryMiB: 15360: only "},
		"daemon without a name":    {"t4", nil, &StartMPS{Daemon{GPUs: []string{gpuUUID("node-a", 0)}}}, "name: want one"},
		"daemon without GPUs":      {"t4", nil, &StartMPS{Daemon{Name: "a"}}, "gpus: want at least one"},
		"daemon of no GPU":         {"t4", nil, &StartMPS{Daemon{Name: "a", GPUs: []string{"GPU-1"}}}, `gpus: "GPU-1"`},
		"daemon with extra limits": {"t4", nil, &StartMPS{Daemon{Name: "a", GPUs: []string{"GPU-1"}, MemoryMiB: []int64{1, 2}}}, "memoryMiB: 2 limits for 1 GPUs"},
		"daemon beyond all":        {"t4", nil, &StartMPS{Daemon{Name: "a", GPUs: []string{"GPU-1"}, ActiveThreadPercentage: 101}}, "activeThreadPercentage: 101"},
		"daemon twice":             {"t4", []Command{daemon("a", 0)}, daemon("a", 1), `name: "a": the daemon is running already`},
		"two daemons for a GPU":    {"t4", []Command{daemon("a", 0)}, daemon("b", 0), "daemon a has it"},
		"daemon that is not":       {"t4", nil, &StopMPS{Daemon: "a"}, `daemon: "a": there is none`},
		"daemon without a driver":  {"t4", []Command{&UnloadDriver{}}, daemon("a", 0), "the driver is not loaded"},
		"partition a T4":           {"t4", nil, &SetMIG{GPU: "0", Enabled: true}, "Tesla T4 can't be partitioned"},
		"MIG in use":               {"dgx-h100", []Command{process(Process{PID: 1, Kind: ProcessCompute})}, &SetMIG{GPU: "0", Enabled: true}, "enabled: true: ERROR_IN_USE"},
		"profile of no kind":       {"dgx-h100", []Command{&SetMIG{GPU: "0", Enabled: true}}, &CreateMIG{GPU: "0", Profile: "1g.5gb"}, `profile: "1g.5gb": want one of [1g.10gb`},
		"where none starts":        {"dgx-h100", []Command{&SetMIG{GPU: "0", Enabled: true}}, &CreateMIG{GPU: "0", Profile: "3g.40gb", Start: &two}, "start: 2: want one of [0 4] for 3g.40gb"},
		"slices of no kind":        {"dgx-h100", []Command{&SetMIG{GPU: "0", Enabled: true}}, &CreateMIG{GPU: "0", Profile: "3g.40gb", Compute: []uint32{4}}, "compute: 4: 3g.40gb has no compute instance of so many slices"},
		"more slices than it has":  {"dgx-h100", []Command{&SetMIG{GPU: "0", Enabled: true}}, &CreateMIG{GPU: "0", Profile: "3g.40gb", Compute: []uint32{2, 2}}, "compute: 2: ERROR_INSUFFICIENT_RESOURCES"},
		"instance, MIG off":        {"dgx-h100", nil, &CreateMIG{GPU: "0", Profile: "1g.10gb"}, "profile: 1g.10gb: ERROR_NOT_SUPPORTED"},
		"destroy nothing":          {"dgx-h100", []Command{&SetMIG{GPU: "0", Enabled: true}}, &DestroyMIG{GPU: "0", Instance: 3}, "instance: 3: ERROR_NOT_FOUND"},
		"driver in use":            {"t4", []Command{process(Process{PID: 8, Kind: ProcessGraphics})}, &UnloadDriver{}, "GPU 0 has process 8"},
		"driver unloaded twice":    {"t4", []Command{&UnloadDriver{}}, &UnloadDriver{}, "is not loaded"},
		"driver loaded twice":      {"t4", nil, &LoadDriver{}, "is loaded already"},
		"driver of no version":     {"t4", []Command{&UnloadDriver{}}, &LoadDriver{Version: "new"}, `version: "new": want one such as `},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			m := mustNew(t, test.profile).machine
			for _, c := range test.before {
				do(t, m, c)
			}
			before := m.State()
			_, err := m.Do(test.command)
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.HasPrefix(err.Error(), test.command.Name()+": ") {
				t.Errorf("error %v, want one of %s with %q", err, test.command.Name(), test.want)
			}
			if m.State() != before {
				t.Error("the state has changed")
			}
		})
	}
}

func TestProcessesUseMemory(t *testing.T) {
	lib := open(t, mustNew(t, "t4"))
	d := lib.devices[0]
	for pid, kind := range []ProcessKind{ProcessCompute, ProcessGraphics, ProcessMPS} {
		do(t, lib.machine, &AddProcess{GPU: "0", Process: Process{PID: uint32(pid + 1), Kind: kind, MemoryMiB: 100}})
	}
	for name, list := range map[string]func() ([]nvml.ProcessInfo, nvml.Return){
		"1": d.GetComputeRunningProcesses, "2": d.GetGraphicsRunningProcesses, "3": d.GetMPSComputeRunningProcesses,
	} {
		got, _ := list()
		want := []nvml.ProcessInfo{{Pid: uint32(name[0] - '0'), UsedGpuMemory: 100 * mib, GpuInstanceId: noInstance, ComputeInstanceId: noInstance}}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	}
	memory, _ := d.GetMemoryInfo()
	if want := (d.model.ReservedMiB + 300) * mib; memory.Used != want || memory.Used+memory.Free != memory.Total {
		t.Errorf("memory %+v, want %d used", memory, want)
	}
	v2, _ := d.GetMemoryInfo_v2()
	if v2.Used != 300*mib || v2.Used+v2.Free+v2.Reserved != v2.Total {
		t.Errorf("memory v2 %+v", v2)
	}
}

func TestHealthIsWhatItWasSetTo(t *testing.T) {
	lib := open(t, mustNew(t, "dgx-h100"))
	d, m := lib.devices[0], lib.machine
	hot, watts := uint32(93), uint32(650)
	for _, c := range []Command{
		&SetTemperature{GPU: "0", Celsius: &hot}, &SetPower{GPU: "0", Watts: &watts},
		&SetPCIe{GPU: "0", Link: &PCIe{Generation: 3, Width: 8}, Replays: 12},
		&SetThrottle{GPU: "0", Reasons: []string{"hw-thermal-slowdown", "sw-power-cap"}},
		&CountECC{GPU: "0", ECCCounts: ECCCounts{Corrected: 5, Uncorrected: 2}},
		&RemapRows{GPU: "0", Rows: Rows{Corrected: 1, Uncorrected: 2, Pending: true, Failed: true}},
		&SetRecovery{GPU: "0", Action: RecoveryDrainAndReset},
	} {
		do(t, m, c)
	}
	type health struct {
		Temperature, Power        uint32
		Generation, Width, Replay int
		Throttle                  uint64
		Corrected, Uncorrected    uint64
		DRAM                      uint64
		Remapped                  [2]int
		Pending, Failed           bool
		Fields                    []uint64
	}
	read := func(d *device) (h health) {
		h.Temperature, _ = d.GetTemperature(nvml.TEMPERATURE_GPU)
		h.Power, _ = d.GetPowerUsage()
		h.Generation, _ = d.GetCurrPcieLinkGeneration()
		h.Width, _ = d.GetCurrPcieLinkWidth()
		h.Replay, _ = d.GetPcieReplayCounter()
		h.Throttle, _ = d.GetCurrentClocksEventReasons()
		h.Corrected, _ = d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_CORRECTED, nvml.VOLATILE_ECC)
		h.Uncorrected, _ = d.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.AGGREGATE_ECC)
		h.DRAM, _ = d.GetMemoryErrorCounter(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC, nvml.MEMORY_LOCATION_DRAM)
		h.Remapped[0], h.Remapped[1], h.Pending, h.Failed, _ = d.GetRemappedRows()
		values := []nvml.FieldValue{
			{FieldId: nvml.FI_DEV_ECC_DBE_VOL_TOTAL},
			{FieldId: nvml.FI_DEV_REMAPPED_PENDING},
			{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION},
			{FieldId: nvml.FI_DEV_ECC_CURRENT},
			{FieldId: nvml.FI_MAX}, // of a driver to come
		}
		d.GetFieldValues(values)
		for _, v := range values {
			h.Fields = append(h.Fields, binary.NativeEndian.Uint64(v.Value[:])*100+uint64(v.NvmlReturn))
		}
		return h
	}
	want := health{
		93, 650_000, 3, 8, 12, nvml.ClocksEventReasonGpuIdle | nvml.ClocksThrottleReasonHwThermalSlowdown | nvml.ClocksEventReasonSwPowerCap,
		5, 2, 2,
		[2]int{1, 2},
		true, true,
		[]uint64{200, 100, 400, uint64(nvml.ERROR_NOT_SUPPORTED), uint64(nvml.ERROR_INVALID_ARGUMENT)},
	}
	if diff := cmp.Diff(want, read(d)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	sound := health{29, 68_000, 5, 16, 0, nvml.ClocksEventReasonGpuIdle, 0, 0, 0, [2]int{}, false, false, []uint64{0, 0, 0, uint64(nvml.ERROR_NOT_SUPPORTED), uint64(nvml.ERROR_INVALID_ARGUMENT)}}
	if diff := cmp.Diff(sound, read(lib.devices[1])); diff != "" {
		t.Errorf("the neighbour (-want +got):\n%s", diff)
	}
	do(t, m, &ResetGPU{GPU: "0"})
	after := read(d)
	if after.Corrected != 0 || after.Uncorrected != 2 || after.Pending || !after.Failed || after.Throttle != nvml.ClocksEventReasonGpuIdle || after.Fields[2] != 0 {
		t.Errorf("after a reset %+v, want the volatile errors, the pending row and the action gone", after)
	}
}
