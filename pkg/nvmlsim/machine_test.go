// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

func openMachine(t *testing.T, profile, folder string) *Machine {
	t.Helper()
	p, err := LoadProfile(profile)
	if err != nil {
		t.Fatal(err)
	}
	m, err := OpenMachine(p, "node-a", folder)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// private returns a folder that is only this user's.
func private(t *testing.T) string {
	t.Helper()
	folder := t.TempDir()
	if err := os.Chmod(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	return folder
}

func TestAFolderThatOthersCanOpenIsRefused(t *testing.T) {
	p, _ := LoadProfile("t4")
	folder := t.TempDir()
	if err := os.Chmod(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := OpenMachine(p, "node-a", folder); err == nil || !strings.Contains(err.Error(), "mode 0755: want 0700") {
		t.Errorf("error %v, want one that names the mode", err)
	}
	if info, _ := os.Stat(folder); info.Mode().Perm() != 0o755 {
		t.Errorf("the folder has mode %v now", info.Mode().Perm())
	}
}

func TestTheHardwareOutlivesItsUsers(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "sim")
	m := openMachine(t, "dgx-h100", folder)
	do(t, m, &SetMIG{GPU: "0", Enabled: true})
	made := do(t, m, &CreateMIG{GPU: "0", Profile: "2g.20gb"})
	do(t, m, &SetComputeMode{GPU: "1", Mode: ComputeExclusiveProcess})
	do(t, m, &AddProcess{GPU: "2", Process: Process{PID: 9, Kind: ProcessMPS, MemoryMiB: 5}})
	do(t, m, &CountECC{GPU: "3", ECCCounts: ECCCounts{Corrected: 4}})
	do(t, m, &HangGPU{GPU: "4"})

	again := openMachine(t, "dgx-h100", folder)
	if diff := cmp.Diff(m.State(), again.State()); diff != "" {
		t.Errorf("what another process finds (-want +got):\n%s", diff)
	}
	lib := open(t, again.NVML())
	if _, ret := lib.DeviceGetHandleByUUID(made.MIG.UUID); ret != nvml.SUCCESS {
		t.Errorf("the MIG device by UUID: %v", ret)
	}
	for path, want := range map[string]fs.FileMode{folder: 0o700, filepath.Join(folder, "state.json"): 0o600} {
		info, err := os.Stat(path)
		if err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v, want mode %v", path, info.Mode().Perm(), err, want)
		}
	}
}

// Two agents serve one node during an upgrade: each sees at once what the other does.
func TestTwoProcessesShareTheHardware(t *testing.T) {
	folder := private(t)
	one, other := openMachine(t, "dgx-h100", folder), openMachine(t, "dgx-h100", folder)
	a, b := open(t, one.NVML()), open(t, other.NVML())
	set := registered(t, b, nvml.EventTypeXidCriticalError)
	for range 3 {
		a.devices[0].SetComputeMode(nvml.COMPUTEMODE_PROHIBITED)
		if got, _ := b.devices[0].GetComputeMode(); got != nvml.COMPUTEMODE_PROHIBITED {
			t.Errorf("the other sees %v", got)
		}
		b.devices[0].SetComputeMode(nvml.COMPUTEMODE_DEFAULT)
		if got, _ := a.devices[0].GetComputeMode(); got != nvml.COMPUTEMODE_DEFAULT {
			t.Errorf("the one sees %v", got)
		}
	}
	waited := make(chan nvml.Return)
	go func() {
		_, ret := set.Wait(60_000)
		waited <- ret
	}()
	do(t, one, &RaiseXID{GPU: "0", Code: 48})
	if ret := <-waited; ret != nvml.SUCCESS {
		t.Errorf("the other waits for the event: %v", ret)
	}
	do(t, one, &HangGPU{GPU: "0"})
	answered := make(chan nvml.Return)
	go func() {
		_, ret := b.devices[0].GetTemperature(nvml.TEMPERATURE_GPU)
		answered <- ret
	}()
	do(t, one, &UnhangGPU{GPU: "0"})
	if ret := <-answered; ret != nvml.SUCCESS {
		t.Errorf("after the hang: %v", ret)
	}
}

func TestARebootForgetsWhatHardwareForgets(t *testing.T) {
	for _, profile := range []string{"dgx-a100", "dgx-h100"} {
		t.Run(profile, func(t *testing.T) {
			folder := private(t)
			m := openMachine(t, profile, folder)
			keepsMode := profile == "dgx-a100"
			prepare := func() {
				do(t, m, &SetMIG{GPU: "0", Enabled: true})
				if keepsMode {
					do(t, m, &ResetGPU{GPU: "0"})
				}
				do(t, m, &CreateMIG{GPU: "0", Profile: m.profile.GPU.MIG.table().profiles[0].name})
				do(t, m, &SetComputeMode{GPU: "1", Mode: ComputeProhibited})
				do(t, m, &AddProcess{GPU: "2", Process: Process{PID: 9, Kind: ProcessCompute}})
				do(t, m, &CountECC{GPU: "3", ECCCounts: ECCCounts{Uncorrected: 1}})
				do(t, m, &LoseGPU{GPU: "4"})
			}
			check := func(m *Machine, bootBefore string) {
				t.Helper()
				s := m.State()
				if s.BootID == bootBefore {
					t.Error("the boot ID is the same")
				}
				if g := s.GPUs[0]; g.MIG != keepsMode || g.PendingMIG != keepsMode || len(g.Instances) > 0 {
					t.Errorf("MIG mode %t, pending %t, instances %v", g.MIG, g.PendingMIG, g.Instances)
				}
				if s.GPUs[1].ComputeMode != ComputeDefault || len(s.GPUs[2].Processes) > 0 || s.GPUs[4].Lost {
					t.Errorf("compute mode %s, processes %v, lost %t", s.GPUs[1].ComputeMode, s.GPUs[2].Processes, s.GPUs[4].Lost)
				}
				if h := s.GPUs[3].Health; h.Volatile.Uncorrected != 0 || h.Aggregate.Uncorrected == 0 {
					t.Errorf("ECC volatile %+v, aggregate %+v", h.Volatile, h.Aggregate)
				}
			}
			prepare()
			boot := m.BootID()
			do(t, m, &Reboot{})
			check(m, boot)
			if keepsMode {
				do(t, m, &SetMIG{GPU: "0"})
				do(t, m, &ResetGPU{GPU: "0"})
			}

			// The machine that the simulation runs on is rebooted.
			prepare()
			boot = m.BootID()
			path := filepath.Join(folder, "state.json")
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			data = []byte(strings.ReplaceAll(string(data), m.State().HostBootID, "an-earlier-boot"))
			if err := os.WriteFile(path, data, 0o600); err != nil {
				t.Fatal(err)
			}
			again := openMachine(t, profile, folder)
			check(again, boot)
			if openMachine(t, profile, folder).BootID() != again.BootID() {
				t.Error("it is rebooted at every start")
			}
		})
	}
}

func TestAStateOfAnotherMachineIsRefused(t *testing.T) {
	p, _ := LoadProfile("t4")
	other, _ := LoadProfile("l40s")
	smaller, _ := LoadProfile("t4")
	smaller.GPUs = smaller.GPUs[:1]
	tests := map[string]struct {
		spoil   func(string) string
		profile *Profile
		node    string
		want    string
	}{
		"another profile": {nil, other, "node-a", `profile: the state is of "t4", not "l40s"`},
		"another node":    {nil, p, "node-b", `node: the state is of "node-a", not "node-b"`},
		"fewer GPUs":      {nil, smaller, "node-a", `gpus: the state has 4, profile "t4" 1`},
		"no JSON":         {func(string) string { return "" }, p, "node-a", "remove it to start with a new machine"},
		"unknown field":   {func(s string) string { return strings.Replace(s, `"node"`, `"nodes"`, 1) }, p, "node-a", `unknown field "nodes"`},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			folder := private(t)
			openMachine(t, "t4", folder)
			if path := filepath.Join(folder, "state.json"); test.spoil != nil {
				data, _ := os.ReadFile(path)
				if err := os.WriteFile(path, []byte(test.spoil(string(data))), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			_, err := OpenMachine(test.profile, test.node, folder)
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), folder) {
				t.Errorf("error %v, want one with %q and the folder", err, test.want)
			}
		})
	}
}

