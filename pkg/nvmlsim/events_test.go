// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

// registered returns a set that wants these events of a library's first GPU.
func registered(t *testing.T, lib *Library, types uint64) nvml.EventSet {
	t.Helper()
	set, ret := lib.EventSetCreate()
	if ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	if ret := lib.devices[0].RegisterEvents(types, set); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	return set
}

func TestEventsAreThoseThatWereAskedFor(t *testing.T) {
	lib, d := machineWith(t, "h100-80gb")
	m := lib.machine
	do(t, m, &RaiseXID{GPU: "0", Code: 31}) // before the registration
	set := registered(t, lib, nvml.EventTypeXidCriticalError|nvml.EventTypeSingleBitEccError|nvml.EventTypeDoubleBitEccError|
		nvml.EventMigConfigChange|nvml.EventTypeGpuRecoveryAction)
	made := do(t, m, &CreateMIG{GPU: "0", Profile: "1g.10gb"}).MIG.Instance
	do(t, m, &RaiseXID{GPU: "1", Code: 48}) // another GPU
	do(t, m, &SetThrottle{GPU: "0", Reasons: []string{"hw-slowdown"}})
	do(t, m, &RaiseXID{GPU: "0", Code: 43, Instance: &made})
	do(t, m, &CountECC{GPU: "0", ECCCounts: ECCCounts{Corrected: 2, Uncorrected: 1}})
	do(t, m, &SetRecovery{GPU: "0", Action: RecoveryReset})
	type event struct{ Type, Data, GI, CI uint64 }
	var got []event
	for {
		e, ret := set.Wait(0)
		if ret == nvml.ERROR_TIMEOUT {
			break
		}
		if ret != nvml.SUCCESS || e.Device != nvml.Device(d) {
			t.Fatalf("%+v, %v", e, ret)
		}
		got = append(got, event{e.EventType, e.EventData, uint64(e.GpuInstanceId), uint64(e.ComputeInstanceId)})
	}
	want := []event{
		{nvml.EventMigConfigChange, 0, noInstance, noInstance}, // GPU instance
		{nvml.EventMigConfigChange, 0, noInstance, noInstance}, // compute instance
		{nvml.EventTypeXidCriticalError, 43, uint64(made.GPU), uint64(made.Compute)},
		{nvml.EventTypeSingleBitEccError, 0, noInstance, noInstance},
		{nvml.EventTypeDoubleBitEccError, 0, noInstance, noInstance},
		{nvml.EventTypeGpuRecoveryAction, 1, noInstance, noInstance},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestWaitBlocksUntilSomethingHappens(t *testing.T) {
	tests := map[string]struct {
		happens func(*Library, nvml.EventSet)
		want    nvml.Return
		after   time.Duration
	}{
		"nothing":             {func(*Library, nvml.EventSet) {}, nvml.ERROR_TIMEOUT, 5 * time.Second},
		"an event":            {func(l *Library, _ nvml.EventSet) { l.machine.Do(&RaiseXID{GPU: "0", Code: 79}) }, nvml.SUCCESS, time.Second},
		"another GPU's event": {func(l *Library, _ nvml.EventSet) { l.machine.Do(&RaiseXID{GPU: "1", Code: 79}) }, nvml.ERROR_TIMEOUT, 5 * time.Second},
		"the set is freed":    {func(_ *Library, s nvml.EventSet) { s.Free() }, nvml.ERROR_INVALID_ARGUMENT, time.Second},
		"the session ends":    {func(l *Library, _ nvml.EventSet) { l.Shutdown() }, nvml.ERROR_UNINITIALIZED, time.Second},
		"the session ends and another one begins": {func(l *Library, _ nvml.EventSet) { l.Shutdown(); l.Init() }, nvml.ERROR_UNINITIALIZED, time.Second},
		"the driver goes":                         {func(l *Library, _ nvml.EventSet) { l.machine.Do(&UnloadDriver{}) }, nvml.ERROR_DRIVER_NOT_LOADED, time.Second},
		"the GPU is removed":                      {func(l *Library, _ nvml.EventSet) { l.machine.Do(&RemoveGPU{GPU: "0"}) }, nvml.ERROR_GPU_IS_LOST, time.Second},
		"the machine reboots":                     {func(l *Library, _ nvml.EventSet) { l.machine.Do(&Reboot{}) }, nvml.ERROR_UNINITIALIZED, time.Second},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				lib := mustNew(t, "dgx-h100")
				lib.Init()
				set := registered(t, lib, nvml.EventTypeXidCriticalError)
				start := time.Now()
				time.AfterFunc(time.Second, func() { test.happens(lib, set) })
				_, ret := set.Wait(5000)
				if ret != test.want || time.Since(start) != test.after {
					t.Errorf("%v after %v, want %v after %v", ret, time.Since(start), test.want, test.after)
				}
			})
		})
	}
}

