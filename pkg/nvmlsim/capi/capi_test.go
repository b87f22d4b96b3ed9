// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package capi

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"stowage.dev/stowage/pkg/nvmlsim"
	"stowage.dev/stowage/pkg/nvmlsim/librarytest"
)

// The tests call the exported functions as C does, with the memory of this process.

// session opens one on a machine of that profile, in a folder of its own.
func session(t *testing.T, profile string) *nvmlsim.Machine {
	t.Helper()
	machine, _ := librarytest.Machine(t, librarytest.Profile(t, profile), "node-a")
	want(t, "nvmlInit_v2", nvmlInit_v2(), nvml.SUCCESS)
	t.Cleanup(func() {
		for process.sessions > 0 {
			nvmlShutdown()
		}
	})
	return machine
}

func do(t *testing.T, m *nvmlsim.Machine, commands ...nvmlsim.Command) {
	t.Helper()
	for _, c := range commands {
		if _, err := m.Do(c); err != nil {
			t.Fatal(err)
		}
	}
}

func want(t *testing.T, call string, got int32, want nvml.Return) {
	t.Helper()
	if nvml.Return(got) != want {
		t.Errorf("%s: %v, want %v", call, nvml.Return(got), want)
	}
}

func gpu(t *testing.T, index uint32) (handle uintptr) {
	t.Helper()
	want(t, "nvmlDeviceGetHandleByIndex_v2", nvmlDeviceGetHandleByIndex_v2(index, unsafe.Pointer(&handle)), nvml.SUCCESS)
	return handle
}

func TestNothingIsAnsweredOutsideOfASession(t *testing.T) {
	session(t, "dgx-h100")
	device := gpu(t, 0)
	want(t, "nvmlInit", nvmlInit(), nvml.SUCCESS)
	want(t, "the first of two nvmlShutdown", nvmlShutdown(), nvml.SUCCESS)
	var n uint32
	want(t, "a call in the session that is left", nvmlDeviceGetMinorNumber(device, unsafe.Pointer(&n)), nvml.SUCCESS)
	want(t, "the second nvmlShutdown", nvmlShutdown(), nvml.SUCCESS)
	for call, got := range map[string]int32{
		"nvmlShutdown":              nvmlShutdown(),
		"nvmlDeviceGetCount_v2":     nvmlDeviceGetCount_v2(unsafe.Pointer(&n)),
		"nvmlDeviceGetMinorNumber":  nvmlDeviceGetMinorNumber(device, unsafe.Pointer(&n)),
		"nvmlDeviceGetFieldValues":  nvmlDeviceGetFieldValues(device, 1, unsafe.Pointer(&nvml.FieldValue{})),
		"nvmlEventSetCreate":        nvmlEventSetCreate(unsafe.Pointer(&device)),
		"what is not simulated":     nvmlsimUnanswered(device),
		"a kind that is not":        nvmlsimUnansweredHandle(),
		"a system call that is not": nvmlsimUnansweredSystem(),
		"with a null pointer":       nvmlDeviceGetCount_v2(nil),
	} {
		want(t, call, got, nvml.ERROR_UNINITIALIZED)
	}
	want(t, "nvmlInit_v2", nvmlInit_v2(), nvml.SUCCESS)
	want(t, "a GPU's handle in the next session", nvmlDeviceGetMinorNumber(device, unsafe.Pointer(&n)), nvml.SUCCESS)
}