func TestAStateThatCannotBeKeptIsNotChanged(t *testing.T) {
	folder := private(t)
	m := openMachine(t, "t4", folder)
	d := open(t, m.NVML()).devices[0]
	if err := os.RemoveAll(folder); err != nil {
		t.Fatal(err)
	}
	if ret := d.SetComputeMode(nvml.COMPUTEMODE_PROHIBITED); ret != nvml.ERROR_OPERATING_SYSTEM {
		t.Errorf("set: %v, want %v", ret, nvml.ERROR_OPERATING_SYSTEM)
	}
	if got, ret := d.GetComputeMode(); got != nvml.COMPUTEMODE_DEFAULT || ret != nvml.SUCCESS {
		t.Errorf("then it is %v, %v", got, ret)
	}
}

func TestTheWholeStateIsKeptAsWritten(t *testing.T) {
	m := openMachine(t, "dgx-h100", private(t))
	celsius := uint32(80)
	for _, c := range []Command{
		&SetTemperature{GPU: "0", Celsius: &celsius}, &SetPCIe{GPU: "0", Link: &PCIe{Generation: 1, Width: 4}, Replays: 3},
		&RemapRows{GPU: "0", Rows: Rows{Corrected: 1, Pending: true}}, &SetRecovery{GPU: "0", Action: RecoveryReset}, &HangGPU{GPU: "1"}, &RemoveGPU{GPU: "2"},
	} {
		do(t, m, c)
	}
	data, err := json.Marshal(m.State())
	if err != nil {
		t.Fatal(err)
	}
	var back State
	if err := json.Unmarshal(data, &back); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(m.State(), &back); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestALostGPUAnswersNothingAndDisturbsNobody(t *testing.T) {
	lib := open(t, mustNew(t, "dgx-h100"))
	do(t, lib.machine, &LoseGPU{GPU: lib.devices[2].uuid})
	if n, ret := lib.DeviceGetCount(); n != 8 || ret != nvml.SUCCESS {
		t.Errorf("count %d, %v: a lost GPU is counted", n, ret)
	}
	if _, ret := lib.DeviceGetHandleByIndex(2); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("by index: %v", ret)
	}
	if _, ret := lib.DeviceGetHandleByUUID(lib.devices[2].uuid); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("by UUID: %v", ret)
	}
	forEachMethod(lib.devices[2], func(name string, call func(handleArgs) []reflect.Value) {
		for _, result := range call(withHandles) {
			if ret, ok := result.Interface().(nvml.Return); ok && ret != nvml.ERROR_GPU_IS_LOST && ret != nvml.ERROR_NOT_SUPPORTED {
				t.Errorf("%s answers %v", name, ret)
			}
		}
	})
	if _, ret := lib.devices[3].GetUUID(); ret != nvml.SUCCESS {
		t.Errorf("another GPU: %v", ret)
	}
	do(t, lib.machine, &RestoreGPU{GPU: "2"})
	if _, ret := lib.devices[2].GetUUID(); ret != nvml.SUCCESS {
		t.Errorf("restored: %v", ret)
	}
}

