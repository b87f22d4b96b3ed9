// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"sync"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

func TestEachInitNeedsItsShutdown(t *testing.T) {
	lib := mustNew(t, "t4")
	device := lib.devices[0]
	steps := []struct {
		name string
		do   func() nvml.Return
		want nvml.Return // of a call afterwards
	}{
		{"shutdown without a session", lib.Shutdown, nvml.ERROR_UNINITIALIZED},
		{"first init", lib.Init, nvml.SUCCESS},
		{"second init", func() nvml.Return { return lib.InitWithFlags(nvml.INIT_FLAG_NO_GPUS) }, nvml.SUCCESS},
		{"first shutdown", lib.Shutdown, nvml.SUCCESS},
		{"second shutdown", lib.Shutdown, nvml.ERROR_UNINITIALIZED},
		{"init again", lib.Init, nvml.SUCCESS},
	}
	for i, step := range steps {
		ret := step.do()
		if wantRet := nvml.SUCCESS; i > 0 && ret != wantRet {
			t.Errorf("%s: %v, want %v", step.name, ret, wantRet)
		}
		if _, got := device.GetUUID(); got != step.want {
			t.Errorf("after %s: a call on a device answers %v, want %v", step.name, got, step.want)
		}
		if _, got := lib.DeviceGetCount(); got != step.want {
			t.Errorf("after %s: a call on the library answers %v, want %v", step.name, got, step.want)
		}
	}
}

func TestHandlesAreFoundByWhatNVMLTakes(t *testing.T) {
	lib := open(t, mustNew(t, "dgx-h100"))
	want := lib.devices[1] // 0000:43:00.0
	byBus, byUUID, bySerial := lib.DeviceGetHandleByPciBusId, lib.DeviceGetHandleByUUID, lib.DeviceGetHandleBySerial
	byIndex := lib.DeviceGetHandleByIndex
	tests := map[string]struct {
		get  func() (nvml.Device, nvml.Return)
		want nvml.Return
	}{
		"index":                         {func() (nvml.Device, nvml.Return) { return byIndex(1) }, nvml.SUCCESS},
		"index below the first":         {func() (nvml.Device, nvml.Return) { return byIndex(-1) }, nvml.ERROR_INVALID_ARGUMENT},
		"index beyond the last":         {func() (nvml.Device, nvml.Return) { return byIndex(8) }, nvml.ERROR_INVALID_ARGUMENT},
		"UUID":                          {func() (nvml.Device, nvml.Return) { return byUUID(want.uuid) }, nvml.SUCCESS},
		"UUID of no GPU":                {func() (nvml.Device, nvml.Return) { return byUUID("GPU-0") }, nvml.ERROR_NOT_FOUND},
		"UUID left out":                 {func() (nvml.Device, nvml.Return) { return byUUID("") }, nvml.ERROR_INVALID_ARGUMENT},
		"serial number":                 {func() (nvml.Device, nvml.Return) { return bySerial(want.serial) }, nvml.SUCCESS},
		"serial number left out":        {func() (nvml.Device, nvml.Return) { return bySerial("") }, nvml.ERROR_INVALID_ARGUMENT},
		"address as NVML prints it":     {func() (nvml.Device, nvml.Return) { return byBus("00000000:43:00.0") }, nvml.SUCCESS},
		"address as the kernel has it":  {func() (nvml.Device, nvml.Return) { return byBus("0000:43:00.0") }, nvml.SUCCESS},
		"address without domain":        {func() (nvml.Device, nvml.Return) { return byBus("43:00.0") }, nvml.SUCCESS},
		"address without function":      {func() (nvml.Device, nvml.Return) { return byBus("0000:43:00") }, nvml.SUCCESS},
		"address of no GPU":             {func() (nvml.Device, nvml.Return) { return byBus("0000:44:00.0") }, nvml.ERROR_NOT_FOUND},
		"address of a GPU elsewhere":    {func() (nvml.Device, nvml.Return) { return byBus("0001:43:00.0") }, nvml.ERROR_NOT_FOUND},
		"address that is no address":    {func() (nvml.Device, nvml.Return) { return byBus("gpu1") }, nvml.ERROR_INVALID_ARGUMENT},
		"address longer than a domain":  {func() (nvml.Device, nvml.Return) { return byBus("000000000:43:00.0") }, nvml.ERROR_INVALID_ARGUMENT},
		"address with a strange device": {func() (nvml.Device, nvml.Return) { return byBus("0000:43:00.8") }, nvml.ERROR_INVALID_ARGUMENT},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, ret := test.get()
			if ret != test.want {
				t.Fatalf("answers %v, want %v", ret, test.want)
			}
			if ret == nvml.SUCCESS && got != nvml.Device(want) {
				t.Errorf("returns another GPU's handle")
			}
		})
	}
}

