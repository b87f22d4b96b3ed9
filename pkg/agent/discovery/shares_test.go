// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/nvmlsim"
)

func shares(t *testing.T, gpus, memory string, compute int) Shares {
	t.Helper()
	s, err := ParseShares(gpus, memory, compute)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// policyOf writes a capacity with its policy in a line.
func policyOf(c resourceapi.DeviceCapacity) string {
	text := c.Value.String()
	if p := c.RequestPolicy; p != nil {
		text += fmt.Sprintf(": %s to %s by %s, else %s", p.ValidRange.Min, p.ValidRange.Max, p.ValidRange.Step, p.Default)
	}
	return text
}

func TestSharedGPUs(t *testing.T) {
	const h100, index1, compute = "gpu-0000-1b-00-0", "gpu-0000-43-00-0", "100: 0 to 100 by 5, else 0"
	tests := map[string]struct {
		shares Shares
		before []nvmlsim.Command
		want   map[string][2]string
		warns  string
	}{
		"none": {shares: shares(t, "none", "1Gi", 5)},
		"two of eight, by address and index": {
			shares: shares(t, "0000:1B:00.0,1", "1Gi", 5),
			want: map[string][2]string{
				h100:   {"81559Mi: 1Gi to 79Gi by 1Gi, else 79Gi", compute},
				index1: {"81559Mi: 1Gi to 79Gi by 1Gi, else 79Gi", compute},
			},
		},
		"one, by name, of memory alone": {
			shares: shares(t, h100, "10Gi", 0), want: map[string][2]string{h100: {"81559Mi: 10Gi to 70Gi by 10Gi, else 70Gi", ""}},
		},
		"in two halves": {
			shares: shares(t, "0", "39Gi", 50), want: map[string][2]string{h100: {"81559Mi: 39Gi to 78Gi by 39Gi, else 78Gi", "100: 0 to 100 by 50, else 0"}},
		},
		"steps that are too large": {shares: shares(t, "0", "40Gi", 50), warns: "not shared: the memory is less than two steps"},
		"a GPU that is partitioned": {
			shares: shares(t, "0", "1Gi", 5), before: []nvmlsim.Command{&nvmlsim.SetMIG{GPU: "0", Enabled: true}}, warns: "not shared: MIG mode is enabled",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			policy := Policy{Dynamic: true, Shares: tc.shares}
			node := partitioned(t, "dgx-h100", policy, tc.before...)
			node.Offer(policy) // it may be applied again
			got := map[string][2]string{}
			for _, slice := range node.DriverResources("node-a").Pools["node-a"].Slices {
				for _, d := range slice.Devices {
					if d.AllowMultipleAllocations == nil {
						if _, ok := d.Capacity[CapacityCompute]; ok || d.Capacity[CapacityMemory].RequestPolicy != nil {
							t.Errorf("%s is not shared and has the capacities %v", d.Name, d.Capacity)
						}
						continue
					}
					shared := [2]string{policyOf(d.Capacity[CapacityMemory])}
					if c, ok := d.Capacity[CapacityCompute]; ok {
						shared[1] = policyOf(c)
					}
					if got[d.Name] = shared; !*d.AllowMultipleAllocations || len(slice.Devices) != 1 || len(d.ConsumesCounters) > 0 {
						t.Errorf("%s is shared and partitioned, or consumes counters: %d devices", d.Name, len(slice.Devices))
					}
					checkDevice(t, d)
				}
			}
			if diff := cmp.Diff(tc.want, got); diff != "" && len(tc.want)+len(got) > 0 {
				t.Errorf("shared devices (-want +got):\n%s", diff)
			}
			warnings := node.GPUs[0].Warnings
			if tc.warns == "" && len(warnings) > 0 || tc.warns != "" && (len(warnings) != 1 || warnings[0] != tc.warns) {
				t.Errorf("warnings %q, want %q", warnings, tc.warns)
			}
		})
	}
}

