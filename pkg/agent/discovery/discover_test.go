// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"context"
	"errors"
	"flag"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"

	gonvml "github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2/ktesting"
	"sigs.k8s.io/yaml"

	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/nvmlsim"
)

var update = flag.Bool("update", false, "rewrite the golden files in testdata")

// The golden files hold, for each machine, what discovery finds and what is
// published of it. Compare them with the machine's data sheet when they change.
func TestEachProfileIsDiscoveredAndPublishedAsItsMachine(t *testing.T) {
	for _, profile := range nvmlsim.Profiles() {
		t.Run(profile, func(t *testing.T) {
			lib, sysfs := machine(t, profile)
			node := discover(t, lib, sysfs)
			golden(t, profile+".yaml", struct {
				Discovered any `json:"discovered"`
				Published  any `json:"published"`
			}{node, node.DriverResources("node-a").Pools})
		})
	}
}

func TestDiscoveryIsTheSameFromAFolderAsFromMemory(t *testing.T) {
	lib, sysfs := machine(t, "dgx-a100")
	folder := t.TempDir()
	if err := os.CopyFS(folder, sysfs); err != nil {
		t.Fatal(err)
	}
	onDisk := os.DirFS(folder).(fs.ReadLinkFS)
	if diff := cmp.Diff(discover(t, lib, sysfs), discover(t, lib, onDisk)); diff != "" {
		t.Errorf("(-memory +folder):\n%s", diff)
	}
}

func TestAGPUThatDoesNotAnswerHidesNoOther(t *testing.T) {
	lost := &nvml.CallError{Call: "nvmlDeviceGetMemoryInfo", Return: gonvml.ERROR_GPU_IS_LOST}
	tests := map[string]struct {
		faults map[int]faults
		want   []Failure // Err and Reason are checked by what they say
		says   []string
	}{
		"no handle": {
			faults: map[int]faults{2: {handle: lost}},
			want:   []Failure{{Index: 2, PCIBusID: "0000:00:1d.0"}},
			says:   []string{"ERROR_GPU_IS_LOST"},
		},
		"lost after its identity was told": {
			faults: map[int]faults{1: {memory: lost}},
			want:   []Failure{{Index: 1, UUID: "known", PCIBusID: "0000:00:1c.0"}},
			says:   []string{"nvmlDeviceGetMemoryInfo: ERROR_GPU_IS_LOST"},
		},
		"two of four": {
			faults: map[int]faults{0: {handle: lost}, 3: {memory: lost, pci: lost}},
			want:   []Failure{{Index: 0, PCIBusID: "0000:00:1b.0"}, {Index: 3, UUID: "known", PCIBusID: "0000:00:1e.0"}},
			says:   []string{"ERROR_GPU_IS_LOST", "ERROR_GPU_IS_LOST"},
		},
		"all": {
			faults: map[int]faults{0: {handle: lost}, 1: {handle: lost}, 2: {handle: lost}, 3: {handle: lost}},
			want:   []Failure{{Index: 0, PCIBusID: "0000:00:1b.0"}, {Index: 1, PCIBusID: "0000:00:1c.0"}, {Index: 2, PCIBusID: "0000:00:1d.0"}, {Index: 3, PCIBusID: "0000:00:1e.0"}},
			says:   []string{"LOST", "LOST", "LOST", "LOST"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			lib, sysfs := machine(t, "t4")
			node := discover(t, faulty{lib, test.faults}, sysfs)
			if len(node.Failures) != len(test.want) {
				t.Fatalf("%d failures, want %d: %+v", len(node.Failures), len(test.want), node.Failures)
			}
			for i, got := range node.Failures {
				if !errors.Is(got.Err, nvml.ErrGPULost) || got.Reason != got.Err.Error() || !strings.Contains(got.Reason, test.says[i]) {
					t.Errorf("failure %d: reason %q of %v, want one that says %q", i, got.Reason, got.Err, test.says[i])
				}
				if got.UUID != "" {
					got.UUID = "known"
				}
				got.Err, got.Reason = nil, ""
				if diff := cmp.Diff(test.want[i], got); diff != "" {
					t.Errorf("failure %d (-want +got):\n%s", i, diff)
				}
			}
			if got, want := len(node.GPUs), 4-len(test.want); got != want {
				t.Errorf("%d GPUs found, want the other %d", got, want)
			}
			pool := node.DriverResources("node-a").Pools["node-a"]
			if got, want := len(pool.Slices), max(1, 4-len(test.want)); got != want {
				t.Errorf("%d slices, want %d", got, want)
			}
		})
	}
}

