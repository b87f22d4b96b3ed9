// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

func TestTheModeSwitchesAsOnTheProduct(t *testing.T) {
	type mode struct{ Current, Pending int }
	off, on, pendingOn := mode{0, 0}, mode{1, 1}, mode{0, 1}
	set := func(to int, wantActivation nvml.Return) func(*testing.T, *device) {
		return func(t *testing.T, d *device) {
			activation, ret := d.SetMigMode(to)
			if ret != nvml.SUCCESS || activation != wantActivation {
				t.Errorf("set %d: %v, activation %v, want %v", to, ret, activation, wantActivation)
			}
		}
	}
	command := func(c Command) func(*testing.T, *device) {
		return func(t *testing.T, d *device) { do(t, d.lib.machine, c) }
	}
	refused := func(c Command) func(*testing.T, *device) {
		return func(t *testing.T, d *device) {
			if _, err := d.lib.machine.Do(c); err == nil {
				t.Errorf("%s succeeds", c.Name())
			}
		}
	}
	reopen := func(t *testing.T, d *device) { d.lib.Shutdown(); d.lib.Init() }
	process := func() Command { return &AddProcess{GPU: "0", Process: Process{PID: 7, Kind: ProcessCompute}} }
	instance := command(&CreateMIG{GPU: "0", Profile: "1g.10gb"})
	type step struct {
		do   func(*testing.T, *device)
		want mode
	}
	tests := map[string]struct {
		profile string
		steps   []step
	}{
		"Ampere waits for the reset": {"dgx-a100", []step{
			{set(1, nvml.ERROR_RESET_REQUIRED), pendingOn},
			{command(&ResetGPU{GPU: "0"}), on},
			{set(0, nvml.ERROR_RESET_REQUIRED), mode{1, 0}},
			{set(1, nvml.SUCCESS), on},
		}},
		"Ampere in use": {"dgx-a100", []step{
			{command(process()), off},
			{set(1, nvml.ERROR_IN_USE), pendingOn},
			{refused(&ResetGPU{GPU: "0"}), pendingOn},
			{command(&RemoveProcess{GPU: "0", PID: 7}), pendingOn},
			{command(&ResetGPU{GPU: "0"}), on},
		}},
		"Ampere keeps it over a reboot": {"dgx-a100", []step{
			{set(1, nvml.ERROR_RESET_REQUIRED), pendingOn}, {command(&Reboot{}), mode{-1, -1}}, {reopen, on},
		}},
		"Hopper at once": {"dgx-h100", []step{{set(1, nvml.SUCCESS), on}, {set(0, nvml.SUCCESS), off}}},
		"Hopper in use": {"dgx-h100", []step{
			{command(process()), off},
			{set(1, nvml.ERROR_IN_USE), pendingOn},
			{command(&RemoveProcess{GPU: "0", PID: 7}), pendingOn},
			{set(0, nvml.SUCCESS), off},
			{set(1, nvml.SUCCESS), on},
		}},
		"Hopper watched by DCGM": {"dgx-h100", []step{
			{command(&AddClient{Client: Client{PID: 8, Command: "nv-hostengine", GPUs: []int{0}, Watches: true}}), off},
			{set(1, nvml.ERROR_IN_USE), pendingOn},
			{refused(&ResetGPU{GPU: "0"}), pendingOn},
			{set(0, nvml.SUCCESS), off},
			{command(&RemoveClient{PID: 8}), off},
			{set(1, nvml.SUCCESS), on},
			{instance, on},
			{command(&AddClient{Client: Client{PID: 9, Command: "dcgm-exporter", Watches: true}}), on},
			{refused(&DestroyMIG{GPU: "0", Instance: 7}), on},
			{refused(&UnloadDriver{}), on},
			{command(&RemoveClient{PID: 9}), on},
			{command(&ResetGPU{GPU: "0"}), on},
		}},
		"Hopper beside persistenced": {"dgx-h100", []step{
			{command(&AddClient{Client: Client{PID: 8, Command: "nvidia-persistenced"}}), off},
			{set(1, nvml.SUCCESS), on},
			{refused(&ResetGPU{GPU: "0"}), on},
		}},
		"Hopper with an instance": {"dgx-h100", []step{
			{set(1, nvml.SUCCESS), on},
			{instance, on},
			{set(0, nvml.ERROR_IN_USE), on},
			{command(&ResetGPU{GPU: "0"}), on},
			{set(0, nvml.SUCCESS), off},
		}},
		"Hopper forgets it in a reboot": {"dgx-h100", []step{
			{set(1, nvml.SUCCESS), on}, {command(&Reboot{}), mode{-1, -1}}, {reopen, off},
		}},
		"Blackwell at once": {"hgx-b200", []step{{set(1, nvml.SUCCESS), on}}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			d := open(t, mustNew(t, test.profile)).devices[0]
			for i, step := range test.steps {
				step.do(t, d)
				current, pending, ret := d.GetMigMode()
				got := mode{current, pending}
				if ret != nvml.SUCCESS {
					got = mode{-1, -1}
				}
				if got != step.want {
					t.Errorf("after step %d: %+v (%v), want %+v", i, got, ret, step.want)
				}
			}
		})
	}
	if _, ret := open(t, mustNew(t, "t4")).devices[0].SetMigMode(1); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("on a GPU without MIG: %v", ret)
	}
	if _, ret := open(t, mustNew(t, "dgx-h100")).devices[0].SetMigMode(2); ret != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("a mode that does not exist: %v", ret)
	}
}