func TestStateSetThroughOneHandleIsSeenThroughAnother(t *testing.T) {
	lib := open(t, mustNew(t, "dgx-a100"))
	one, _ := lib.DeviceGetHandleByIndex(3)
	other, _ := lib.DeviceGetHandleByUUID(lib.devices[3].uuid)
	steps := []struct {
		name string
		set  func() nvml.Return
		want nvml.Return
	}{
		{"compute mode", func() nvml.Return { return one.SetComputeMode(nvml.COMPUTEMODE_EXCLUSIVE_PROCESS) }, nvml.SUCCESS},
		{"compute mode that does not exist", func() nvml.Return { return one.SetComputeMode(99) }, nvml.ERROR_INVALID_ARGUMENT},
		{"persistence mode", func() nvml.Return { return one.SetPersistenceMode(nvml.FEATURE_DISABLED) }, nvml.SUCCESS},
		{"persistence mode that does not exist", func() nvml.Return { return one.SetPersistenceMode(2) }, nvml.ERROR_INVALID_ARGUMENT},
		{"power limit", func() nvml.Return { return one.SetPowerManagementLimit(250_000) }, nvml.SUCCESS},
		{"power limit below the least", func() nvml.Return { return one.SetPowerManagementLimit(99_999) }, nvml.ERROR_INVALID_ARGUMENT},
		{"power limit above the most", func() nvml.Return { return one.SetPowerManagementLimit(400_001) }, nvml.ERROR_INVALID_ARGUMENT},
	}
	for _, step := range steps {
		if got := step.set(); got != step.want {
			t.Errorf("set %s: %v, want %v", step.name, got, step.want)
		}
	}
	type state struct {
		Compute     nvml.ComputeMode
		Persistence nvml.EnableState
		PowerLimit  uint32
	}
	read := func(d nvml.Device) (s state) {
		s.Compute, _ = d.GetComputeMode()
		s.Persistence, _ = d.GetPersistenceMode()
		s.PowerLimit, _ = d.GetPowerManagementLimit()
		return s
	}
	want := state{nvml.COMPUTEMODE_EXCLUSIVE_PROCESS, nvml.FEATURE_DISABLED, 250_000}
	if diff := cmp.Diff(want, read(other)); diff != "" {
		t.Errorf("through the other handle (-want +got):\n%s", diff)
	}
	neighbour, _ := lib.DeviceGetHandleByIndex(4)
	want = state{nvml.COMPUTEMODE_DEFAULT, nvml.FEATURE_ENABLED, 400_000}
	if diff := cmp.Diff(want, read(neighbour)); diff != "" {
		t.Errorf("the neighbour changed too (-want +got):\n%s", diff)
	}
}

func TestConcurrentCallersDoNotRace(t *testing.T) {
	lib := mustNew(t, "l40s")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			lib.Init()
			defer lib.Shutdown()
			for range 50 {
				d := lib.devices[i/2]
				d.SetComputeMode(nvml.ComputeMode(i % 2))
				d.GetComputeMode()
				d.GetMigMode()
				d.GetP2PStatus(lib.devices[7], nvml.P2P_CAPS_INDEX_READ)
			}
		})
	}
	wg.Wait()
	if _, ret := lib.DeviceGetCount(); ret != nvml.ERROR_UNINITIALIZED {
		t.Errorf("after as many Shutdowns as Inits a call answers %v, want %v", ret, nvml.ERROR_UNINITIALIZED)
	}
}

func TestIdentitiesFollowFromTheNodeName(t *testing.T) {
	identities := func(profile, node string) (ids []string) {
		lib, err := New(profile, node)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range lib.devices {
			ids = append(ids, d.uuid+" "+d.serial)
		}
		return ids
	}
	// Written down: they must not change with a new version of the simulation.
	want := []string{
		"GPU-fa45fe1c-367d-5379-aeb8-4bea94cda4b9 1651187159202",
		"GPU-b3c84386-b305-5b9f-8a08-b87faa2cae04 1651187159202",
		"GPU-e477b9ac-8569-51ea-8fb4-a0bf5e13c0ae 1652952046073",
		"GPU-ec3a798b-9cb9-5ead-9cc8-c5cec82484fb 1652952046073",
	}
	if diff := cmp.Diff(want, identities("gb200", "node-a")); diff != "" {
		t.Errorf("identities of node-a (-want +got):\n%s", diff)
	}
	seen := map[string]bool{}
	for _, node := range []string{"node-a", "node-b", "node-a/gpu/1"} {
		for _, id := range identities("l40s", node) {
			if seen[id] {
				t.Errorf("%s twice", id)
			}
			seen[id] = true
		}
	}
}

// TestALostGPUHidesAllByUUID, and none by its address.
func TestALostGPUHidesAllByUUID(t *testing.T) {
	lib := open(t, mustNew(t, "t4"))
	do(t, lib.machine, &LoseGPU{GPU: "2"})
	for i, d := range lib.devices {
		serial := boardSerial("node-a", i)
		_, byUUID := lib.DeviceGetHandleByUUID(d.uuid)
		_, bySerial := lib.DeviceGetHandleBySerial(serial)
		_, byAddress := lib.DeviceGetHandleByPciBusId(d.path.address.String())
		if byUUID != nvml.ERROR_GPU_IS_LOST || bySerial != nvml.ERROR_GPU_IS_LOST || (byAddress == nvml.ERROR_GPU_IS_LOST) != (i == 2) {
			t.Errorf("GPU %d by UUID %v, by serial number %v, by address %v", i, byUUID, bySerial, byAddress)
		}
	}
}

// TestAMachineWithoutGPUsNeedsAFlagToInit, because all of them are with virtual machines for one.
func TestAMachineWithoutGPUsNeedsAFlagToInit(t *testing.T) {
	lib := mustNew(t, "a100-40gb")
	do(t, lib.machine, &RemoveGPU{GPU: "0"})
	if ret := lib.Init(); ret == nvml.SUCCESS {
		t.Error("started without a GPU")
	}
	if ret := lib.InitWithFlags(nvml.INIT_FLAG_NO_GPUS); ret != nvml.SUCCESS {
		t.Error(ret)
	}
	if n, ret := lib.DeviceGetCount(); n != 0 || ret != nvml.SUCCESS {
		t.Errorf("%d GPUs, %v", n, ret)
	}
}
