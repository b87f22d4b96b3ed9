package nvmlsim

import (
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

func daemon(name string, gpu int) Command {
	return &StartMPS{Daemon{Name: name, GPUs: []string{gpuUUID("node-a", gpu)}}}
}

// TestSharingEndsWithWhatHoldsIt: time slices are the driver's, leaked memory the GPU's, and daemons the machine's.
func TestSharingEndsWithWhatHoldsIt(t *testing.T) {
	set := []Command{&SetTimeSlice{GPU: "0", Time: TimeSliceLong}, &LeakMemory{GPU: "0", MemoryMiB: 64}, daemon("a", 0)}
	tests := map[string]struct {
		then   []Command
		slice  TimeSlice
		leaked uint64
		daemon bool
	}{
		"set":           {nil, TimeSliceLong, 64, true},
		"a GPU reset":   {[]Command{&ResetGPU{GPU: "0"}}, TimeSliceDefault, 0, true},
		"lost and back": {[]Command{&LoseGPU{GPU: "0"}, &RestoreGPU{GPU: "0"}}, TimeSliceDefault, 0, true},
		"driver reload": {[]Command{&UnloadDriver{}, &LoadDriver{}}, TimeSliceDefault, 0, false},
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