func TestNothingIsMadeOnAGPUThatIsNotPartitioned(t *testing.T) {
	d := open(t, mustNew(t, "dgx-h100")).devices[0]
	info, ret := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_1_SLICE)
	if ret != nvml.SUCCESS {
		t.Fatalf("what a GPU could be partitioned into is known at any time: %v", ret)
	}
	if _, ret := d.CreateGpuInstance(&info); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("create: %v", ret)
	}
	if _, ret := d.GetGpuInstances(&info); ret != nvml.ERROR_NOT_SUPPORTED {
		t.Errorf("list: %v", ret)
	}
}

// TestTheLifeOfAMIGDevice makes one as a driver does, looks at it from all
// sides, and takes it apart in the only order that works.
func TestTheLifeOfAMIGDevice(t *testing.T) {
	lib, d := machineWith(t, "h100-80gb")
	info, _ := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_3_SLICE)
	gi, ret := d.CreateGpuInstanceWithPlacement(&info, &nvml.GpuInstancePlacement{Start: 4, Size: 4})
	if ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	if _, ret := d.GetMigDeviceHandleByIndex(0); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("a GPU instance alone is a MIG device: %v", ret)
	}
	compute, _ := gi.GetComputeInstanceProfileInfo(nvml.COMPUTE_INSTANCE_PROFILE_2_SLICE, 0)
	ci, ret := gi.CreateComputeInstance(&compute)
	if ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	mig, ret := d.GetMigDeviceHandleByIndex(0)
	if ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	giInfo, _ := gi.GetInfo()
	ciInfo, _ := ci.GetInfo()
	if giInfo.Placement != (nvml.GpuInstancePlacement{Start: 4, Size: 4}) || giInfo.ProfileId != 9 || giInfo.Device != nvml.Device(d) {
		t.Errorf("GPU instance %+v", giInfo)
	}
	if ciInfo.Placement != (nvml.ComputeInstancePlacement{Start: 0, Size: 2}) || ciInfo.Id != 0 {
		t.Errorf("compute instance %+v", ciInfo)
	}
	attributes, _ := mig.GetAttributes()
	want := nvml.DeviceAttributes{
		MultiprocessorCount: 40, SharedCopyEngineCount: 3, SharedDecoderCount: 3, SharedJpegCount: 3,
		GpuInstanceSliceCount: 3, ComputeInstanceSliceCount: 2, MemorySizeMB: 40448,
	}
	if diff := cmp.Diff(want, attributes); diff != "" {
		t.Errorf("attributes (-want +got):\n%s", diff)
	}
	if name, _ := mig.GetName(); name != "NVIDIA H100 80GB HBM3 MIG 2c.3g.40gb" {
		t.Errorf("name %q", name)
	}
	uuid, _ := mig.GetUUID()
	if same, ret := lib.DeviceGetHandleByUUID(uuid); ret != nvml.SUCCESS {
		t.Errorf("by UUID %s: %v", uuid, ret)
	} else if again, _ := same.GetUUID(); again != uuid {
		t.Errorf("by UUID %s: %s", uuid, again)
	}
	if parent, ret := mig.GetDeviceHandleFromMigDeviceHandle(); ret != nvml.SUCCESS || parent != nvml.Device(d) {
		t.Errorf("its GPU: %v", ret)
	}
	if is, _ := mig.IsMigDeviceHandle(); !is {
		t.Error("it is no MIG device")
	}

	at := &Instance{GPU: giInfo.Id, Compute: ciInfo.Id}
	do(t, lib.machine, &AddProcess{GPU: "0", Process: Process{PID: 42, Kind: ProcessCompute, MemoryMiB: 1000, Instance: at}})
	wantProcess := []nvml.ProcessInfo{{Pid: 42, UsedGpuMemory: 1000 * mib, GpuInstanceId: giInfo.Id, ComputeInstanceId: ciInfo.Id}}
	for who, device := range map[string]nvml.Device{"the MIG device": mig, "its GPU": d} {
		if got, _ := device.GetComputeRunningProcesses(); !cmp.Equal(got, wantProcess) {
			t.Errorf("processes of %s: %+v", who, got)
		}
	}
	if memory, _ := mig.GetMemoryInfo(); memory.Total != 40448*mib || memory.Used != 1000*mib || memory.Free != 39448*mib {
		t.Errorf("memory %+v", memory)
	}

	for i, step := range []struct {
		do   func() nvml.Return
		want nvml.Return
	}{
		{gi.Destroy, nvml.ERROR_IN_USE},
		{ci.Destroy, nvml.ERROR_IN_USE},
		{func() nvml.Return { do(t, lib.machine, &RemoveProcess{GPU: "0", PID: 42}); return gi.Destroy() }, nvml.ERROR_IN_USE},
		{ci.Destroy, nvml.SUCCESS},
		{ci.Destroy, nvml.ERROR_NOT_FOUND},
		{gi.Destroy, nvml.SUCCESS},
		{gi.Destroy, nvml.ERROR_NOT_FOUND},
	} {
		if got := step.do(); got != step.want {
			t.Errorf("destruction, step %d: %v, want %v", i, got, step.want)
		}
	}
	if _, ret := lib.DeviceGetHandleByUUID(uuid); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("a destroyed device by UUID: %v", ret)
	}

	// The same again is the same device, and the old handles stay dead.
	gi, _ = d.CreateGpuInstanceWithPlacement(&info, &nvml.GpuInstancePlacement{Start: 4, Size: 4})
	if _, ret := gi.CreateComputeInstance(&compute); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	again, _ := d.GetMigDeviceHandleByIndex(0)
	if got, _ := again.GetUUID(); got != uuid {
		t.Errorf("made again it is %s, it was %s", got, uuid)
	}
	if _, ret := mig.GetUUID(); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("a handle of the destroyed device: %v", ret)
	}
	if _, ret := ci.GetInfo(); ret != nvml.ERROR_NOT_FOUND {
		t.Errorf("a handle of the destroyed compute instance: %v", ret)
	}
}

