package driver

import (
	"path/filepath"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/nvml"
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
