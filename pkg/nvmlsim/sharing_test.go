// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package nvmlsim

import (
	"errors"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
)

func daemon(name string, gpu int) Command {
	return &StartMPS{Daemon{Name: name, GPUs: []string{gpuUUID("node-a", gpu)}}}
}

// TestSharingEndsWithWhatHoldsIt: time slices are the driver's, leaked memory the GPU's, and daemons the machine's.
func TestSharingEndsWithWhatHoldsIt(t *testing.T) {
	set := []Command{&SetTimeSlice{GPU: "0", Time: TimeSliceLong}, &LeakMemory{GPU: "0", MemoryMiB: 64}, daemon("a", 1)}
	tests := map[string]struct {
		then   []Command
		slice  TimeSlice
		leaked uint64
		daemon bool
	}{
		"set":           {nil, TimeSliceLong, 64, true},
		"a GPU reset":   {[]Command{&ResetGPU{GPU: "0"}}, TimeSliceDefault, 0, true},
		"lost and back": {[]Command{&LoseGPU{GPU: "0"}, &RestoreGPU{GPU: "0"}}, TimeSliceDefault, 0, true},
		"driver reload": {[]Command{&StopMPS{Daemon: "a"}, &UnloadDriver{}, &LoadDriver{}}, TimeSliceDefault, 0, false},
		"reboot":        {[]Command{&Reboot{}}, TimeSliceDefault, 0, false},
		"ended":         {[]Command{&StopMPS{Daemon: "a"}}, TimeSliceLong, 64, false},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			l, err := New("t4", "node-a")
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range append(set, tc.then...) {
				if _, err := l.Machine().Do(c); err != nil {
					t.Fatal(err)
				}
			}
			s := l.Machine().State()
			if g := s.GPUs[0]; g.TimeSlice != tc.slice || g.LeakedMiB != tc.leaked || (len(s.Daemons) == 1) != tc.daemon {
				t.Errorf("time slice %q, leaked %d, daemons %v: want %q, %d, %v", g.TimeSlice, g.LeakedMiB, s.Daemons, tc.slice, tc.leaked, tc.daemon)
			}
		})
	}
}

// TestADaemonHasAServerOnItsGPUs: it is a process as others are, so the GPU is in use. Its clients may be on a GPU that is exclusive, and nobody else.
func TestADaemonHasAServerOnItsGPUs(t *testing.T) {
	l, err := New("t4", "node-a")
	if err != nil {
		t.Fatal(err)
	}
	m := l.Machine()
	pids := func(gpu int) (pids []uint32) {
		for _, p := range m.State().GPUs[gpu].Processes {
			pids = append(pids, p.PID)
		}
		return pids
	}
	both := &StartMPS{Daemon{Name: "a", GPUs: []string{gpuUUID("node-a", 0), gpuUUID("node-a", 1)}}}
	for _, c := range []Command{&SetComputeMode{GPU: "0", Mode: ComputeExclusiveProcess}, both, daemon("b", 2), &AddProcess{GPU: "0", Process: Process{PID: 7, Kind: ProcessMPS}}} {
		if _, err := m.Do(c); err != nil {
			t.Fatal(err)
		}
	}
	a, b := pids(1), pids(2)
	if len(a) != 1 || len(b) != 1 || a[0] == b[0] || !slices.Equal(pids(0), []uint32{a[0], 7}) {
		t.Errorf("processes %v, %v, %v; want one server for a on two GPUs, with its client on one, and another server for b", pids(0), a, b)
	}
	for _, refused := range []Command{&AddProcess{GPU: "0", Process: Process{PID: 8, Kind: ProcessCompute}}, &ResetGPU{GPU: "1"}} {
		if _, err := m.Do(refused); err == nil || !strings.Contains(err.Error(), strconv.Itoa(int(a[0]))) {
			t.Errorf("%s: %v, want that process %d has the GPU", refused.Name(), err, a[0])
		}
	}
	if _, err := m.Do(&StopMPS{Daemon: "a"}); err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(pids(0), []uint32{7}) || len(pids(1)) != 0 || !slices.Equal(pids(2), b) {
		t.Errorf("processes %v, %v, %v when a has ended", pids(0), pids(1), pids(2))
	}
}