func TestAHungCallWaitsForItsRelease(t *testing.T) {
	ends := map[string]struct {
		command Command
		want    nvml.Return
	}{
		"released": {&UnhangGPU{GPU: "0"}, nvml.SUCCESS},
		"lost":     {&LoseGPU{GPU: "0"}, nvml.ERROR_GPU_IS_LOST},
		"removed":  {&RemoveGPU{GPU: "0"}, nvml.ERROR_GPU_IS_LOST},
		"rebooted": {&Reboot{}, nvml.ERROR_UNINITIALIZED},
	}
	for name, end := range ends {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				lib := open(t, mustNew(t, "t4"))
				do(t, lib.machine, &HangGPU{GPU: "0"})
				results := make(chan nvml.Return, 2)
				go func() { _, ret := lib.devices[0].GetUUID(); results <- ret }()
				go func() { results <- lib.devices[0].SetComputeMode(nvml.COMPUTEMODE_PROHIBITED) }()
				time.Sleep(time.Hour)
				synctest.Wait()
				if len(results) > 0 {
					t.Fatal("a call has returned")
				}
				if _, ret := lib.devices[1].GetUUID(); ret != nvml.SUCCESS {
					t.Errorf("another GPU: %v", ret)
				}
				if _, ret := lib.DeviceGetHandleByIndex(0); ret != nvml.SUCCESS {
					t.Errorf("the handle, which needs no answer of the GPU: %v", ret)
				}
				do(t, lib.machine, end.command)
				for range 2 {
					if ret := <-results; ret != end.want {
						t.Errorf("%v, want %v", ret, end.want)
					}
				}
			})
		})
	}
}