func TestOtherPlacementsAreRefused(t *testing.T) {
	_, d := machineWith(t, "h100-80gb")
	info, _ := d.GetGpuInstanceProfileInfo(nvml.GPU_INSTANCE_PROFILE_2_SLICE)
	unknown := info
	unknown.Id = 77
	tests := map[string]struct {
		info *nvml.GpuInstanceProfileInfo
		at   *nvml.GpuInstancePlacement
	}{
		"no profile":      {nil, &nvml.GpuInstancePlacement{Start: 0, Size: 2}},
		"unknown profile": {&unknown, &nvml.GpuInstancePlacement{Start: 0, Size: 2}},
		"no placement":    {&info, nil},
		"another start":   {&info, &nvml.GpuInstancePlacement{Start: 1, Size: 2}},
		"beyond the end":  {&info, &nvml.GpuInstancePlacement{Start: 6, Size: 2}},
		"another size":    {&info, &nvml.GpuInstancePlacement{Start: 0, Size: 4}},
	}
	for name, test := range tests {
		if _, ret := d.CreateGpuInstanceWithPlacement(test.info, test.at); ret != nvml.ERROR_INVALID_ARGUMENT {
			t.Errorf("%s: %v, want %v", name, ret, nvml.ERROR_INVALID_ARGUMENT)
		}
	}
}