func TestAFactThatIsMissingIsLeftOutWithAWarning(t *testing.T) {
	broken := &nvml.CallError{Call: "nvmlDeviceGetNvLinkState", Return: gonvml.ERROR_UNKNOWN}
	tests := map[string]struct {
		faults faults
		sysfs  fs.ReadLinkFS
		says   []string
		check  func(GPU) bool // of GPU 0
	}{
		"no sysfs": {
			sysfs: fstest.MapFS{},
			says:  []string{"PCIe root unknown", "NUMA node unknown"},
			check: func(g GPU) bool { return g.PCIeRoot == "" && g.NUMANode == nil && g.NVLink != nil },
		},
		"NVLinks": {
			faults: faults{links: broken},
			says:   []string{"NVLinks unknown: nvmlDeviceGetNvLinkState: ERROR_UNKNOWN"},
			check:  func(g GPU) bool { return g.NVLink == nil && g.PCIeRoot != "" },
		},
		"fabric": {
			faults: faults{fabric: broken},
			says:   []string{"NVLink fabric unknown: "},
			check:  func(g GPU) bool { return g.NVLink.Clique == "" && len(g.NVLink.Peers) == 3 },
		},
		"fabric probe still running": {
			faults: faults{fabricIs: &nvml.Fabric{ClusterUUID: "c", State: "InProgress"}},
			says:   []string{"NVLink fabric not joined: its state is InProgress"},
			check:  func(g GPU) bool { return g.NVLink.Clique == "" },
		},
		"fabric probe failed": {
			faults: faults{fabricIs: &nvml.Fabric{ClusterUUID: "c", State: "Completed", Err: broken}},
			says:   []string{"NVLink fabric not joined: nvmlDeviceGetNvLinkState: ERROR_UNKNOWN"},
			check:  func(g GPU) bool { return g.NVLink.Clique == "" },
		},
		"reach": {
			faults: faults{reach: broken},
			says:   []string{"NVLink to gpu-0009-01-00-0 unknown", "NVLink to gpu-0018-01-00-0 unknown", "NVLink to gpu-0019-01-00-0 unknown"},
			check:  func(g GPU) bool { return len(g.NVLink.Peers) == 0 && g.NVLink.Clique != "" },
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			lib, sysfs := machine(t, "gb200")
			if test.sysfs != nil {
				sysfs = test.sysfs
			}
			node := discover(t, faulty{lib, map[int]faults{0: test.faults}}, sysfs)
			gpu := node.GPUs[0]
			if !test.check(gpu) {
				t.Errorf("GPU 0 is %+v", gpu)
			}
			if len(gpu.Warnings) != len(test.says) {
				t.Fatalf("warnings %q, want %d", gpu.Warnings, len(test.says))
			}
			for i, want := range test.says {
				if !strings.Contains(gpu.Warnings[i], want) {
					t.Errorf("warning %q does not say %q", gpu.Warnings[i], want)
				}
			}
			if len(node.GPUs) != 4 || len(node.Failures) != 0 || gpu.NotOffered != "" {
				t.Errorf("%d GPUs, %d failures, GPU 0 not offered because of %q: want all four offered",
					len(node.GPUs), len(node.Failures), gpu.NotOffered)
			}
		})
	}
}