func TestHandlesThatAreNoneAreInvalidArguments(t *testing.T) {
	m := session(t, "dgx-h100")
	do(t, m, &nvmlsim.SetMIG{GPU: "1", Enabled: true}, &nvmlsim.CreateMIG{GPU: "1", Profile: "1g.10gb"})
	device, partitioned := gpu(t, 0), gpu(t, 1)
	var set, freed, mig, instance, compute, sample uintptr
	for call, got := range map[string]int32{
		"nvmlEventSetCreate":                 nvmlEventSetCreate(unsafe.Pointer(&set)),
		"a second nvmlEventSetCreate":        nvmlEventSetCreate(unsafe.Pointer(&freed)),
		"nvmlGpmSampleAlloc":                 nvmlGpmSampleAlloc(unsafe.Pointer(&sample)),
		"nvmlDeviceGetMigDeviceHandleByI...": nvmlDeviceGetMigDeviceHandleByIndex(partitioned, 0, unsafe.Pointer(&mig)),
	} {
		want(t, call, got, nvml.SUCCESS)
	}
	var id uint32
	want(t, "nvmlDeviceGetGpuInstanceId", nvmlDeviceGetGpuInstanceId(mig, unsafe.Pointer(&id)), nvml.SUCCESS)
	want(t, "nvmlDeviceGetGpuInstanceById", nvmlDeviceGetGpuInstanceById(partitioned, id, unsafe.Pointer(&instance)), nvml.SUCCESS)
	want(t, "nvmlGpuInstanceGetComputeInstanceById", nvmlGpuInstanceGetComputeInstanceById(instance, 0, unsafe.Pointer(&compute)), nvml.SUCCESS)
	want(t, "nvmlEventSetFree", nvmlEventSetFree(freed), nvml.SUCCESS)
	calls := map[string]func(uintptr) int32{
		"nvmlDeviceGetIndex": func(h uintptr) int32 { return nvmlDeviceGetIndex(h, unsafe.Pointer(&id)) },
		"nvmlDeviceGetP2PStatus, its second": func(h uintptr) int32 {
			return nvmlDeviceGetP2PStatus(device, h, int32(nvml.P2P_CAPS_INDEX_NVLINK), unsafe.Pointer(&id))
		},
		"nvmlEventSetWait_v2":               func(h uintptr) int32 { return nvmlEventSetWait_v2(h, unsafe.Pointer(&eventData{}), 0) },
		"nvmlDeviceRegisterEvents, its set": func(h uintptr) int32 { return nvmlDeviceRegisterEvents(device, 0, h) },
		"nvmlGpuInstanceGetInfo":            func(h uintptr) int32 { return nvmlGpuInstanceGetInfo(h, unsafe.Pointer(&gpuInstanceInfo{})) },
		"nvmlComputeInstanceGetInfo_v2":     func(h uintptr) int32 { return nvmlComputeInstanceGetInfo_v2(h, unsafe.Pointer(&computeInstanceInfo{})) },
		"nvmlGpuInstanceDestroy":            nvmlGpuInstanceDestroy,
		"nvmlComputeInstanceDestroy":        nvmlComputeInstanceDestroy,
		"nvmlEventSetFree":                  nvmlEventSetFree,
		"nvmlDeviceGetIrqNum, unanswered":   nvmlsimUnanswered,
		"nvmlGpmSampleGet":                  func(h uintptr) int32 { return nvmlGpmSampleGet(h, sample) },
		"nvmlGpmSampleGet, its sample":      func(h uintptr) int32 { return nvmlGpmSampleGet(device, h) },
		"nvmlGpmMigSampleGet, its sample":   func(h uintptr) int32 { return nvmlGpmMigSampleGet(partitioned, id, h) },
		"nvmlGpmQueryDeviceSupport": func(h uintptr) int32 {
			return nvmlGpmQueryDeviceSupport(h, unsafe.Pointer(&nvml.GpmSupport{Version: 1}))
		},
		"nvmlGpmMetricsGet, its first sample":  func(h uintptr) int32 { return gpmMetrics(h, sample, nvml.GPM_METRIC_SM_UTIL).ret },
		"nvmlGpmMetricsGet, its second sample": func(h uintptr) int32 { return gpmMetrics(sample, h, nvml.GPM_METRIC_SM_UTIL).ret },
		"nvmlGpmSampleFree":                    nvmlGpmSampleFree,
	}
	kinds := map[string]uintptr{"device": device, "MIG device": mig, "set": set, "instance": instance, "compute": compute, "sample": sample}
	takes := map[string][]string{
		"nvmlDeviceGetIndex": {"device", "MIG device"}, "nvmlDeviceGetIrqNum, unanswered": {"device", "MIG device"},
		"nvmlDeviceGetP2PStatus, its second": {"device"}, "nvmlEventSetWait_v2": {"set"}, "nvmlDeviceRegisterEvents, its set": {"set"},
		"nvmlGpuInstanceGetInfo": {"instance"}, "nvmlComputeInstanceGetInfo_v2": {"compute"},
		"nvmlGpuInstanceDestroy": {"instance"}, "nvmlComputeInstanceDestroy": {"compute"}, "nvmlEventSetFree": {"set"},
		"nvmlGpmSampleGet": {"device", "MIG device"}, "nvmlGpmSampleGet, its sample": {"sample"}, "nvmlGpmMigSampleGet, its sample": {"sample"},
		"nvmlGpmQueryDeviceSupport": {"device", "MIG device"}, "nvmlGpmSampleFree": {"sample"},
		"nvmlGpmMetricsGet, its first sample": {"sample"}, "nvmlGpmMetricsGet, its second sample": {"sample"},
	}
	for name, call := range calls {
		for none, handle := range map[string]uintptr{"null": 0, "one": 1, "an odd address": device + 1, "all ones": ^uintptr(0), "a freed set": freed} {
			want(t, name+" of "+none, call(handle), nvml.ERROR_INVALID_ARGUMENT)
		}
		for kind, handle := range kinds {
			if !slices.Contains(takes[name], kind) {
				want(t, name+" of a "+kind, call(handle), nvml.ERROR_INVALID_ARGUMENT)
			}
		}
	}
	// All of them are there as before.
	want(t, "nvmlComputeInstanceDestroy", nvmlComputeInstanceDestroy(compute), nvml.SUCCESS)
	want(t, "nvmlComputeInstanceDestroy again", nvmlComputeInstanceDestroy(compute), nvml.ERROR_INVALID_ARGUMENT)
	want(t, "the MIG device whose compute instance is gone", nvmlDeviceGetIndex(mig, unsafe.Pointer(&id)), nvml.ERROR_NOT_FOUND)
	want(t, "nvmlGpuInstanceDestroy", nvmlGpuInstanceDestroy(instance), nvml.SUCCESS)
	want(t, "nvmlEventSetFree", nvmlEventSetFree(set), nvml.SUCCESS)
}