// The scheduler is told of the devices whose shares are one namespace's: of all GPUs in shares unless the node allows it, and of no others.
func TestSharesOfOneNamespaceArePublished(t *testing.T) {
	const shared = "gpu-0000-1b-00-0"
	for across, want := range map[bool][]string{false: {shared}, true: nil} {
		policy := Policy{Dynamic: true, Shares: shares(t, "0", "1Gi", 5), Sharing: config.Rules{AcrossNamespaces: across}}
		var got []string
		for _, slice := range partitioned(t, "dgx-h100", policy).DriverResources("node-a").Pools["node-a"].Slices {
			for _, d := range slice.Devices {
				a, published := d.Attributes["sharedByNamespace"]
				if published != inventory.IsApart("gpu.nvidia.com", &d) || published && (a.BoolValue == nil || !*a.BoolValue) {
					t.Errorf("device %s has the attribute as %v, and the scheduler reads it as %v", d.Name, a, inventory.IsApart("gpu.nvidia.com", &d))
				}
				if published {
					got = append(got, d.Name)
				}
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("across namespaces %v: devices with the attribute (-want +got):\n%s", across, diff)
		}
	}
}

func TestWhoIsSharedIsSaidInOneWay(t *testing.T) {
	tests := map[string]struct {
		gpus, memory string
		compute      int
		want         string // of the error
	}{
		"no such word":           {"some", "1Gi", 5, `"some"`},
		"a place of nothing":     {"0,,1", "1Gi", 5, `""`},
		"blanks":                 {"0, 1", "1Gi", 5, `" 1"`},
		"an index that is none":  {"01", "1Gi", 5, `"01"`},
		"half an address":        {"1b:00.0", "1Gi", 5, `"1b:00.0"`},
		"no quantity":            {"all", "much", 5, `memory step "much"`},
		"a step of nothing":      {"all", "0", 5, `memory step "0"`},
		"a step back":            {"all", "-1Gi", 5, `memory step "-1Gi"`},
		"a step in bytes":        {"all", "1G", 5, `memory step "1G"`},
		"percent that do not go": {"all", "1Gi", 30, "compute step 30"},
		"negative percent":       {"all", "1Gi", -5, "compute step -5"},
		"too many percent":       {"all", "1Gi", 200, "compute step 200"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if s, err := ParseShares(tc.gpus, tc.memory, tc.compute); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%+v, %v: want an error that says %s", s, err, tc.want)
			}
		})
	}
	lib, sysfs := machine(t, "t4")
	some := shares(t, "0,7,0000:99:00.0,gpu-0000-00-1b-0", "1Gi", 5)
	if diff := cmp.Diff([]string{"7", "0000:99:00.0"}, some.Unknown(discover(t, lib, sysfs))); diff != "" {
		t.Errorf("GPUs that the machine does not have (-want +got):\n%s", diff)
	}
}

func TestTheTableTellsHowAGPUIsDivided(t *testing.T) {
	lib, sysfs := machine(t, "t4")
	node := discover(t, lib, sysfs)
	for text, s := range map[string]Shares{"in shares of 512Mi and 10%": shares(t, "all", "512Mi", 10), "in shares of 1Gi": shares(t, "0", "1Gi", 0)} {
		node.Offer(Policy{Shares: s})
		var out strings.Builder
		if err := node.PrintTable(&out); err != nil || !strings.Contains(out.String(), text+"\n") {
			t.Errorf("%v, and the table does not say %q:\n%s", err, text, &out)
		}
	}
}

// TestIndexOf: claims have passed GPUs through, or GPUs that claims have are off the bus; others do not answer.
func TestIndexOf(t *testing.T) {
	bound := &Passthrough{Bound: true}
	for name, tc := range map[string]struct {
		gpus   []GPU
		failed []Failure
		want   []int
	}{
		"all are numbered": {[]GPU{{UUID: "a", PCIBusID: "1", Index: 0}, {UUID: "b", PCIBusID: "2", Index: 1}}, nil, []int{0, 1}},
		"the first is passed through": {
			[]GPU{{UUID: "a", PCIBusID: "1", Index: 7, Passthrough: bound}, {UUID: "b", PCIBusID: "2", Index: 0}}, nil, []int{0, 1},
		},
		"the first is off the bus, and the second passed through": {
			[]GPU{{UUID: "a", PCIBusID: "1", Index: -1}, {UUID: "b", PCIBusID: "2", Index: 7, Passthrough: bound}, {UUID: "c", PCIBusID: "3", Index: 0}},
			nil,
			[]int{0, 1, 2},
		},
		"an administrator has the first, which has no index": {
			[]GPU{{PCIBusID: "1", Index: -1, Passthrough: bound}, {UUID: "b", PCIBusID: "2", Index: 7, Passthrough: bound}, {UUID: "c", PCIBusID: "3", Index: 0}},
			nil,
			[]int{-1, 0, 1},
		},
		"one that nobody knows is lost before": {
			[]GPU{{UUID: "b", PCIBusID: "2", Index: 7, Passthrough: bound}, {UUID: "c", PCIBusID: "3", Index: 1}},
			[]Failure{{PCIBusID: "1", Index: 0}},
			[]int{1, 2},
		},
		"one that nobody knows is lost behind": {
			[]GPU{{UUID: "b", PCIBusID: "2", Index: 7, Passthrough: bound}, {UUID: "c", PCIBusID: "4", Index: 1}},
			[]Failure{{PCIBusID: "3", Index: 0}},
			[]int{0, 2},
		},
		"it is not known where one is": {
			[]GPU{{UUID: "b", PCIBusID: "2", Index: 7, Passthrough: bound}, {UUID: "c", PCIBusID: "4", Index: 1}},
			[]Failure{{Index: 0}},
			[]int{0, 2},
		},
	} {
		t.Run(name, func(t *testing.T) {
			n := &Node{GPUs: tc.gpus, Failures: tc.failed}
			var got []int
			for i := range n.GPUs {
				got = append(got, n.IndexOf(&n.GPUs[i]))
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("indices %v, want %v", got, tc.want)
			}
		})
	}
}