func TestAGPUInMIGModeIsListedButNotOffered(t *testing.T) {
	p, err := nvmlsim.LoadProfile("dgx-a100")
	if err != nil {
		t.Fatal(err)
	}
	enabled := true
	p.GPUs[3].MIGEnabled = &enabled
	lib, sysfs := machineOf(t, p)
	node := discover(t, lib, sysfs)
	if got := node.GPUs[3]; !got.MIGEnabled || !strings.Contains(got.NotOffered, "MIG mode is enabled") ||
		!strings.Contains(got.NotOffered, "nvidia-smi -i "+got.PCIBusID+" -mig 0") {
		t.Errorf("GPU 3: MIG %t, not offered because of %q: want the reason and what to do", got.MIGEnabled, got.NotOffered)
	}
	for _, slice := range node.DriverResources("node-a").Pools["node-a"].Slices {
		if slice.Devices[0].Name == node.GPUs[3].Name {
			t.Error("it is published as a whole GPU")
		}
	}
	if got := len(node.DriverResources("node-a").Pools["node-a"].Slices); got != 7 {
		t.Errorf("%d slices, want one for each of the other 7", got)
	}
}

func TestNoDriverIsAnErrorThatSaysSo(t *testing.T) {
	h, err := nvml.Open(filepath.Join(t.TempDir(), "libnvidia-ml.so.1"), nvml.OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Discover(t.Context(), h, h.Sysfs); !errors.Is(err, nvml.ErrLibraryNotFound) {
		t.Errorf("error %v, want %v", err, nvml.ErrLibraryNotFound)
	}
}

func TestDiscoveryEndsWithItsContextAndLeavesNoSession(t *testing.T) {
	lib, sysfs := machine(t, "t4")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Discover(ctx, lib, sysfs); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
	if _, err := lib.DeviceCount(); !errors.Is(err, gonvml.ERROR_UNINITIALIZED) {
		t.Errorf("after discovery a call answers %v: its session is still open", err)
	}
}

func TestTheTableShowsEveryGPUAndWhyOneIsNotOffered(t *testing.T) {
	p, err := nvmlsim.LoadProfile("dgx-h100")
	if err != nil {
		t.Fatal(err)
	}
	enabled := true
	p.GPUs[7].MIGEnabled = &enabled
	lib, sysfs := machineOf(t, p)
	lost := &nvml.CallError{Call: "nvmlDeviceGetHandleByIndex", Return: gonvml.ERROR_GPU_IS_LOST}
	broken := &nvml.CallError{Call: "nvmlDeviceGetNvLinkState", Return: gonvml.ERROR_UNKNOWN}
	node := discover(t, faulty{lib, map[int]faults{2: {handle: lost}, 4: {memory: lost}, 5: {links: broken}}}, sysfs)
	var table strings.Builder
	if err := node.PrintTable(&table); err != nil {
		t.Fatal(err)
	}
	goldenText(t, "table.txt", table.String())
}

func TestPrintTableReturnsTheWritersError(t *testing.T) {
	full := errors.New("disk full")
	for written := range 2 {
		if err := (&Node{}).PrintTable(&failingWriter{after: written, err: full}); !errors.Is(err, full) {
			t.Errorf("after %d writes: error %v, want %v", written, err, full)
		}
	}
}

type failingWriter struct {
	after int
	err   error
}

func (w *failingWriter) Write(p []byte) (int, error) {
	if w.after--; w.after < 0 {
		return 0, w.err
	}
	return len(p), nil
}

func machine(t *testing.T, profile string) (nvml.Library, fs.ReadLinkFS) {
	t.Helper()
	p, err := nvmlsim.LoadProfile(profile)
	if err != nil {
		t.Fatal(err)
	}
	return machineOf(t, p)
}

func machineOf(t *testing.T, p *nvmlsim.Profile) (nvml.Library, fs.ReadLinkFS) {
	t.Helper()
	sim := nvmlsim.NewFromProfile(p, "node-a")
	return nvml.Adapt(sim, "sim:"+p.Name), sim.Sysfs()
}

func discover(t *testing.T, lib nvml.Library, sysfs fs.ReadLinkFS) *Node {
	t.Helper()
	_, ctx := ktesting.NewTestContext(t)
	node, err := Discover(ctx, lib, sysfs)
	if err != nil {
		t.Fatal(err)
	}
	return node
}

func golden(t *testing.T, name string, value any) {
	t.Helper()
	data, err := yaml.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	goldenText(t, name, string(data))
}

func goldenText(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v (make it with -update)", err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}