// An address stands for one object for ever. The old one is freed at once, and after many others.
func TestASetThatIsFreedTwiceLeavesTheOthers(t *testing.T) {
	session(t, "t4")
	var sets []uintptr
	create := func() (set uintptr) {
		t.Helper()
		want(t, "nvmlEventSetCreate", nvmlEventSetCreate(unsafe.Pointer(&set)), nvml.SUCCESS)
		return set
	}
	for range 100 {
		old := create()
		want(t, "nvmlEventSetFree", nvmlEventSetFree(old), nvml.SUCCESS)
		for range 2 {
			sets = append(sets, create())
		}
		want(t, "nvmlEventSetFree again", nvmlEventSetFree(old), nvml.ERROR_INVALID_ARGUMENT)
	}
	for _, set := range sets {
		want(t, "nvmlEventSetWait_v2", nvmlEventSetWait_v2(set, unsafe.Pointer(&eventData{}), 0), nvml.ERROR_TIMEOUT)
	}
}

// Of two threads that destroy an instance one does, and what is made meanwhile stays.
func TestAnInstanceIsDestroyedOnce(t *testing.T) {
	m := session(t, "dgx-h100")
	do(t, m, &nvmlsim.SetMIG{GPU: "0", Enabled: true})
	device := gpu(t, 0)
	for range 20 {
		var instance, set uintptr
		want(t, "create", nvmlDeviceCreateGpuInstance(device, 19, unsafe.Pointer(&instance)), nvml.SUCCESS)
		answered := make(chan nvml.Return)
		for range 2 {
			go func() { answered <- nvml.Return(nvmlGpuInstanceDestroy(instance)) }()
		}
		want(t, "set", nvmlEventSetCreate(unsafe.Pointer(&set)), nvml.SUCCESS)
		first, second := <-answered, <-answered
		if first != nvml.SUCCESS {
			first, second = second, first
		}
		if first != nvml.SUCCESS || second != nvml.ERROR_NOT_FOUND && second != nvml.ERROR_INVALID_ARGUMENT {
			t.Fatalf("%v and %v, want that one destroys it and the other does not find it", first, second)
		}
		want(t, "nvmlEventSetFree", nvmlEventSetFree(set), nvml.SUCCESS)
	}
	if left := len(process.handles.objects); left != 1 {
		t.Errorf("%d handles are left, want the GPU's", left)
	}
}

// gpmAnswer of nvmlGpmMetricsGet.
type gpmAnswer struct {
	ret    int32
	values map[nvml.GpmMetricId]float64
	// unknown are those without a value, and next is the one behind what was asked for.
	unknown []nvml.GpmMetricId
	next    uint32
}

// gpmMetrics asks for these metrics of two samples.
func gpmMetrics(first, second uintptr, ids ...nvml.GpmMetricId) gpmAnswer {
	get := gpmMetricsGet{version: nvml.GPM_METRICS_GET_VERSION, count: uint32(len(ids)), sample1: first, sample2: second}
	for i, id := range ids {
		get.metrics[i].id, get.metrics[i].names = uint32(id), [3]uintptr{1, 2, 3}
	}
	get.metrics[len(ids)].ret = 77
	answer := gpmAnswer{ret: nvmlGpmMetricsGet(unsafe.Pointer(&get)), values: map[nvml.GpmMetricId]float64{}, next: get.metrics[len(ids)].ret}
	for i, id := range ids {
		if m := get.metrics[i]; m.ret != uint32(nvml.SUCCESS) || m.names != [3]uintptr{} {
			answer.unknown = append(answer.unknown, id)
		} else {
			answer.values[id] = m.value
		}
	}
	return answer
}