func TestTheDriverComesAndGoes(t *testing.T) {
	lib := mustNew(t, "dgx-h100")
	lib.Init()
	do(t, lib.machine, &SetComputeMode{GPU: "0", Mode: ComputeProhibited})
	do(t, lib.machine, &UnloadDriver{})
	if _, ret := lib.devices[0].GetUUID(); ret != nvml.ERROR_DRIVER_NOT_LOADED {
		t.Errorf("unloaded, a call: %v", ret)
	}
	if ret := lib.Init(); ret != nvml.ERROR_DRIVER_NOT_LOADED {
		t.Errorf("unloaded, init: %v", ret)
	}
	do(t, lib.machine, &LoadDriver{})
	if _, ret := lib.devices[0].GetUUID(); ret != nvml.ERROR_UNINITIALIZED {
		t.Errorf("loaded again, a call in the old session: %v", ret)
	}
	if ret := lib.Init(); ret != nvml.SUCCESS {
		t.Errorf("loaded again, init: %v", ret)
	}
	if mode, ret := lib.devices[0].GetComputeMode(); mode != nvml.COMPUTEMODE_DEFAULT || ret != nvml.SUCCESS {
		t.Errorf("compute mode %v, %v, want the default: the driver has forgotten", mode, ret)
	}
}

// Another version that was loaded stays, over a reload and a reboot, and it is the one that knows fields or does not.
func TestAnotherVersionOfTheDriverIsLoaded(t *testing.T) {
	lib := mustNew(t, "dgx-h100")
	recovery := func(want nvml.Return) {
		t.Helper()
		open(t, lib)
		values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
		if ret := lib.devices[0].GetFieldValues(values); ret != nvml.SUCCESS || nvml.Return(values[0].NvmlReturn) != want {
			t.Errorf("the recovery action: %v, %v, want %v", ret, nvml.Return(values[0].NvmlReturn), want)
		}
	}
	recovery(nvml.SUCCESS)
	do(t, lib.machine, &UnloadDriver{})
	do(t, lib.machine, &LoadDriver{Version: "550.163.01"})
	recovery(nvml.ERROR_INVALID_ARGUMENT)
	do(t, lib.machine, &UnloadDriver{})
	do(t, lib.machine, &LoadDriver{})
	do(t, lib.machine, &Reboot{})
	recovery(nvml.ERROR_INVALID_ARGUMENT)
	version, _ := lib.SystemGetDriverVersion()
	library, _ := lib.SystemGetNVMLVersion()
	if version != "550.163.01" || !strings.HasSuffix(library, ".550.163.01") || lib.machine.DriverVersion() != version {
		t.Errorf("the driver is %s and the library %s, want 550.163.01", version, library)
	}
}

