// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"errors"
	"testing"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// loaded is GPU 0 of a simulated machine after some commands. Of two machines in one test the C library sees the first.
func loaded(t *testing.T, profile string, commands ...nvmlsim.Command) (Device, *nvmlsim.Machine) {
	t.Helper()
	p, err := nvmlsim.LoadProfile(profile)
	if err != nil {
		t.Fatal(err)
	}
	machine, lib := seen(t, p)
	happen(t, machine, commands...)
	d, err := initialized(t, lib).Device(0)
	if err != nil {
		t.Fatal(err)
	}
	return d, machine
}

func ptr[T any](v T) *T { return &v }

var busy = nvmlsim.Load{
	GPU: 90, SM: 40, Tensor: 30, Memory: 20, Encoder: 2, Decoder: 3, PCIeTransmit: 4, PCIeReceive: 5,
	NVLinkTransmit: 6, NVLinkReceive: 7, Energy: 8,
	Clocks: &nvmlsim.ClockRates{Graphics: 1700, SM: 1710, Memory: 2619, Video: 1400},
}

func TestUsageIsWhatTheGPUTells(t *testing.T) {
	const mib = 1 << 20
	whole := Usage{
		KernelPercent: ptr(uint32(90)), MemoryPercent: ptr(uint32(20)), EncoderPercent: ptr(uint32(2)), DecoderPercent: ptr(uint32(3)),
		Memory: &MemoryUse{Total: 81559 * mib, Used: (480 + 1000) * mib}, PowerLimitMilliwatts: ptr(uint32(700_000)), EnergyMillijoules: ptr(uint64(8)),
		Clocks: map[ClockDomain]Clock{
			ClockGraphics: {ptr(uint32(1700)), ptr(uint32(1980))}, ClockSM: {ptr(uint32(1710)), ptr(uint32(1980))},
			ClockMemory: {ptr(uint32(2619)), ptr(uint32(2619))}, ClockVideo: {ptr(uint32(1400)), ptr(uint32(1545))},
		},
		PCIe: &Traffic{Transmit: 4000, Receive: 5000}, NVLink: &Traffic{Transmit: 6 << 10, Receive: 7 << 10},
	}
	partitioned := whole
	partitioned.KernelPercent, partitioned.MemoryPercent, partitioned.EncoderPercent, partitioned.DecoderPercent = nil, nil, nil, nil
	partitioned.Memory = &MemoryUse{Total: 81559 * mib, Used: 480 * mib}
	load := &nvmlsim.SetLoad{GPU: "0", Load: busy}
	process := &nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 1, Kind: nvmlsim.ProcessCompute, MemoryMiB: 1000}}
	for name, tc := range map[string]struct {
		before []nvmlsim.Command
		want   Usage
	}{
		"a whole GPU": {[]nvmlsim.Command{load, process}, whole},
		// What NVML does not tell is nil, and not 0.
		"one with MIG enabled": {[]nvmlsim.Command{&nvmlsim.SetMIG{GPU: "0", Enabled: true}, load}, partitioned},
	} {
		t.Run(name, func(t *testing.T) {
			d, _ := loaded(t, "dgx-h100", tc.before...)
			got, err := d.Usage()
			if diff := cmp.Diff(tc.want, got); diff != "" || err != nil {
				t.Errorf("%v (-want +got):\n%s", err, diff)
			}
		})
	}
	t.Run("one without NVLink", func(t *testing.T) {
		d, _ := loaded(t, "t4", &nvmlsim.SetLoad{GPU: "0", Load: busy})
		if got, err := d.Usage(); err != nil || got.NVLink != nil || got.PCIe == nil {
			t.Errorf("%+v, %v", got, err)
		}
	})
	t.Run("one without clocks that idles", func(t *testing.T) {
		d, _ := loaded(t, "dgx-a100") // no clocks are known of it
		if got, err := d.Usage(); err != nil || len(got.Clocks) > 0 || *got.KernelPercent != 0 {
			t.Errorf("%+v, %v", got, err)
		}
	})
	t.Run("a lost one", func(t *testing.T) {
		d, machine := loaded(t, "dgx-h100")
		happen(t, machine, &nvmlsim.LoseGPU{GPU: "0"})
		if _, err := d.Usage(); !errors.Is(err, ErrGPULost) {
			t.Error(err)
		}
	})
}