func TestThePerformanceMonitorIsAnswered(t *testing.T) {
	m := session(t, "dgx-h100")
	instance := uint32(0)
	do(t, m, &nvmlsim.SetLoad{GPU: "0", Load: nvmlsim.Load{SM: 40, Tensor: 30}}, &nvmlsim.SetMIG{GPU: "1", Enabled: true})
	made, err := m.Do(&nvmlsim.CreateMIG{GPU: "1", Profile: "1g.10gb"})
	if err != nil {
		t.Fatal(err)
	}
	instance = made.MIG.Instance.GPU
	do(t, m, &nvmlsim.SetLoad{GPU: "1", Instance: &instance, Load: nvmlsim.Load{SM: 7}})
	device, partitioned := gpu(t, 0), gpu(t, 1)
	support := nvml.GpmSupport{Version: nvml.GPM_SUPPORT_VERSION}
	want(t, "nvmlGpmQueryDeviceSupport", nvmlGpmQueryDeviceSupport(device, unsafe.Pointer(&support)), nvml.SUCCESS)
	if support.IsSupportedDevice != 1 {
		t.Error("an H100 has no performance monitor")
	}
	support.Version = 2
	want(t, "its second version", nvmlGpmQueryDeviceSupport(device, unsafe.Pointer(&support)), nvml.ERROR_ARGUMENT_VERSION_MISMATCH)
	want(t, "without a structure", nvmlGpmQueryDeviceSupport(device, nil), nvml.ERROR_INVALID_ARGUMENT)
	var samples [3]uintptr
	for i := range samples {
		want(t, "nvmlGpmSampleAlloc", nvmlGpmSampleAlloc(unsafe.Pointer(&samples[i])), nvml.SUCCESS)
	}
	want(t, "nvmlGpmMetricsGet of nothing", gpmMetrics(samples[0], samples[1]).ret, nvml.ERROR_INVALID_ARGUMENT)
	sms, tensor, unknown := nvml.GPM_METRIC_SM_UTIL, nvml.GPM_METRIC_ANY_TENSOR_UTIL, nvml.GPM_METRIC_FP64_UTIL
	for _, tc := range []struct {
		name string
		get  func(sample uintptr) int32
		want map[nvml.GpmMetricId]float64
	}{
		{"a GPU", func(sample uintptr) int32 { return nvmlGpmSampleGet(device, sample) }, map[nvml.GpmMetricId]float64{sms: 40, tensor: 30}},
		{"an instance", func(sample uintptr) int32 { return nvmlGpmMigSampleGet(partitioned, instance, sample) }, map[nvml.GpmMetricId]float64{sms: 7, tensor: 0}},
	} {
		want(t, tc.name, tc.get(samples[0]), nvml.SUCCESS)
		want(t, tc.name+" again", tc.get(samples[1]), nvml.SUCCESS)
		got := gpmMetrics(samples[0], samples[1], sms, tensor, unknown)
		if got.ret != int32(nvml.SUCCESS) || !maps.Equal(got.values, tc.want) || !slices.Equal(got.unknown, []nvml.GpmMetricId{unknown}) || got.next != 77 {
			t.Errorf("%s: %+v, want %v and nothing behind them", tc.name, got, tc.want)
		}
	}
	want(t, "samples of two GPUs", nvmlGpmSampleGet(device, samples[2]), nvml.SUCCESS)
	want(t, "samples of two GPUs", gpmMetrics(samples[1], samples[2], sms).ret, nvml.ERROR_INVALID_ARGUMENT)
	want(t, "an instance that is not there", nvmlGpmMigSampleGet(partitioned, 99, samples[0]), nvml.ERROR_INVALID_ARGUMENT)
	get := gpmMetricsGet{version: 2, sample1: samples[0], sample2: samples[1]}
	want(t, "another version", nvmlGpmMetricsGet(unsafe.Pointer(&get)), nvml.ERROR_ARGUMENT_VERSION_MISMATCH)
	get.version, get.count = nvml.GPM_METRICS_GET_VERSION, uint32(len(get.metrics))+1
	want(t, "more metrics than there are", nvmlGpmMetricsGet(unsafe.Pointer(&get)), nvml.ERROR_INVALID_ARGUMENT)
	want(t, "nvmlGpmSampleFree", nvmlGpmSampleFree(samples[0]), nvml.SUCCESS)
	if object := process.handles.find(samples[0]); object != nil {
		t.Errorf("a sample that was freed is kept: %v", object)
	}
	want(t, "nvmlGpmSampleFree again", nvmlGpmSampleFree(samples[0]), nvml.ERROR_INVALID_ARGUMENT)
	want(t, "nvmlShutdown", nvmlShutdown(), nvml.SUCCESS)
	want(t, "nvmlInit_v2", nvmlInit_v2(), nvml.SUCCESS)
	want(t, "a sample of the session before", nvmlGpmSampleFree(samples[1]), nvml.ERROR_INVALID_ARGUMENT)
}

func TestNullPointersAreInvalidArguments(t *testing.T) {
	session(t, "dgx-h100")
	device := gpu(t, 0)
	var word uint32
	for call, got := range map[string]int32{
		"nvmlDeviceGetName":                          nvmlDeviceGetName(device, nil, 64),
		"nvmlDeviceGetHandleByUUID":                  nvmlDeviceGetHandleByUUID(nil, unsafe.Pointer(&device)),
		"nvmlDeviceGetMigMode, the second":           nvmlDeviceGetMigMode(device, unsafe.Pointer(&word), nil),
		"nvmlDeviceGetFieldValues":                   nvmlDeviceGetFieldValues(device, 1, nil),
		"nvmlDeviceGetFieldValues, fewer than none":  nvmlDeviceGetFieldValues(device, -1, unsafe.Pointer(&nvml.FieldValue{})),
		"nvmlDeviceGetComputeRunningProcesses_v3":    nvmlDeviceGetComputeRunningProcesses_v3(device, nil, nil),
		"nvmlDeviceGetGpuInstances":                  nvmlDeviceGetGpuInstances(device, 0, nil, unsafe.Pointer(&word)),
		"nvmlDeviceGetGpuInstancePossiblePlacements": nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, 0, nil, nil),
		"nvmlDeviceGetMemoryInfo_v2":                 nvmlDeviceGetMemoryInfo_v2(device, nil),
		"nvmlEventSetCreate":                         nvmlEventSetCreate(nil),
	} {
		want(t, call, got, nvml.ERROR_INVALID_ARGUMENT)
	}
}

func TestATextThatDoesNotFitIsNotWritten(t *testing.T) {
	session(t, "dgx-h100")
	device := gpu(t, 0)
	const uuidLength = 40 // "GPU-" and 36 characters
	for _, room := range []uint32{0, 1, uuidLength} {
		buffer := bytes.Repeat([]byte{'x'}, 64)
		want(t, fmt.Sprintf("room for %d", room), nvmlDeviceGetUUID(device, unsafe.Pointer(&buffer[0]), room), nvml.ERROR_INSUFFICIENT_SIZE)
		if !bytes.Equal(buffer, bytes.Repeat([]byte{'x'}, 64)) {
			t.Errorf("room for %d: %q was written", room, buffer)
		}
	}
	buffer := bytes.Repeat([]byte{'x'}, 64)
	want(t, "room for all of it", nvmlDeviceGetUUID(device, unsafe.Pointer(&buffer[0]), uuidLength+1), nvml.SUCCESS)
	if !strings.HasPrefix(string(buffer), "GPU-") || buffer[uuidLength] != 0 || buffer[uuidLength+1] != 'x' {
		t.Errorf("%q, want a UUID, its end, and nothing behind", buffer)
	}
}

