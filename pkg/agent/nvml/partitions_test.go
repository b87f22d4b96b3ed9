// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// hardware is a simulated machine with its first GPU.
func hardware(t *testing.T, profile string) (*nvmlsim.Machine, Device) {
	t.Helper()
	p, err := nvmlsim.LoadProfile(profile)
	if err != nil {
		t.Fatal(err)
	}
	m, lib := seen(t, p)
	d, err := initialized(t, lib).Device(0)
	if err != nil {
		t.Fatal(err)
	}
	return m, d
}

func happen(t *testing.T, m *nvmlsim.Machine, commands ...nvmlsim.Command) {
	t.Helper()
	for _, c := range commands {
		if _, err := m.Do(c); err != nil {
			t.Fatal(err)
		}
	}
}

func TestMIGProfilesHaveTheirNamesAndPlacements(t *testing.T) {
	tests := map[string][]string{
		"dgx-h100": {"1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.10gb+me", "1g.20gb"},
		"dgx-a100": {"1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb", "1g.10gb+me", "1g.20gb"},
		"hgx-b200": {"1g.23gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb", "1g.23gb+me", "1g.45gb"},
		"gb200":    {"1g.23gb", "2g.47gb", "3g.93gb", "4g.93gb", "7g.186gb", "1g.23gb+me", "1g.47gb"},
		"t4":       nil,
	}
	for profile, want := range tests {
		t.Run(profile, func(t *testing.T) {
			_, d := hardware(t, profile)
			profiles, err := d.MIGProfiles()
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, p := range profiles {
				names = append(names, p.Name)
			}
			if diff := cmp.Diff(want, names); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if profile != "dgx-h100" {
				return
			}
			wantOne := MIGProfile{
				Name: "3g.40gb", ID: 9, ComputeSlices: 3, Max: 2, MemoryMiB: 40448, Multiprocessors: 60, CopyEngines: 3, Decoders: 3, JPEGEngines: 3,
				Placements: []Placement{{0, 4}, {4, 4}},
			}
			if diff := cmp.Diff(wantOne, profiles[2]); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestAMIGDeviceIsMadeListedAndEnded(t *testing.T) {
	m, d := hardware(t, "dgx-h100")
	if none, err := d.GPUInstances(); err != nil || len(none) > 0 {
		t.Errorf("without MIG: %v, %v", none, err)
	}
	if err := d.SetMIGMode(true); err != nil {
		t.Fatal(err)
	}
	profiles, err := d.MIGProfiles()
	if err != nil {
		t.Fatal(err)
	}
	two, one := profiles[1], profiles[0]
	id, err := d.CreateGPUInstance(two, two.Placements[1])
	if err != nil {
		t.Fatal(err)
	}
	want := []GPUInstance{{ID: id, ProfileID: 14, Placement: Placement{2, 2}}}
	if got, err := d.GPUInstances(); err != nil || !cmp.Equal(want, got) {
		t.Errorf("without a compute instance: %+v, %v", got, err)
	}
	made, err := d.CreateComputeInstance(id)
	if err != nil {
		t.Fatal(err)
	}
	if made.Compute != (Placement{0, 2}) || made.Multiprocessors != 32 {
		t.Errorf("the compute instance has the slices %+v and %d multiprocessors", made.Compute, made.Multiprocessors)
	}
	want[0].Devices = []MIGDevice{made}
	if got, err := d.GPUInstances(); err != nil || !cmp.Equal(want, got) || made.UUID == "" {
		t.Errorf("with one: %+v, %v", got, err)
	}
	happen(t, m, &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 5, Kind: nvmlsim.ProcessCompute, Instance: &nvmlsim.Instance{GPU: id}}})
	for name, step := range map[string]struct {
		err  error
		want error
	}{
		"overlap":                  {second(d.CreateGPUInstance(one, Placement{3, 1})), ErrNoResources},
		"where none starts":        {second(d.CreateGPUInstance(two, Placement{1, 2})), gonvml.ERROR_INVALID_ARGUMENT},
		"second compute instance":  {second(d.CreateComputeInstance(id)), ErrNoResources},
		"compute of no instance":   {second(d.CreateComputeInstance(99)), ErrNotFound},
		"process in it":            {d.DestroyComputeInstance(id, 0), ErrInUse},
		"compute instance in it":   {d.DestroyGPUInstance(id), ErrInUse},
		"compute that is not":      {d.DestroyComputeInstance(id, 3), ErrNotFound},
		"instance that is not":     {d.DestroyGPUInstance(99), ErrNotFound},
		"compute mode under MIG":   {d.SetComputeMode(ComputeProhibited), ErrNotSupported},
		"end of MIG with instance": {d.SetMIGMode(false), ErrInUse},
	} {
		if !errors.Is(step.err, step.want) {
			t.Errorf("%s: %v, want %v", name, step.err, step.want)
		}
	}
	happen(t, m, &nvmlsim.RemoveProcess{GPU: "0", PID: 5})
	for _, err := range []error{d.DestroyComputeInstance(id, made.ComputeInstance), d.DestroyGPUInstance(id), d.SetMIGMode(false)} {
		if err != nil {
			t.Error(err)
		}
	}
}

func TestAMIGModeOnAmpereWaitsForAReset(t *testing.T) {
	_, ampere := hardware(t, "dgx-a100")
	if err := ampere.SetMIGMode(true); !errors.Is(err, ErrResetRequired) {
		t.Errorf("on Ampere: %v, want %v", err, ErrResetRequired)
	}
	if mode, err := ampere.MIGMode(); err != nil || mode != (MIGMode{Capable: true, Pending: true}) {
		t.Errorf("on Ampere: %+v, %v", mode, err)
	}
}

func second[T any](_ T, err error) error { return err }

func TestProcessesOfAllKindsAreNamedOnce(t *testing.T) {
	m, d := hardware(t, "t4")
	for pid, kind := range []nvmlsim.ProcessKind{nvmlsim.ProcessMPS, nvmlsim.ProcessGraphics, nvmlsim.ProcessCompute} {
		happen(t, m, &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: uint32(30 - pid), Kind: kind, MemoryMiB: 1}})
	}
	got, err := d.Processes()
	want := []Process{{PID: 28, MemoryBytes: 1 << 20}, {PID: 29, MemoryBytes: 1 << 20}, {PID: 30, MemoryBytes: 1 << 20}}
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	twice := []Process{{PID: 1}, {PID: 1, Instance: &Instance{}}, {PID: 1, Instance: &Instance{Compute: 1}}}
	listed := doubled{}
	lib := initialized(t, Adapt(listed, "doubled"))
	gpu, err := lib.Device(0)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := gpu.Processes(); err != nil || !cmp.Equal(twice, got) {
		t.Errorf("in two lists: %+v, %v", got, err)
	}
	if err := d.SetComputeMode(ComputeExclusiveProcess); err != nil {
		t.Error(err)
	}
	if mode, err := d.ComputeMode(); mode != ComputeExclusiveProcess || err != nil {
		t.Errorf("compute mode %s, %v", mode, err)
	}
	if err := d.SetComputeMode("Shared"); err == nil {
		t.Error("a compute mode of no kind is set")
	}
	if used, err := d.MemoryUsedBytes(); err != nil || used < 3<<20 {
		t.Errorf("%d bytes used, %v", used, err)
	}
}