func TestALostGPUIsReportedOnceItsEventsAre(t *testing.T) {
	lib := open(t, mustNew(t, "dgx-h100"))
	set := registered(t, lib, nvml.EventTypeXidCriticalError)
	do(t, lib.machine, &LoseGPU{GPU: "0"})
	if e, ret := set.Wait(0); ret != nvml.SUCCESS || e.EventData != xidFallenOff {
		t.Errorf("first: %+v, %v, want XID %d", e, ret, xidFallenOff)
	}
	if _, ret := set.Wait(0); ret != nvml.ERROR_GPU_IS_LOST {
		t.Errorf("then: %v, want %v", ret, nvml.ERROR_GPU_IS_LOST)
	}
}

func TestRegistrationIsRefused(t *testing.T) {
	lib, other := mustNew(t, "t4"), open(t, mustNew(t, "t4"))
	lib.Init()
	old, _ := lib.EventSetCreate()
	lib.Shutdown()
	open(t, lib)
	set := registered(t, lib, 0)
	foreign, _ := other.EventSetCreate()
	freed, _ := lib.EventSetCreate()
	freed.Free()
	d := lib.devices[0]
	tests := map[string]struct {
		types uint64
		set   nvml.EventSet
		want  nvml.Return
	}{
		"no set":                 {nvml.EventTypeXidCriticalError, nil, nvml.ERROR_INVALID_ARGUMENT},
		"another library's set":  {nvml.EventTypeXidCriticalError, foreign, nvml.ERROR_INVALID_ARGUMENT},
		"a set that was freed":   {nvml.EventTypeXidCriticalError, freed, nvml.ERROR_INVALID_ARGUMENT},
		"an older session's set": {nvml.EventTypeXidCriticalError, old, nvml.ERROR_INVALID_ARGUMENT},
		"an event of no kind":    {1 << 40, set, nvml.ERROR_NOT_SUPPORTED},
	}
	for name, test := range tests {
		if got := d.RegisterEvents(test.types, test.set); got != test.want {
			t.Errorf("%s: %v, want %v", name, got, test.want)
		}
	}
	if _, got := old.Wait(0); got != nvml.ERROR_UNINITIALIZED {
		t.Errorf("wait for an older session's set: %v", got)
	}
	if got := freed.Free(); got != nvml.ERROR_INVALID_ARGUMENT {
		t.Errorf("freed twice: %v", got)
	}
}

func TestTheOldestEventsAreForgotten(t *testing.T) {
	lib := open(t, mustNew(t, "t4"))
	set := registered(t, lib, nvml.EventTypeXidCriticalError)
	for i := range keptEvents + 10 {
		do(t, lib.machine, &RaiseXID{GPU: "0", Code: uint64(i%1000 + 1)})
	}
	if e, ret := set.Wait(0); ret != nvml.SUCCESS || e.EventData != 11 {
		t.Errorf("%+v, %v, want the first that is kept, 11", e, ret)
	}
	if got := len(lib.machine.State().Events); got != keptEvents {
		t.Errorf("%d events kept, want %d", got, keptEvents)
	}
}