func TestProcessesAreCounted(t *testing.T) {
	m := session(t, "dgx-h100")
	device := gpu(t, 0)
	count := uint32(0)
	want(t, "none", nvmlDeviceGetComputeRunningProcesses_v3(device, unsafe.Pointer(&count), nil), nvml.SUCCESS)
	for pid := range uint32(2) {
		do(t, m, &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 100 + pid, Kind: nvmlsim.ProcessCompute, MemoryMiB: 5}})
	}
	infos := [3]nvml.ProcessInfo{2: {Pid: 7}}
	for _, room := range []uint32{0, 1} {
		count = room
		want(t, "too little room", nvmlDeviceGetComputeRunningProcesses_v3(device, unsafe.Pointer(&count), unsafe.Pointer(&infos)), nvml.ERROR_INSUFFICIENT_SIZE)
		if count != 2 || infos[0].Pid != 0 {
			t.Errorf("room for %d: count %d, %v, want 2 and nothing written", room, count, infos)
		}
	}
	want(t, "room, and no array", nvmlDeviceGetComputeRunningProcesses_v3(device, unsafe.Pointer(&count), nil), nvml.ERROR_INVALID_ARGUMENT)
	count = 3
	want(t, "more room", nvmlDeviceGetComputeRunningProcesses_v3(device, unsafe.Pointer(&count), unsafe.Pointer(&infos)), nvml.SUCCESS)
	if count != 2 || infos[0].Pid != 100 || infos[1].Pid != 101 || infos[1].UsedGpuMemory != 5<<20 || infos[1].GpuInstanceId != 0xFFFFFFFF || infos[2].Pid != 7 {
		t.Errorf("count %d, %v", count, infos)
	}
	old := [3]nvml.ProcessInfo_v1{2: {Pid: 7}}
	count = 2
	want(t, "the first version", nvmlDeviceGetComputeRunningProcesses(device, unsafe.Pointer(&count), unsafe.Pointer(&old)), nvml.SUCCESS)
	if old != [3]nvml.ProcessInfo_v1{{Pid: 100, UsedGpuMemory: 5 << 20}, {Pid: 101, UsedGpuMemory: 5 << 20}, {Pid: 7}} {
		t.Errorf("the first version: %v", old)
	}
}

// Each versioned structure is taken in its own version, and in no other.
func TestTheVersionOfAStructureIsItsSizeAndNumber(t *testing.T) {
	m := session(t, "dgx-h100")
	do(t, m, &nvmlsim.SetMIG{GPU: "0", Enabled: true}, &nvmlsim.CreateMIG{GPU: "0", Profile: "1g.10gb"})
	device := gpu(t, 0)
	var instance uintptr
	var id uint32
	var mig uintptr
	want(t, "MIG device", nvmlDeviceGetMigDeviceHandleByIndex(device, 0, unsafe.Pointer(&mig)), nvml.SUCCESS)
	want(t, "its GPU instance", nvmlDeviceGetGpuInstanceId(mig, unsafe.Pointer(&id)), nvml.SUCCESS)
	want(t, "its GPU instance", nvmlDeviceGetGpuInstanceById(device, id, unsafe.Pointer(&instance)), nvml.SUCCESS)
	tests := map[string]struct {
		versions []uint32 // as nvml.h has them
		call     func(unsafe.Pointer) int32
	}{
		"nvmlDeviceGetMemoryInfo_v2":               {[]uint32{40 | 2<<24}, func(p unsafe.Pointer) int32 { return nvmlDeviceGetMemoryInfo_v2(device, p) }},
		"nvmlDeviceGetMarginTemperature":           {[]uint32{8 | 1<<24}, func(p unsafe.Pointer) int32 { return nvmlDeviceGetMarginTemperature(device, p) }},
		"nvmlDeviceGetAddressingMode":              {[]uint32{8 | 1<<24}, func(p unsafe.Pointer) int32 { return nvmlDeviceGetAddressingMode(device, p) }},
		"nvmlDeviceGetPciInfoExt":                  {[]uint32{64 | 1<<24}, func(p unsafe.Pointer) int32 { return nvmlDeviceGetPciInfoExt(device, p) }},
		"nvmlDeviceGetTemperatureV":                {[]uint32{12 | 1<<24}, func(p unsafe.Pointer) int32 { return nvmlDeviceGetTemperatureV(device, p) }},
		"nvmlDeviceGetGpuFabricInfoV":              {[]uint32{36 | 2<<24, 40 | 3<<24}, func(p unsafe.Pointer) int32 { return nvmlDeviceGetGpuFabricInfoV(device, p) }},
		"nvmlDeviceGetGpuInstanceProfileInfoV":     {[]uint32{152 | 2<<24, 152 | 3<<24}, func(p unsafe.Pointer) int32 { return nvmlDeviceGetGpuInstanceProfileInfoV(device, 0, p) }},
		"nvmlDeviceGetGpuInstanceProfileInfoByIdV": {[]uint32{152 | 2<<24, 152 | 3<<24}, func(p unsafe.Pointer) int32 { return nvmlDeviceGetGpuInstanceProfileInfoByIdV(device, 19, p) }},
		"nvmlGpuInstanceGetComputeInstanceProfileInfoV": {[]uint32{136 | 2<<24, 140 | 3<<24}, func(p unsafe.Pointer) int32 {
			return nvmlGpuInstanceGetComputeInstanceProfileInfoV(instance, 0, 0, p)
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			for _, right := range test.versions {
				for _, version := range []uint32{0, right + 1, right - 1, right + 1<<24, right &^ (0xff << 24), ^uint32(0)} {
					if slices.Contains(test.versions, version) {
						continue
					}
					memory := [64]uint32{version, 77}
					want(t, fmt.Sprintf("version %#x", version), test.call(unsafe.Pointer(&memory)), nvml.ERROR_ARGUMENT_VERSION_MISMATCH)
					if memory != [64]uint32{version, 77} {
						t.Errorf("version %#x: something was written", version)
					}
				}
				memory := [64]uint32{}
				for i := range memory {
					memory[i] = 0xABABABAB
				}
				memory[0], memory[1] = right, 0 // 0 is the sensor of nvmlDeviceGetTemperatureV
				want(t, fmt.Sprintf("version %#x", right), test.call(unsafe.Pointer(&memory)), nvml.SUCCESS)
				end := right & 0xffffff / 4
				if memory[0] != right || memory[end] != 0xABABABAB {
					t.Errorf("version %#x: it is %#x now, and behind its end is %#x", right, memory[0], memory[end])
				}
			}
		})
	}
}