// doubled is a library whose one GPU has processes in two lists.
type doubled struct{ gonvml.Interface }

func (doubled) InitWithFlags(uint32) gonvml.Return { return gonvml.SUCCESS }
func (doubled) Shutdown() gonvml.Return            { return gonvml.SUCCESS }
func (doubled) DeviceGetHandleByIndex(int) (gonvml.Device, gonvml.Return) {
	return doubledGPU{}, gonvml.SUCCESS
}

type doubledGPU struct{ gonvml.Device }

var inBoth = []gonvml.ProcessInfo{
	{Pid: 1, UsedGpuMemory: unknownMemory, GpuInstanceId: noInstance, ComputeInstanceId: noInstance},
	{Pid: 1, GpuInstanceId: 0, ComputeInstanceId: 1},
	{Pid: 1, GpuInstanceId: 0, ComputeInstanceId: 0},
}

func (doubledGPU) GetComputeRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return inBoth, gonvml.SUCCESS
}

func (doubledGPU) GetMPSComputeRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return inBoth, gonvml.SUCCESS
}

func (doubledGPU) GetGraphicsRunningProcesses() ([]gonvml.ProcessInfo, gonvml.Return) {
	return nil, gonvml.ERROR_NOT_SUPPORTED
}

func TestReadingsAreAllThatTheGPUHas(t *testing.T) {
	p := func(n uint32) *uint32 { return &n }
	throttled := uint64(gonvml.ClocksThrottleReasonHwSlowdown | gonvml.ClocksEventReasonGpuIdle)
	m, d := hardware(t, "dgx-h100")
	happen(t, m, &nvmlsim.SetTemperature{GPU: "0", Celsius: p(90)}, &nvmlsim.SetThrottle{GPU: "0", Reasons: []string{"hw-slowdown"}},
		&nvmlsim.SetPCIe{GPU: "0", Link: &nvmlsim.PCIe{Generation: 2, Width: 8}}, &nvmlsim.CountECC{GPU: "0", ECCCounts: nvmlsim.ECCCounts{Corrected: 1, Uncorrected: 2}},
		&nvmlsim.RemapRows{GPU: "0", Rows: nvmlsim.Rows{Uncorrected: 1, Pending: true}}, &nvmlsim.SetRecovery{GPU: "0", Action: nvmlsim.RecoveryReset})
	want := Readings{
		TemperatureC: p(90), MarginC: new(int32(-3)), SlowdownMarginC: new(int32(-2)), PowerMilliwatts: p(68_000),
		PCIe: &PCIeLink{Generation: 2, Width: 8, MaxGeneration: 5, MaxWidth: 16}, Throttle: &throttled,
		ECC: &ECCErrors{1, 2}, Rows: &RemappedRows{Uncorrected: 1, Pending: true}, RecoveryAction: p(1),
	}
	if got, err := d.Readings(); err != nil || !cmp.Equal(want, got) {
		t.Errorf("%v (-want +got):\n%s", err, cmp.Diff(want, got))
	}
	happen(t, m, &nvmlsim.LoseGPU{GPU: "0"})
	if _, err := d.Readings(); !errors.Is(err, ErrGPULost) {
		t.Errorf("a lost GPU: %v, want %v", err, ErrGPULost)
	}
}

