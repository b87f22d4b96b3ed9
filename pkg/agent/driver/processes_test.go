// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/reconcile"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestWhoElseIsOnAGPU: the host's processes, as an MPS server, are nobody else's.
func TestWhoElseIsOnAGPU(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	handle, err := nvml.Open("sim:t4", nvml.OpenOptions{NodeName: "node-1", ProcRoot: filepath.Join(t.TempDir(), "no-driver")})
	if err != nil {
		t.Fatal(err)
	}
	hardware := NewHardware(HardwareOptions{Open: func() (*nvml.Handle, error) { return handle, nil }, Clock: clock.RealClock{}})
	node, err := hardware.Discover(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for pid, pod := range []string{"", "pod-1", "pod-2", "pod-3", "pod-3"} {
		if _, err := handle.Machine.Do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: uint32(pid + 1), Kind: nvmlsim.ProcessMPS, Pod: pod}}); err != nil {
			t.Fatal(err)
		}
	}
	a := &Agent{opts: Options{Hardware: hardware, Tools: sharing.NewSimulated(handle.Machine)}}
	for _, tc := range []struct {
		pods []types.UID
		want int
	}{{nil, 4}, {[]types.UID{"pod-1", "pod-2"}, 2}, {[]types.UID{"pod-1", "pod-2", "pod-3"}, 0}} {
		if n, err := a.processesBut(ctx, node.GPUs[0].Name, tc.pods); err != nil || n != tc.want {
			t.Errorf("beside %v: %d, %v; want %d", tc.pods, n, err, tc.want)
		}
	}
	if n, err := hardware.Processes(ctx, node.GPUs[0].Name); err != nil || n != 5 {
		t.Errorf("all processes: %d, %v", n, err)
	}
	if _, err := a.processesBut(ctx, "gpu-9", nil); err == nil {
		t.Error("a GPU that is not there has no processes")
	}
}

// TestWhoIsInAPlace: a process counts unless it is certain that it is elsewhere on the GPU.
func TestWhoIsInAPlace(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	r := newRig(t, "dgx-h100")
	r.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
	make := func(profile string, start uint32, compute ...uint32) {
		r.do(&nvmlsim.CreateMIG{GPU: "0", Profile: profile, Start: &start, Compute: compute})
	}
	make("1g.10gb", 0)
	make("1g.10gb", 2)
	make("3g.40gb", 4, 1, 1)
	h := r.hardware()
	if _, err := h.Discover(ctx); err != nil {
		t.Fatal(err)
	}
	for _, instance := range r.machine.State().GPUs[0].Instances {
		for _, compute := range instance.Compute {
			pid := 100*instance.Start + compute.Start + 1
			r.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: pid, Kind: nvmlsim.ProcessCompute, Instance: &nvmlsim.Instance{GPU: instance.ID, Compute: compute.ID}}})
		}
	}
	at := func(start, size uint32) *ledger.Partition { return &ledger.Partition{Start: start, Size: size} }
	part := func(start, size uint32) *ledger.Partition {
		return &ledger.Partition{Start: 4, Size: 4, ComputeStart: start, ComputeSize: size}
	}
	for name, tc := range map[string]struct {
		at   []*ledger.Partition
		want int
	}{
		"the GPU":                      {nil, 4},
		"all of it":                    {[]*ledger.Partition{nil}, 4},
		"a place":                      {[]*ledger.Partition{at(0, 1)}, 1},
		"two places":                   {[]*ledger.Partition{at(0, 1), at(2, 1)}, 2},
		"a place with nothing in it":   {[]*ledger.Partition{at(1, 1)}, 0},
		"a place around others":        {[]*ledger.Partition{at(0, 4)}, 2},
		"a divided place":              {[]*ledger.Partition{at(4, 4)}, 2},
		"a part of a divided place":    {[]*ledger.Partition{part(0, 1)}, 1},
		"a part of it with nothing":    {[]*ledger.Partition{part(2, 1)}, 0},
		"a place, and all of it again": {[]*ledger.Partition{at(0, 1), nil}, 4},
	} {
		if n, err := h.Processes(ctx, first, tc.at...); err != nil || n != tc.want {
			t.Errorf("%s: %d, %v; want %d", name, n, err, tc.want)
		}
	}
}

// TestAProcessThatMayBeAnywhereIsEverywhere: in no instance, in one that is not known, or in a part of one that is not.
func TestAProcessThatMayBeAnywhereIsEverywhere(t *testing.T) {
	u := &users{instances: []nvml.GPUInstance{{ID: 1, Placement: nvml.Placement{Start: 4, Size: 4}, Devices: []nvml.MIGDevice{{GPUInstance: 1, ComputeInstance: 2, Compute: nvml.Placement{Start: 0, Size: 1}}}}}}
	for name, tc := range map[string]struct {
		in   *nvml.Instance
		want *ledger.Partition
	}{
		"no instance":         {nil, nil},
		"an unknown instance": {&nvml.Instance{GPU: 2, Compute: 2}, nil},
		"an unknown part":     {&nvml.Instance{GPU: 1, Compute: 0}, &ledger.Partition{Start: 4, Size: 4}},
		"a part":              {&nvml.Instance{GPU: 1, Compute: 2}, &ledger.Partition{Start: 4, Size: 4, ComputeSize: 1}},
	} {
		if diff := cmp.Diff(tc.want, u.placeOf(&nvml.Process{PID: 1, Instance: tc.in})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// deaf is a library whose GPU tells all but its processes.
type deaf struct {
	nvml.Library
	busID string
	hangs <-chan struct{}
	asked *atomic.Int32
}

func (l deaf) DeviceAt(busID string) (nvml.Device, error) {
	d, err := l.Library.DeviceAt(busID)
	if busID == l.busID {
		d = deafDevice{d, l}
	}
	return d, err
}

type deafDevice struct {
	nvml.Device
	library deaf
}

func (d deafDevice) Processes() ([]nvml.Process, error) {
	d.library.asked.Add(1)
	<-d.library.hangs
	return d.Device.Processes()
}

// TestACountThatHangsIsOneCall, however often processes are counted, and takes no time of the other GPUs. The GPU answers else, so it has
// no fault.
func TestACountThatHangsIsOneCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		gpus := r.found(ctx).inventory.node.GPUs
		hangs := make(chan struct{})
		var asked atomic.Int32
		r.wrap = func(library nvml.Library) nvml.Library {
			return deaf{Library: library, busID: gpus[0].PCIBusID, hangs: hangs, asked: &asked}
		}
		h := r.found(ctx)
		look, cancel := context.WithTimeout(ctx, reconcile.Interval/2)
		defer cancel()
		for range 2 {
			if n, err := h.Processes(look, gpus[0].Name); err == nil || !strings.Contains(err.Error(), gpus[0].Name) {
				t.Errorf("%d processes, %v; want an error that names the GPU", n, err)
			}
		}
		if n, err := h.Processes(look, gpus[1].Name); n != 0 || err != nil {
			t.Errorf("the other GPU: %d processes, %v", n, err)
		}
		if n := asked.Load(); n != 1 {
			t.Errorf("asked %d times, and no answer was there yet", n)
		}
		close(hangs)
		synctest.Wait()
		if n, err := h.Processes(ctx, gpus[0].Name); n != 0 || err != nil {
			t.Errorf("when it has answered: %d processes, %v", n, err)
		}
	})
}