func TestOldStructuresEndSooner(t *testing.T) {
	m := session(t, "dgx-h100")
	do(t, m, &nvmlsim.SetMIG{GPU: "0", Enabled: true}, &nvmlsim.CreateMIG{GPU: "0", Profile: "1g.10gb"})
	device := gpu(t, 0)
	var set, instance, compute uintptr
	want(t, "set", nvmlEventSetCreate(unsafe.Pointer(&set)), nvml.SUCCESS)
	want(t, "register", nvmlDeviceRegisterEvents(device, nvml.EventTypeXidCriticalError, set), nvml.SUCCESS)
	do(t, m, &nvmlsim.RaiseXID{GPU: "0", Code: 31}, &nvmlsim.RaiseXID{GPU: "0", Code: 32})
	var list [8]uintptr
	var count uint32
	want(t, "instances", nvmlDeviceGetGpuInstances(device, 19, unsafe.Pointer(&list), unsafe.Pointer(&count)), nvml.SUCCESS)
	instance = list[0]
	want(t, "compute instance", nvmlGpuInstanceGetComputeInstanceById(instance, 0, unsafe.Pointer(&compute)), nvml.SUCCESS)
	tests := map[string]struct {
		size int // in words, as the first drivers had the structure
		call func(unsafe.Pointer) int32
	}{
		"nvmlDeviceGetPciInfo":             {8, func(p unsafe.Pointer) int32 { return nvmlDeviceGetPciInfo(device, p) }},
		"nvmlDeviceGetPciInfo_v2":          {9, func(p unsafe.Pointer) int32 { return nvmlDeviceGetPciInfo_v2(device, p) }},
		"nvmlDeviceGetPciInfo_v3":          {17, func(p unsafe.Pointer) int32 { return nvmlDeviceGetPciInfo_v3(device, p) }},
		"nvmlDeviceGetNvLinkRemotePciInfo": {8, func(p unsafe.Pointer) int32 { return nvmlDeviceGetNvLinkRemotePciInfo(device, 0, p) }},
		"nvmlEventSetWait":                 {6, func(p unsafe.Pointer) int32 { return nvmlEventSetWait(set, p, 0) }},
		"nvmlEventSetWait_v2":              {8, func(p unsafe.Pointer) int32 { return nvmlEventSetWait_v2(set, p, 0) }},
		"nvmlComputeInstanceGetInfo":       {6, func(p unsafe.Pointer) int32 { return nvmlComputeInstanceGetInfo(compute, p) }},
		"nvmlComputeInstanceGetInfo_v2":    {8, func(p unsafe.Pointer) int32 { return nvmlComputeInstanceGetInfo_v2(compute, p) }},
		"nvmlGpuInstanceGetInfo":           {6, func(p unsafe.Pointer) int32 { return nvmlGpuInstanceGetInfo(instance, p) }},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			memory := [16]uint64{} // aligned as structures of 64 bits are
			words := unsafe.Slice((*uint32)(unsafe.Pointer(&memory)), 32)
			for i := range words {
				words[i] = 0xABABABAB
			}
			want(t, name, test.call(unsafe.Pointer(&memory)), nvml.SUCCESS)
			if words[test.size-1] == 0xABABABAB || words[test.size] != 0xABABABAB {
				t.Errorf("its last word is %#x, and the next %#x", words[test.size-1], words[test.size])
			}
		})
	}
}