func TestAGPUWithoutRowRemappingHasOtherReadings(t *testing.T) {
	_, old := hardware(t, "t4")
	if got, err := old.Readings(); err != nil || got.Rows != nil || got.TemperatureC == nil || got.MarginC != nil || got.SlowdownC == nil || *got.SlowdownC != 93 {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestAWatchReportsItsGPUsEvents(t *testing.T) {
	m, d := hardware(t, "dgx-h100")
	happen(t, m, &nvmlsim.SetMIG{GPU: "0", Enabled: true}, &nvmlsim.CreateMIG{GPU: "0", Profile: "7g.80gb"})
	w, err := d.Watch()
	if err != nil {
		t.Fatal(err)
	}
	happen(t, m, &nvmlsim.RaiseXID{GPU: "1", Code: 1}, &nvmlsim.RaiseXID{GPU: "0", Code: 43, Instance: &nvmlsim.Instance{}},
		&nvmlsim.CountECC{GPU: "0", ECCCounts: nvmlsim.ECCCounts{Uncorrected: 1}}, &nvmlsim.LoseGPU{GPU: "0"})
	for i, want := range []Event{{EventXID, 43, &Instance{}}, {EventDoubleBitECC, 0, nil}, {EventXID, 79, nil}} {
		if got, err := w.Wait(0); err != nil || !cmp.Equal(want, got) {
			t.Errorf("event %d: %+v, %v, want %+v", i, got, err, want)
		}
	}
	if _, err := w.Wait(time.Hour); !errors.Is(err, ErrGPULost) {
		t.Errorf("then: %v, want %v", err, ErrGPULost)
	}
	happen(t, m, &nvmlsim.RestoreGPU{GPU: "0"})
	if _, err := w.Wait(time.Millisecond); !errors.Is(err, ErrTimeout) {
		t.Errorf("restored: %v, want %v", err, ErrTimeout)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if _, err := w.Wait(time.Hour); !errors.Is(err, gonvml.ERROR_INVALID_ARGUMENT) {
		t.Errorf("closed: %v", err)
	}
}

// A GPU that computes changes its clocks many times a second, one whose memory fails corrects many errors, and an XID behind these comes late.
func TestAWatchDoesNotAskForWhatComesOften(t *testing.T) {
	for name, often := range map[string][]nvmlsim.Command{
		"changes of clocks": {&nvmlsim.SetThrottle{GPU: "0", Reasons: []string{"sw-power-cap"}}, &nvmlsim.SetThrottle{GPU: "0"}},
		"corrected errors":  {&nvmlsim.CountECC{GPU: "0", ECCCounts: nvmlsim.ECCCounts{Corrected: 1}}},
	} {
		t.Run(name, func(t *testing.T) {
			m, d := hardware(t, "dgx-h100")
			w, err := d.Watch()
			if err != nil {
				t.Fatal(err)
			}
			for range 40 {
				happen(t, m, often...)
			}
			happen(t, m, &nvmlsim.RaiseXID{GPU: "0", Code: 31})
			if got, err := w.Wait(0); err != nil || !cmp.Equal(Event{EventXID, 31, nil}, got) {
				t.Errorf("the first event: %+v, %v", got, err)
			}
			if err := w.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestADriverThatGoesIsToldFromOneThatWasReloaded(t *testing.T) {
	m, d := hardware(t, "t4")
	if os.Getenv(libraryVariable) != "" { // as in the kernel, the session of a process with the C library keeps the driver
		if _, err := m.Do(&nvmlsim.UnloadDriver{}); err == nil || !strings.Contains(err.Error(), "has a session open") {
			t.Errorf("unloaded under a session: %v", err)
		}
		return
	}
	happen(t, m, &nvmlsim.UnloadDriver{})
	if _, err := d.UUID(); !errors.Is(err, ErrDriverNotLoaded) {
		t.Errorf("unloaded: %v, want %v", err, ErrDriverNotLoaded)
	}
	happen(t, m, &nvmlsim.LoadDriver{})
	if _, err := d.UUID(); !errors.Is(err, ErrNoSession) || errors.Is(err, ErrDriverNotLoaded) {
		t.Errorf("reloaded: %v, want %v", err, ErrNoSession)
	}
}
