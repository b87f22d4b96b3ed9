// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// TestAGPUThatDoesNotAnswerIsNamed: by those that do, and by what is on the bus.
func TestAGPUThatDoesNotAnswerIsNamed(t *testing.T) {
	handle, err := nvml.Open("sim:dgx-h100", nvml.OpenOptions{NodeName: "node-1", ProcRoot: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	silent := faults{handle: errors.New("no answer")}
	for name, tc := range map[string]struct {
		faults map[int]faults
		want   []string
	}{
		"one":  {map[int]faults{0: silent}, []string{"gpu-0000-1b-00-0: no answer"}},
		"two":  {map[int]faults{1: silent, 0: silent}, []string{"gpu-0000-1b-00-0: no answer", "gpu-0000-43-00-0: no answer"}},
		"some": {map[int]faults{0: {memory: errors.New("no memory")}, 1: silent}, []string{"gpu-0000-1b-00-0: no memory", "gpu-0000-43-00-0: no answer"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, ctx := ktesting.NewTestContext(t)
			node, err := Discover(ctx, faulty{Library: handle, byIndex: tc.faults}, handle.Sysfs)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, f := range node.Failures {
				got = append(got, f.String())
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("failures (-want +got):\n%s", diff)
			}
		})
	}
	// What is not certain is not said.
	node := &Node{GPUs: []GPU{{Index: 3, PCIBusID: "0000:43:00.0"}, {Index: 1, PCIBusID: "0000:52:00.0"}}, Failures: []Failure{{Index: 0, Reason: "no answer"}, {Index: 2, Err: fmt.Errorf("GPU 2: %w for 10s", ErrHung)}}}
	for i, address := range []string{"0000:61:00.0", "0000:9d:00.0", "0000:c3:00.0", "0000:d1:00.0"} {
		node.GPUs = append(node.GPUs, GPU{Index: 4 + i, PCIBusID: address})
	}
	node.nameFailures(handle.Sysfs)
	want := []string{"one of gpu-0000-1b-00-0, gpu-0000-df-00-0: no answer", "one of gpu-0000-1b-00-0, gpu-0000-df-00-0: NVML does not answer"}
	if diff := cmp.Diff(want, []string{node.Failures[0].String(), node.Failures[1].String()}); diff != "" {
		t.Errorf("NVML in another order than the bus (-want +got):\n%s", diff)
	}
	alone := Failure{Index: 2, Reason: "no answer"}
	if got, want := alone.String(), "GPU 2 in NVML's order: no answer"; got != want {
		t.Errorf("without a bus: %q, want %q", got, want)
	}
}