func TestAHandleIsTheSameForTheSameObject(t *testing.T) {
	m := session(t, "dgx-h100")
	do(t, m, &nvmlsim.SetMIG{GPU: "0", Enabled: true}, &nvmlsim.CreateMIG{GPU: "0", Profile: "1g.10gb"}, &nvmlsim.CreateMIG{GPU: "0", Profile: "1g.10gb"})
	device := gpu(t, 0)
	handles := func() (all [4]uintptr) {
		for i := range uint32(2) {
			want(t, "MIG device", nvmlDeviceGetMigDeviceHandleByIndex(device, i, unsafe.Pointer(&all[i])), nvml.SUCCESS)
		}
		var count uint32
		want(t, "instances", nvmlDeviceGetGpuInstances(device, 19, unsafe.Pointer(&all[2]), unsafe.Pointer(&count)), nvml.SUCCESS)
		return all
	}
	first := handles()
	if again := handles(); again != first {
		t.Errorf("%x, and then %x", first, again)
	}
	distinct := slices.Clone(first[:])
	slices.Sort(distinct)
	if len(slices.Compact(distinct)) != 4 {
		t.Errorf("two objects have one handle: %x", first)
	}
	var parent uintptr
	want(t, "the GPU of a MIG device", nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handles()[0], unsafe.Pointer(&parent)), nvml.SUCCESS)
	if parent != device {
		t.Errorf("the MIG device's GPU is %x, want %x", parent, device)
	}
	known := len(process.handles.objects)
	want(t, "nvmlShutdown", nvmlShutdown(), nvml.SUCCESS)
	if left := len(process.handles.objects); known < 5 || left != 1 {
		t.Errorf("%d handles after the session, and %d in it: want the GPU's to be left", left, known)
	}
	var index uint32
	want(t, "nvmlInit_v2", nvmlInit_v2(), nvml.SUCCESS)
	want(t, "a MIG device's old handle", nvmlDeviceGetIndex(first[0], unsafe.Pointer(&index)), nvml.ERROR_INVALID_ARGUMENT)
	want(t, "its new one", nvmlDeviceGetIndex(handles()[0], unsafe.Pointer(&index)), nvml.SUCCESS)
}

func TestEventsWakeTheCallThatWaits(t *testing.T) {
	m := session(t, "dgx-h100")
	var set uintptr
	want(t, "set", nvmlEventSetCreate(unsafe.Pointer(&set)), nvml.SUCCESS)
	for i := range uint32(2) {
		want(t, "register", nvmlDeviceRegisterEvents(gpu(t, i), nvml.EventTypeXidCriticalError, set), nvml.SUCCESS)
	}
	var data eventData
	want(t, "nothing happens", nvmlEventSetWait_v2(set, unsafe.Pointer(&data), 1), nvml.ERROR_TIMEOUT)
	answered := make(chan int32)
	wait := func() { answered <- nvmlEventSetWait_v2(set, unsafe.Pointer(&data), 60_000) }
	go wait()
	do(t, m, &nvmlsim.RaiseXID{GPU: "1", Code: 79})
	want(t, "an XID", <-answered, nvml.SUCCESS)
	if data.device != gpu(t, 1) || data.data != 79 || data.eventType != nvml.EventTypeXidCriticalError || data.gpuInstanceID != 0xFFFFFFFF {
		t.Errorf("%+v, want XID 79 of GPU 1", data)
	}
	go wait()
	want(t, "nvmlShutdown", nvmlShutdown(), nvml.SUCCESS)
	want(t, "the end of the session", <-answered, nvml.ERROR_UNINITIALIZED)
}

// Many threads ask, and make and destroy handles, while sessions come and go: none is open but theirs.
func TestCallsOfManyThreads(t *testing.T) {
	m := session(t, "dgx-h100")
	do(t, m, &nvmlsim.SetMIG{GPU: "0", Enabled: true}, &nvmlsim.CreateMIG{GPU: "0", Profile: "1g.10gb"})
	want(t, "nvmlShutdown", nvmlShutdown(), nvml.SUCCESS)
	var threads sync.WaitGroup
	for thread := range uint32(16) {
		threads.Go(func() {
			for range 20 {
				var device, mig, set uintptr
				var info nvml.Memory
				name := [96]byte{}
				for call, got := range map[string]int32{
					"init":   nvmlInit_v2(),
					"handle": nvmlDeviceGetHandleByIndex_v2(thread%8, unsafe.Pointer(&device)),
					"MIG":    nvmlDeviceGetMigDeviceHandleByIndex(gpuOf(0), 0, unsafe.Pointer(&mig)),
					"memory": nvmlDeviceGetMemoryInfo(gpuOf(thread%8), unsafe.Pointer(&info)),
					"name":   nvmlDeviceGetName(gpuOf(thread%8), unsafe.Pointer(&name), 96),
					"set":    nvmlEventSetCreate(unsafe.Pointer(&set)),
				} {
					want(t, call, got, nvml.SUCCESS)
				}
				want(t, "free", nvmlEventSetFree(set), nvml.SUCCESS)
				want(t, "shutdown", nvmlShutdown(), nvml.SUCCESS)
			}
		})
	}
	threads.Wait()
	if left := len(process.handles.objects); left != 8 {
		t.Errorf("%d handles are left after the last session, want those of 8 GPUs", left)
	}
	want(t, "a shutdown too many", nvmlShutdown(), nvml.ERROR_UNINITIALIZED)
}