// TestWhatAGPURefusesStaysAsItIs, until it refuses it no more.
func TestWhatAGPURefusesStaysAsItIs(t *testing.T) {
	l, err := New("t4", "node-a")
	if err != nil {
		t.Fatal(err)
	}
	if ret := l.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	do := func(c Command) error { _, err := l.Machine().Do(c); return err }
	returned := func(ret nvml.Return) error {
		if ret == nvml.SUCCESS {
			return nil
		}
		return ret
	}
	gpu := func(i int) nvml.Device { d, _ := l.DeviceGetHandleByIndex(i); return d }
	changes := map[Setting][]func(i int) error{
		SettingComputeMode: {
			func(i int) error { return do(&SetComputeMode{GPU: strconv.Itoa(i), Mode: ComputeExclusiveProcess}) },
			func(i int) error { return returned(gpu(i).SetComputeMode(nvml.COMPUTEMODE_DEFAULT)) },
		},
		SettingPersistence: {
			func(i int) error { return returned(gpu(i).SetPersistenceMode(nvml.FEATURE_DISABLED)) },
			func(i int) error { return do(&SetPersistence{GPU: strconv.Itoa(i), Enabled: true}) },
		},
		SettingTimeSlice: {func(i int) error { return do(&SetTimeSlice{GPU: strconv.Itoa(i), Time: TimeSliceLong}) }},
		SettingMPS:       {func(i int) error { return do(daemon(strconv.Itoa(i), i)) }},
	}
	for setting := range settings {
		if err := do(&Refuse{GPU: "0", Settings: []Setting{setting}}); err != nil {
			t.Fatal(err)
		}
		before := l.Machine().State().GPUs[0]
		for _, change := range changes[setting] {
			if err := change(0); !errors.Is(err, nvml.ERROR_NOT_SUPPORTED) {
				t.Errorf("%s is refused: %v", setting, err)
			}
			if err := change(1); err != nil {
				t.Errorf("%s on another GPU: %v", setting, err)
			}
		}
		if diff := cmp.Diff(before, l.Machine().State().GPUs[0]); diff != "" {
			t.Errorf("%s is refused (-before +after):\n%s", setting, diff)
		}
		if err := do(&Refuse{GPU: "0"}); err != nil {
			t.Fatal(err)
		}
		for _, change := range changes[setting] {
			if err := change(0); err != nil {
				t.Errorf("%s is refused no more: %v", setting, err)
			}
		}
	}
	if err := do(&Refuse{GPU: "0", Settings: []Setting{"fan"}}); err == nil || !strings.Contains(err.Error(), string(SettingTimeSlice)) {
		t.Errorf("a setting that there is none of: %v", err)
	}
}

func TestLeakedMemoryIsInUse(t *testing.T) {
	l, err := New("t4", "node-a")
	if err != nil {
		t.Fatal(err)
	}
	if ret := l.Init(); ret != nvml.SUCCESS {
		t.Fatal(ret)
	}
	used := func() uint64 {
		d, _ := l.DeviceGetHandleByIndex(0)
		memory, ret := d.GetMemoryInfo()
		if ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
		return memory.Used
	}
	before := used()
	if _, err := l.Machine().Do(&LeakMemory{GPU: "0", MemoryMiB: 64}); err != nil {
		t.Fatal(err)
	}
	if got := used() - before; got != 64*mib {
		t.Errorf("%d bytes more are in use, want 64 MiB", got)
	}
}