// lying answers with what is no percentage.
type lying struct{ gonvml.Device }

func (lying) GetUtilizationRates() (gonvml.Utilization, gonvml.Return) {
	return gonvml.Utilization{Gpu: 101, Memory: 100}, gonvml.SUCCESS
}

func TestWhatIsNoPercentageIsLeftOutAndTold(t *testing.T) {
	d, _ := loaded(t, "dgx-h100")
	sim := d.(*device)
	sim.nvml = lying{sim.nvml}
	got, err := sim.Usage()
	if err != nil || got.KernelPercent != nil || got.MemoryPercent == nil || got.Odd == nil {
		t.Errorf("%+v, %v: want all but the first", got, err)
	}
}

func TestEachMIGDeviceHasItsMemory(t *testing.T) {
	d, machine := loaded(t, "dgx-h100")
	if devices, err := d.MIGUsage(); err != nil || len(devices) > 0 {
		t.Errorf("a GPU that is not partitioned: %v, %v", devices, err)
	}
	var want []MIGUsage
	if _, err := machine.Do(&nvmlsim.SetMIG{GPU: "0", Enabled: true}); err != nil {
		t.Fatal(err)
	}
	for i, profile := range []string{"1g.10gb", "3g.40gb"} {
		made, err := machine.Do(&nvmlsim.CreateMIG{GPU: "0", Profile: profile})
		if err != nil {
			t.Fatal(err)
		}
		memory := uint64(100 * (i + 1))
		at := made.MIG.Instance
		if _, err := machine.Do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{
			PID: uint32(i + 1), Kind: nvmlsim.ProcessCompute, MemoryMiB: memory, Instance: &at,
		}}); err != nil {
			t.Fatal(err)
		}
		want = append(want, MIGUsage{UUID: made.MIG.UUID, Instance: Instance{GPU: at.GPU, Compute: at.Compute}, Memory: &MemoryUse{Used: memory << 20}})
	}
	got, err := d.MIGUsage()
	for i := range got {
		if got[i].Memory == nil || got[i].Memory.Total < 9<<30 {
			t.Fatalf("%+v: no memory", got[i])
		}
		got[i].Memory.Total = 0
	}
	byUUID := cmp.Transformer("byUUID", func(all []MIGUsage) map[string]MIGUsage {
		m := map[string]MIGUsage{}
		for _, u := range all {
			m[u.UUID] = u
		}
		return m
	})
	if diff := cmp.Diff(want, got, byUUID); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
}

func TestRatesAreThoseOfTheGPUOrOfTheInstance(t *testing.T) {
	d, machine := loaded(t, "dgx-h100", &nvmlsim.SetMIG{GPU: "0", Enabled: true}, &nvmlsim.SetLoad{GPU: "0", Load: busy})
	made, err := machine.Do(&nvmlsim.CreateMIG{GPU: "0", Profile: "1g.10gb"})
	if err != nil {
		t.Fatal(err)
	}
	at := made.MIG.Instance.GPU
	if _, err := machine.Do(&nvmlsim.SetLoad{GPU: "0", Instance: &at, Load: nvmlsim.Load{GPU: 5, SM: 6, Tensor: 7, Memory: 8}}); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		of   *uint32
		want Rates
	}{
		"the GPU":     {nil, Rates{ptr(90.), ptr(40.), ptr(30.), ptr(20.)}},
		"an instance": {&at, Rates{ptr(5.), ptr(6.), ptr(7.), ptr(8.)}},
	} {
		earlier, err := d.Sample(tc.of)
		if err != nil {
			t.Fatal(err)
		}
		later, err := d.Sample(tc.of)
		if err != nil {
			t.Fatal(err)
		}
		got, err := later.Since(earlier)
		if diff := cmp.Diff(tc.want, got); diff != "" || err != nil {
			t.Errorf("%s: %v (-want +got):\n%s", name, err, diff)
		}
		earlier.Close()
		if rates, err := later.Since(earlier); !errors.Is(err, ErrNoSession) {
			t.Errorf("%s: rates since a closed sample: %+v, %v", name, rates, err)
		}
	}
	sample, err := d.Sample(nil)
	if err != nil {
		t.Fatal(err)
	}
	reopened, err := initialized(t, Adapt(machine.NVML(), "reopened")).Device(0)
	if err != nil {
		t.Fatal(err)
	}
	other, err := reopened.Sample(nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Since(sample); !errors.Is(err, ErrNoSession) {
		t.Errorf("a sample of another session: %v", err)
	}
	gone := uint32(99)
	if _, err := d.Sample(&gone); err == nil {
		t.Error("an instance that is not there has a sample")
	}
}