func do(t *testing.T, m *Machine, c Command) Result {
	t.Helper()
	result, err := m.Do(c)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

// Asked on a real H100 with driver 580.159.04 and MIG disabled, but for the GPUs of other kinds and the older driver.
func TestWhatAWholeGPUSaysOfItself(t *testing.T) {
	const before = nvml.EventTypeAll &^ simulatedEvents
	tests := map[string]struct {
		profile, driver string
		most            int // MIG devices, with MIG enabled
		part            nvml.Return
		lacks           uint64 // event types
	}{
		"an H100":                      {"dgx-h100", "580.159.04", 7, nvml.ERROR_INVALID_ARGUMENT, 0},
		"an H100 with an older driver": {"dgx-h100", "570.172.08", 7, nvml.ERROR_INVALID_ARGUMENT, before},
		"a GPU of another generation":  {"hgx-b200", "580.159.04", 7, nvml.ERROR_INVALID_ARGUMENT, before},
		"a GPU without MIG":            {"t4", "580.159.04", 0, nvml.ERROR_NOT_SUPPORTED, before},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			l := mustNew(t, test.profile)
			do(t, l.machine, &UnloadDriver{})
			do(t, l.machine, &LoadDriver{Version: test.driver})
			d := open(t, l).devices[0]
			if most, ret := d.GetMaxMigDeviceCount(); most != 0 || ret != nvml.SUCCESS {
				t.Errorf("%d MIG devices with MIG disabled, %v", most, ret)
			}
			_, instance := d.GetGpuInstanceId()
			_, compute := d.GetComputeInstanceId()
			_, parent := d.GetDeviceHandleFromMigDeviceHandle()
			if instance != test.part || compute != test.part || parent != test.part {
				t.Errorf("its instances and its parent: %v, %v, %v, want %v", instance, compute, parent, test.part)
			}
			if types, ret := d.GetSupportedEventTypes(); ret != nvml.SUCCESS || types != nvml.EventTypeAll&^test.lacks {
				t.Errorf("event types %#x, %v", types, ret)
			}
			if reasons, ret := d.GetSupportedClocksEventReasons(); ret != nvml.SUCCESS || reasons != 511 {
				t.Errorf("reasons %d, %v, want 511", reasons, ret)
			}
			if speed, ret := d.GetPcieLinkMaxSpeed(); ret != nvml.SUCCESS || int(speed) != d.model.PCIe.Generation {
				t.Errorf("link speed %d, %v, want that of generation %d", speed, ret, d.model.PCIe.Generation)
			}
			if test.most == 0 {
				return
			}
			do(t, l.machine, &SetMIG{GPU: "0", Enabled: true})
			if most, ret := d.GetMaxMigDeviceCount(); most != test.most || ret != nvml.SUCCESS {
				t.Errorf("%d MIG devices with MIG enabled, %v, want %d", most, ret, test.most)
			}
		})
	}
}
