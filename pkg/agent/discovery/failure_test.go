// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"errors"
	"fmt"
	"strings"
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

// TestGPUsThatDoNotAnswerAreNamedByTheirNeighbours, also where NVML leaves one out that the driver has, and where the memory of an agent
// says more than the bus.
func TestGPUsThatDoNotAnswerAreNamedByTheirNeighbours(t *testing.T) {
	const first, second = "0000:43:00.0", "0000:52:00.0"
	all := []string{"0000:1b:00.0", first, second, "0000:61:00.0", "0000:9d:00.0"}
	for name, tc := range map[string]struct {
		answer map[int]string
		failed []int
		calls  [][]string // the addresses: of the bus, and then of the memory
		want   []string
	}{
		"one is left out behind":           {map[int]string{0: all[0], 2: second, 3: all[3]}, []int{1}, [][]string{all}, []string{"gpu-0000-43-00-0"}},
		"one is left out before":           {map[int]string{0: first, 1: second, 3: all[4]}, []int{2}, [][]string{all}, []string{"gpu-0000-61-00-0"}},
		"two do not answer side by side":   {map[int]string{0: all[0], 3: all[3]}, []int{1, 2}, [][]string{all}, []string{"gpu-0000-43-00-0", "gpu-0000-52-00-0"}},
		"two do not answer, one each":      {map[int]string{1: first, 3: all[3]}, []int{0, 2}, [][]string{all}, []string{"gpu-0000-1b-00-0", "gpu-0000-52-00-0"}},
		"either is left out":               {map[int]string{0: all[0], 2: all[3]}, []int{1}, [][]string{all}, []string{"one of gpu-0000-43-00-0, gpu-0000-52-00-0"}},
		"one of them was known":            {map[int]string{0: all[0], 2: all[3]}, []int{1}, [][]string{all, {second}}, []string{"gpu-0000-52-00-0"}},
		"both were":                        {map[int]string{0: all[0], 2: all[3]}, []int{1}, [][]string{all, {second, first}}, []string{"one of gpu-0000-43-00-0, gpu-0000-52-00-0"}},
		"one that was is off the bus":      {map[int]string{0: all[0], 2: all[4]}, []int{1}, [][]string{{all[0], first, second, all[4]}, {second, all[3]}}, []string{"gpu-0000-52-00-0"}},
		"known are others":                 {map[int]string{0: all[0], 2: all[3]}, []int{1}, [][]string{all, {all[4]}}, []string{"one of gpu-0000-43-00-0, gpu-0000-52-00-0"}},
		"all are off the bus":              {map[int]string{0: all[0], 2: all[3]}, []int{1}, [][]string{{all[0], all[3]}, {second}}, []string{"gpu-0000-52-00-0"}},
		"one of two is off the bus":        {map[int]string{0: all[0], 3: all[3]}, []int{1, 2}, [][]string{{all[0], second, all[3]}, {second, first}}, []string{"gpu-0000-43-00-0", "gpu-0000-52-00-0"}},
		"nobody knows":                     {map[int]string{0: all[0], 2: all[3]}, []int{1}, [][]string{{all[0], all[3]}, nil}, []string{"GPU 1 in NVML's order"}},
		"another order, and only one fits": {map[int]string{0: second, 1: all[0]}, []int{2}, [][]string{{all[0], first, second}}, []string{"gpu-0000-43-00-0"}},
		"another order, one of two fits":   {map[int]string{0: second, 1: all[0]}, []int{2}, [][]string{all[:4]}, []string{"one of gpu-0000-43-00-0, gpu-0000-61-00-0"}},
		"another order, and one was known": {map[int]string{0: second, 1: all[0]}, []int{2}, [][]string{all[:4], {all[3]}}, []string{"gpu-0000-61-00-0"}},
		"another order, and two that do not": {
			map[int]string{0: second, 1: all[0]},
			[]int{2, 3},
			[][]string{all[:4]},
			[]string{"one of gpu-0000-43-00-0, gpu-0000-61-00-0", "one of gpu-0000-43-00-0, gpu-0000-61-00-0"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			node := &Node{}
			for index, address := range tc.answer {
				node.GPUs = append(node.GPUs, GPU{Index: index, PCIBusID: address})
			}
			node.GPUs = append(node.GPUs, GPU{Index: -1, PCIBusID: "0000:45:00.0"}) // NVML does not number it
			for _, index := range tc.failed {
				node.Failures = append(node.Failures, Failure{Index: index, Reason: "no answer"})
			}
			for _, addresses := range tc.calls {
				node.NameFailures(addresses)
			}
			var got []string
			for _, f := range node.Failures {
				if f.PCIBusID != "" && f.Candidates != nil {
					t.Errorf("%v has candidates %v", f, f.Candidates)
				}
				got = append(got, strings.TrimSuffix(f.String(), ": no answer"))
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("failures (-want +got):\n%s", diff)
			}
		})
	}
}