func TestAGPUIsPluggedInAndOut(t *testing.T) {
	lib := open(t, mustNew(t, "t4"))
	const folder = "bus/pci/devices"
	there := func() int { entries, _ := fs.ReadDir(lib.Sysfs(), folder); return len(entries) }
	before := there()
	do(t, lib.machine, &RemoveGPU{GPU: "1"})
	if n, _ := lib.DeviceGetCount(); n != 4 {
		t.Errorf("count %d in the open session, want 4", n)
	}
	if _, ret := lib.devices[1].GetUUID(); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("its handle: %v", ret)
	}
	if there() != before-1 {
		t.Error("the kernel still has it")
	}
	lib.Shutdown()
	lib.Init()
	if n, _ := lib.DeviceGetCount(); n != 3 {
		t.Errorf("count %d in a new session, want 3", n)
	}
	if index, ret := lib.devices[2].GetIndex(); index != 1 || ret != nvml.SUCCESS {
		t.Errorf("the next GPU has index %d, %v, want 1", index, ret)
	}
	do(t, lib.machine, &AddGPU{GPU: "1"})
	if n, _ := lib.DeviceGetCount(); n != 3 {
		t.Errorf("count %d before a new session, want 3", n)
	}
	lib.Shutdown()
	lib.Init()
	if n, _ := lib.DeviceGetCount(); n != 4 || there() != before {
		t.Errorf("count %d, want 4", n)
	}
}

// TestASessionOfAnotherProcessHoldsTheGPUs: the kernel does not take them from the driver before it ends, also by the process's death.
func TestASessionOfAnotherProcessHoldsTheGPUs(t *testing.T) {
	for name, end := range map[string]func(*testing.T, *Library, *Machine){
		"it closes NVML": func(t *testing.T, other *Library, _ *Machine) {
			if ret := other.Shutdown(); ret != nvml.SUCCESS {
				t.Error(ret)
			}
		},
		// The kernel closes its files, and nobody removes the one that it has left.
		"it dies": func(t *testing.T, _ *Library, m *Machine) {
			files, err := filepath.Glob(m.file.sessionPath("*"))
			if err != nil || len(files) != 1 {
				t.Fatal(files, err)
			}
			if err := errors.Join(os.Remove(files[0]), os.WriteFile(files[0], nil, 0o600)); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			folder := filepath.Join(t.TempDir(), "sim")
			m, others := openMachine(t, "dgx-h100", folder), openMachine(t, "dgx-h100", folder)
			if m.InUse() {
				t.Error("in use from the beginning")
			}
			other := others.NVML()
			if ret := other.Init(); ret != nvml.SUCCESS {
				t.Fatal(ret)
			}
			if users := m.Users(); len(users) != 1 || users[0] != uint32(os.Getpid()) || !m.InUse() {
				t.Errorf("users: %v", users)
			}
			address := path.Base(m.Profile().GPUs[0].PCI)
			done := make(chan error, 1)
			go func() { done <- m.NVML().Sysfs().Write("bus/pci/devices/"+address+"/driver/unbind", address) }()
			select {
			case err := <-done:
				t.Fatalf("the driver has let go of it: %v", err)
			case <-time.After(5 * pollInterval):
			}
			// Nor is another GPU reset, or the driver unloaded.
			if _, err := m.Do(&ResetGPU{GPU: "1"}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("in use by process %d", os.Getpid())) {
				t.Errorf("reset under a session: %v", err)
			}
			if _, err := m.Do(&UnloadDriver{}); err == nil || !strings.Contains(err.Error(), fmt.Sprintf("process %d has a session", os.Getpid())) {
				t.Errorf("unloaded under a session: %v", err)
			}
			end(t, other, m)
			if err := <-done; err != nil || m.InUse() {
				t.Errorf("%v, in use: %t", err, m.InUse())
			}
			do(t, m, &ResetGPU{GPU: "1"})
			do(t, m, &UnloadDriver{})
		})
	}
}