func TestAGPUBeforeHopperHasNoSample(t *testing.T) {
	d, _ := loaded(t, "dgx-a100")
	if _, err := d.Sample(nil); !errors.Is(err, ErrNotSupported) {
		t.Error(err)
	}
}

// TestALibraryWithoutThePerformanceMonitorIsNotAskedForIt: the functions came with R525.
func TestALibraryWithoutThePerformanceMonitorIsNotAskedForIt(t *testing.T) {
	sim, err := nvmlsim.New("dgx-h100", "node-a")
	if err != nil {
		t.Fatal(err)
	}
	c := cLibrary{Library: sim, missing: map[string]bool{"nvmlGpmQueryDeviceSupport": true}, lookups: map[string]int{}}
	d, err := initialized(t, adaptReal(c, "c")).Device(0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Sample(nil); !errors.Is(err, ErrNotSupported) {
		t.Errorf("%v, want that it is not supported", err)
	}
	if u, err := d.Usage(); err != nil || u.KernelPercent == nil {
		t.Errorf("%+v, %v", u, err)
	}
}

// watched is a library that knows its samples, and what is asked while no session is open.
type watched struct {
	gonvml.Interface
	t                *testing.T
	open, taken, let int
}

func (w *watched) InitWithFlags(flags uint32) gonvml.Return {
	w.open++
	return w.Interface.InitWithFlags(flags)
}

func (w *watched) Shutdown() gonvml.Return {
	w.open--
	return w.Interface.Shutdown()
}

func (w *watched) GpmSampleAlloc() (gonvml.GpmSample, gonvml.Return) {
	w.taken++
	s, ret := w.Interface.GpmSampleAlloc()
	return watchedSample{s, w}, ret
}

// expect compares how many samples NVML holds.
func (w *watched) expect(when string, held int) {
	w.t.Helper()
	if got := w.taken - w.let; got != held {
		w.t.Errorf("%s: NVML holds %d samples, want %d", when, got, held)
	}
}

type watchedSample struct {
	gonvml.GpmSample
	library *watched
}

func (s watchedSample) Free() gonvml.Return {
	s.library.let++
	if s.library.open == 0 {
		s.library.t.Error("a sample is freed while no session is open")
	}
	return s.GpmSample.Free()
}

// TestSamplesAreFreedInTheirSession: in a call that takes another one, or at its end, and each once.
func TestSamplesAreFreedInTheirSession(t *testing.T) {
	sim, err := nvmlsim.New("dgx-h100", "node-a")
	if err != nil {
		t.Fatal(err)
	}
	w := &watched{Interface: sim, t: t}
	lib := Adapt(w, "watched")
	start := func() (a, b Device) {
		if err := lib.Init(); err != nil {
			t.Fatal(err)
		}
		for i, d := range []*Device{&a, &b} {
			var err error
			if *d, err = lib.Device(i); err != nil {
				t.Fatal(err)
			}
		}
		return a, b
	}
	take := func(d Device) Sample {
		s, err := d.Sample(nil)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	end := func() {
		if err := lib.Shutdown(); err != nil {
			t.Fatal(err)
		}
	}
	a, b := start()
	first, second := take(a), take(b)
	w.expect("taken", 2)
	first.Close()
	first.Close()
	w.expect("closed", 2)
	third := take(a)
	w.expect("one is taken after another was closed", 2)
	gone := uint32(99)
	if _, err := a.Sample(&gone); err == nil {
		t.Fatal("an instance that is not there has a sample")
	}
	third.Close()
	start()
	end()
	w.expect("another session is left", 3)
	end()
	w.expect("the last session ends", 0)
	second.Close()
	third.Close()
	a, b = start()
	for _, d := range []Device{a, b} {
		if rates, err := take(d).Since(second); !errors.Is(err, ErrNoSession) {
			t.Errorf("rates since a sample of the session before: %+v, %v", rates, err)
		}
	}
	w.expect("in the next session", 2)
	end()
	w.expect("at the end", 0)
}