func TestADaemonServesOneUserAtATimeUnlessItIsToldOtherwise(t *testing.T) {
	client := func(pid, user uint32, gpu string) *AddProcess {
		return &AddProcess{GPU: gpu, Process: Process{PID: pid, Kind: ProcessMPS, User: user}}
	}
	l, err := New("dgx-h100", "node-a")
	if err != nil {
		t.Fatal(err)
	}
	m := l.Machine()
	one := daemon("one", 0)
	several := &StartMPS{Daemon{Name: "several", GPUs: []string{gpuUUID("node-a", 1)}, MultiUser: true}}
	for _, c := range []Command{
		one, several, client(10, 1001, "0"), client(11, 1001, "0"), client(12, 1001, "1"), client(13, 1002, "1"), client(14, 1002, "2"),
	} {
		do(t, m, c)
	}
	const refused = "user: 1002: the MPS daemon of the GPU serves user 1001"
	if _, err := m.Do(client(15, 1002, "0")); err == nil || !strings.Contains(err.Error(), refused) {
		t.Errorf("a second user: %v", err)
	}
	for _, c := range []Command{&RemoveProcess{GPU: "0", PID: 10}, &RemoveProcess{GPU: "0", PID: 11}, client(15, 1002, "0")} {
		do(t, m, c)
	}
}

// TestPersistencedKeepsGPUsOpen until it is asked to let go of one. Persistence mode by NVML is none of its, and NVML tells of it only where its socket is
// seen.
func TestPersistencedKeepsGPUsOpen(t *testing.T) {
	for _, seen := range []bool{false, true} {
		l, err := New("dgx-h100", "node-a")
		if err != nil {
			t.Fatal(err)
		}
		if ret := l.Init(); ret != nvml.SUCCESS {
			t.Fatal(ret)
		}
		m := l.Machine()
		do := func(commands ...Command) {
			t.Helper()
			for _, c := range commands {
				if _, err := m.Do(c); err != nil {
					t.Fatal(err)
				}
			}
		}
		check := func(when string, open [2]uint32, mode [2]bool) {
			t.Helper()
			for i := range 2 {
				d, _ := l.DeviceGetHandleByIndex(i)
				now, ret := d.GetPersistenceMode()
				if got := m.KeptOpen(strconv.Itoa(i)); got != open[i] || ret != nvml.SUCCESS || now != enabled(mode[i]) {
					t.Errorf("%s, seen %t: GPU %d is kept by %d, NVML says %v (%v); want %d and %t", when, seen, i, got, now, ret, open[i], mode[i])
				}
				if got := len(m.State().ClientsOf(i)) == 1; got != (open[i] != 0) {
					t.Errorf("%s: GPU %d is open: %t", when, i, got)
				}
			}
		}
		if _, err := m.Do(&AskPersistenced{GPU: "0"}); !errors.Is(err, ErrNoPersistenced) {
			t.Errorf("without a daemon: %v", err)
		}
		do(&SetPersistence{GPU: "0"}, &SetPersistence{GPU: "1"})
		check("before", [2]uint32{}, [2]bool{})
		do(&AddClient{Client: Client{PID: 8, GPUs: []int{0, 1}, Persistence: &Persistenced{Seen: seen}}})
		check("it runs", [2]uint32{8, 8}, [2]bool{seen, seen})
		do(&SetPersistence{GPU: "0"})
		check("it let go of one", [2]uint32{0, 8}, [2]bool{false, seen})
		d, _ := l.DeviceGetHandleByIndex(1)
		if ret := d.SetPersistenceMode(nvml.FEATURE_DISABLED); ret != nvml.SUCCESS {
			t.Error(ret)
		}
		check("NVML's own mode is off", [2]uint32{0, 8}, [2]bool{false, seen})
		do(&AskPersistenced{GPU: "1"}, &AskPersistenced{GPU: "1"}, &AskPersistenced{GPU: "0", Keep: true})
		check("it let go of the other", [2]uint32{8, 0}, [2]bool{seen, false})
		if _, err := m.Do(&AskPersistenced{GPU: "2"}); err == nil || !strings.Contains(err.Error(), "started without it") {
			t.Errorf("a GPU that it does not know: %v", err)
		}
		do(&RemoveClient{PID: 8}, &AddClient{Client: Client{PID: 9, Persistence: &Persistenced{LetGo: []int{1}, Refuses: true}}})
		for i, keep := range []bool{false, true} {
			if _, err := m.Do(&AskPersistenced{GPU: strconv.Itoa(i), Keep: keep}); err == nil || !strings.Contains(err.Error(), "process 9") {
				t.Errorf("it refuses: %v", err)
			}
		}
		check("it refused", [2]uint32{9, 0}, [2]bool{false, false})
	}
}