func gpuOf(index uint32) (handle uintptr) {
	nvmlDeviceGetHandleByIndex_v2(index, unsafe.Pointer(&handle))
	return handle
}

func TestTheMachineIsTheOneOfTheEnvironment(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "sim")
	socket := filepath.Join(folder, nvmlsim.ControlSocket)
	uuid := func(s settings) string {
		t.Helper()
		m, err := s.open()
		if err != nil {
			t.Fatalf("%+v: %v", s, err)
		}
		result, err := m.Do(&nvmlsim.ShowState{})
		if err != nil {
			t.Fatal(err)
		}
		return result.State.Profile + " " + result.State.Node
	}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		settings settings
		want     string
	}{
		{settings{profile: "t4"}, "t4 " + host},
		{settings{profile: "t4", node: "n"}, "t4 n"},
		{settings{socket: socket, profile: "l40s", node: "n"}, "l40s n"}, // makes it
		{settings{socket: socket}, "l40s n"},
		{settings{socket: socket, profile: "l40s"}, "l40s n"},
	} {
		if got := uuid(test.settings); got != test.want {
			t.Errorf("%+v: %s, want %s", test.settings, got, test.want)
		}
	}
	for name, test := range map[string]struct {
		settings settings
		says     string
	}{
		"nothing":                      {settings{}, "NVMLSIM_SOCKET and NVMLSIM_PROFILE: neither is set"},
		"a profile that is none":       {settings{profile: "h9000"}, `NVMLSIM_PROFILE: unknown GPU profile "h9000"`},
		"a folder without a machine":   {settings{socket: filepath.Join(t.TempDir(), "x", "control.sock")}, "no machine is there, and NVMLSIM_PROFILE is not set"},
		"the machine of another":       {settings{socket: socket, node: "m"}, `node: the state is of "n", not "m"`},
		"a machine of another profile": {settings{socket: socket, profile: "t4"}, `profile: the state is of "l40s", not "t4"`},
	} {
		if _, err := test.settings.open(); err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s: %v, want an error with %q", name, err, test.says)
		}
	}
}

func TestTheMachineOfASessionStays(t *testing.T) {
	session(t, "dgx-h100")
	count := func(want uint32) {
		t.Helper()
		var n uint32
		if ret := nvml.Return(nvmlDeviceGetCount_v2(unsafe.Pointer(&n))); ret != nvml.SUCCESS || n != want {
			t.Errorf("%d GPUs, %v, want %d", n, ret, want)
		}
	}
	device := gpu(t, 0)
	t.Setenv(EnvSocket, "")
	t.Setenv(EnvProfile, "a100-40gb")
	want(t, "nvmlInit in the session", nvmlInit_v2(), nvml.SUCCESS)
	count(8)
	want(t, "nvmlShutdown", nvmlShutdown(), nvml.SUCCESS)
	want(t, "nvmlShutdown", nvmlShutdown(), nvml.SUCCESS)
	want(t, "nvmlInit", nvmlInit_v2(), nvml.SUCCESS)
	count(1)
	var index uint32
	want(t, "a GPU of the other machine", nvmlDeviceGetIndex(device, unsafe.Pointer(&index)), nvml.ERROR_INVALID_ARGUMENT)
}

func TestErrorsHaveTheDriversWords(t *testing.T) {
	for ret, want := range map[nvml.Return]string{
		nvml.SUCCESS: "Success", nvml.ERROR_LIB_RM_VERSION_MISMATCH: "Driver/library version mismatch", -5: "Unknown Error", 12345: "Unknown Error",
	} {
		for range 2 {
			if got := text(nvmlErrorString(int32(ret))); got != want {
				t.Errorf("%d: %q, want %q", ret, got, want)
			}
		}
	}
}

func TestALibraryOfAnotherVersionThanTheKernelDriverDoesNotBegin(t *testing.T) {
	m := session(t, "t4")
	want(t, "nvmlShutdown", nvmlShutdown(), nvml.SUCCESS)
	version := m.DriverVersion()
	init := func(version string) int32 { return int32(process.init(0, environment(), version)) }
	want(t, "the same version", init(version), nvml.SUCCESS)
	want(t, "nvmlShutdown", nvmlShutdown(), nvml.SUCCESS)
	do(t, m, &nvmlsim.UnloadDriver{})
	want(t, "no driver", init("1.2.3"), nvml.ERROR_DRIVER_NOT_LOADED)
	do(t, m, &nvmlsim.LoadDriver{Version: "999.1.2"})
	want(t, "another version", init(version), nvml.ERROR_LIB_RM_VERSION_MISMATCH)
	want(t, "no session is left open", nvmlShutdown(), nvml.ERROR_UNINITIALIZED)
	want(t, "a library for any", init(AnyDriver), nvml.SUCCESS)
	var name [32]byte
	want(t, "nvmlSystemGetDriverVersion", nvmlSystemGetDriverVersion(unsafe.Pointer(&name), 32), nvml.SUCCESS)
	if got := text(unsafe.Pointer(&name)); got != "999.1.2" {
		t.Errorf("the driver is %q, want 999.1.2", got)
	}
}
