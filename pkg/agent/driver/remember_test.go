// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/agent/discovery"
)

// TestAGPUThatDoesNotAnswerIsKnownByItsAddress, and by its UUID only where NVML does not say the address: a card may be in another slot since.
func TestAGPUThatDoesNotAnswerIsKnownByItsAddress(t *testing.T) {
	gpu := func(bus string, index int) discovery.GPU {
		return discovery.GPU{
			Name: "gpu-0000-" + bus + "-00-0", PCIBusID: "0000:" + bus + ":00.0", UUID: "GPU-" + bus, Index: index, Passthrough: &discovery.Passthrough{},
		}
	}
	passed := gpu("1b", 0)
	passed.Passthrough.Bound = true
	for name, tc := range map[string]struct {
		found  []discovery.GPU
		failed discovery.Failure
		known  []discovery.GPU
		held   bool
		want   []string // buses and indices
		is     string   // what fails
	}{
		"by its address": {
			[]discovery.GPU{gpu("1b", 0)},
			discovery.Failure{Index: 1, PCIBusID: "0000:52:00.0"},
			[]discovery.GPU{gpu("52", 3)},
			false,
			[]string{"1b 0", "52 1"},
			"gpu-0000-52-00-0",
		},
		"by its UUID": {
			[]discovery.GPU{gpu("1b", 0)},
			discovery.Failure{Index: 1, UUID: "GPU-52"},
			[]discovery.GPU{gpu("43", 2), gpu("52", 3)},
			false,
			[]string{"1b 0", "52 1"},
			"gpu-0000-52-00-0",
		},
		"it is in another slot": {
			[]discovery.GPU{gpu("1b", 0)},
			discovery.Failure{Index: 1, UUID: "GPU-52", PCIBusID: "0000:77:00.0"},
			[]discovery.GPU{gpu("52", 3)},
			false,
			[]string{"1b 0"},
			"gpu-0000-77-00-0",
		},
		"it is in another slot, and a claim has it where it was": {
			[]discovery.GPU{gpu("1b", 0)},
			discovery.Failure{Index: 1, UUID: "GPU-52", PCIBusID: "0000:77:00.0"},
			[]discovery.GPU{gpu("52", 3)},
			true,
			[]string{"1b 0", "52 -1"},
			"gpu-0000-77-00-0",
		},
		"nobody knows which of two it is": {
			[]discovery.GPU{gpu("1b", 0)},
			discovery.Failure{Index: 1},
			[]discovery.GPU{gpu("43", 1), gpu("52", 2)},
			false,
			[]string{"1b 0", "43 1", "52 1"},
			"one of gpu-0000-43-00-0, gpu-0000-52-00-0",
		},
		"of two one was not numbered before": {
			[]discovery.GPU{gpu("1b", 0)},
			discovery.Failure{Index: 1, Candidates: []string{"gpu-0000-43-00-0", "gpu-0000-52-00-0"}},
			[]discovery.GPU{gpu("43", -1), gpu("52", 1)},
			true,
			[]string{"1b 0", "43 -1", "52 1"},
			"gpu-0000-52-00-0",
		},
		"it was with a virtual machine, and one of the same place is not known": {
			[]discovery.GPU{gpu("1b", 0)},
			discovery.Failure{Index: 1, Candidates: []string{"gpu-0000-43-00-0", "gpu-0000-52-00-0"}},
			[]discovery.GPU{gpu("43", -1)},
			true,
			[]string{"1b 0", "43 1"},
			"gpu-0000-43-00-0",
		},
		"nor which number it had with one passed through before": {
			[]discovery.GPU{passed},
			discovery.Failure{Index: 0},
			[]discovery.GPU{gpu("43", 0), gpu("52", 1)},
			false,
			[]string{"1b 0", "43 0", "52 0"},
			"one of gpu-0000-43-00-0, gpu-0000-52-00-0",
		},
	} {
		t.Run(name, func(t *testing.T) {
			tc.failed.Err = errors.New("no answer")
			found := &discovery.Node{GPUs: tc.found, Failures: []discovery.Failure{tc.failed}}
			keepMissing(found, &discovery.Node{GPUs: tc.known}, func(string) bool { return tc.held })
			var got []string
			for _, g := range found.GPUs {
				got = append(got, fmt.Sprintf("%s %d", g.PCIBusID[5:7], g.Index))
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("GPUs (-want +got):\n%s", diff)
			}
			if got, want := found.Failures[0].String(), tc.is+": "; got != want {
				t.Errorf("failed is %q, want %q", got, want)
			}
		})
	}
}
