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
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// partitioned discovers a machine after commands, with a policy.
func partitioned(t *testing.T, profile string, policy Policy, commands ...nvmlsim.Command) *Node {
	t.Helper()
	sim, err := nvmlsim.New(profile, "node-a")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range commands {
		if _, err := sim.Machine().Do(c); err != nil {
			t.Fatal(err)
		}
	}
	node := discover(t, nvml.Adapt(sim, "sim:"+profile), sim.Sysfs())
	node.Offer(policy)
	return node
}

func names(gpu *GPU) []string {
	var names []string
	for _, offer := range gpu.Offers {
		names = append(names, strings.TrimPrefix(offer.Name, gpu.Name))
	}
	return names
}

func TestWhatAGPUOffers(t *testing.T) {
	at := func(slice uint32) *uint32 { return &slice }
	mig := &nvmlsim.SetMIG{GPU: "0", Enabled: true}
	made := func(profile string, start uint32) nvmlsim.Command {
		return &nvmlsim.CreateMIG{GPU: "0", Profile: profile, Start: at(start)}
	}
	ours := func(at ...nvml.Placement) func() Made {
		made := Made{}
		for _, at := range at {
			made.Insert(Place{"gpu-0000-1b-00-0", at})
		}
		return func() Made { return made }
	}
	mode := nvml.Placement{}
	const all = 7 + 7 + 4 + 3 + 2 + 1 + 1 // placements of an H100 and an A100
	tests := map[string]struct {
		profile string
		before  []nvmlsim.Command
		policy  Policy
		want    []string // some of the names
		number  int
		refused string // in the reason why nothing is offered
	}{
		"static, MIG off":              {"dgx-h100", nil, Policy{}, []string{""}, 1, ""},
		"static, MIG on":               {"dgx-h100", []nvmlsim.Command{mig}, Policy{}, nil, 0, "--partitions=dynamic"},
		"static, with partitions":      {"dgx-h100", []nvmlsim.Command{mig, made("3g.40gb", 4), made("1g.10gb+me", 0)}, Policy{}, []string{"-mig-1g10gb-me-0", "-mig-3g40gb-4"}, 2, ""},
		"dynamic, cannot":              {"t4", nil, Policy{Dynamic: true}, []string{""}, 1, ""},
		"dynamic, MIG off":             {"dgx-h100", nil, Policy{Dynamic: true}, []string{"", "-mig-1g10gb-6", "-mig-1g20gb-6", "-mig-7g80gb-0"}, 1 + all, ""},
		"dynamic, MIG on":              {"dgx-h100", []nvmlsim.Command{mig}, Policy{Dynamic: true}, []string{"-mig-7g80gb-0"}, all, ""},
		"dynamic, MIG on by the agent": {"dgx-h100", []nvmlsim.Command{mig, made("3g.40gb", 4)}, Policy{Dynamic: true, Ours: ours(mode, nvml.Placement{Start: 4, Size: 4})}, []string{""}, 1 + all, ""},
		"dynamic, beside an administrator's": {
			"dgx-h100",
			[]nvmlsim.Command{mig, made("3g.40gb", 4), made("1g.10gb", 0)},
			Policy{Dynamic: true, Ours: ours(mode, nvml.Placement{Start: 0, Size: 1})},
			// Itself, and all in the slices 0 to 3.
			[]string{"-mig-3g40gb-4", "-mig-3g40gb-0", "-mig-4g40gb-0", "-mig-2g20gb-2"},
			1 + 4 + 4 + 2 + 2 + 1 + 1, "",
		},
		"dynamic, beside an administrator's that has the only OFA engine": {
			"dgx-h100",
			[]nvmlsim.Command{mig, made("1g.10gb+me", 0)},
			Policy{Dynamic: true},
			[]string{"-mig-1g10gb-me-0", "-mig-1g10gb-1", "-mig-3g40gb-4"},
			1 + 6 + 3 + 2 + 1, "",
		},
		"dynamic, switched by a reset, MIG off": {"dgx-a100", nil, Policy{Dynamic: true}, []string{""}, 1, ""},
		"dynamic, switched by a reset, MIG on":  {"dgx-a100", []nvmlsim.Command{mig, &nvmlsim.ResetGPU{GPU: "0"}}, Policy{Dynamic: true}, []string{"-mig-7g80gb-0"}, all, ""},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			gpu := &partitioned(t, tc.profile, tc.policy, tc.before...).GPUs[0]
			got := names(gpu)
			for _, want := range tc.want {
				if !slices.Contains(got, want) {
					t.Errorf("%v does not have %q", got, want)
				}
			}
			if len(got) != tc.number || len(slices.Compact(slices.Sorted(slices.Values(got)))) != tc.number {
				t.Errorf("%d devices are offered, want %d: %v", len(got), tc.number, got)
			}
			if (gpu.NotOffered == "") != (tc.refused == "") || !strings.Contains(gpu.NotOffered, tc.refused) {
				t.Errorf("not offered because %q, want %q", gpu.NotOffered, tc.refused)
			}
		})
	}
}

// TestPartitionsOfSixteenGPUsAreInsideTheLimits of resource.k8s.io/v1, and what overlaps excludes each other.
func TestPartitionsOfSixteenGPUsAreInsideTheLimits(t *testing.T) {
	for _, profile := range []string{"dgx-h100", "hgx-b200", "gb200"} {
		t.Run(profile, func(t *testing.T) {
			node := partitioned(t, profile, Policy{Dynamic: true})
			for i := range 16 - len(node.GPUs) { // a larger machine
				gpu := node.GPUs[0]
				gpu.Name = fmt.Sprintf("gpu-0001-%02x-00-0", i)
				node.GPUs = append(node.GPUs, gpu)
			}
			node.Offer(Policy{Dynamic: true})
			slices := node.DriverResources("node-a").Pools["node-a"].Slices
			sets := map[string]resourceapi.CounterSet{}
			devices := 0
			for i, slice := range slices {
				if len(slice.SharedCounters) > 0 && len(slice.Devices) > 0 {
					t.Errorf("slice %d has counter sets and devices", i)
				}
				if len(slice.SharedCounters) > resourceapi.ResourceSliceMaxCounterSets || len(slice.Devices) > 64 {
					t.Errorf("slice %d has %d counter sets and %d devices", i, len(slice.SharedCounters), len(slice.Devices))
				}
				for _, set := range slice.SharedCounters {
					if len(set.Counters) > resourceapi.ResourceSliceMaxCountersPerCounterSet || len(validation.IsDNS1123Label(set.Name)) > 0 {
						t.Errorf("counter set %s has %d counters", set.Name, len(set.Counters))
					}
					for name := range set.Counters {
						if len(validation.IsDNS1123Label(name)) > 0 {
							t.Errorf("counter %s", name)
						}
					}
					sets[set.Name] = set
				}
				for _, d := range slice.Devices {
					devices++
					checkDevice(t, d)
					checkConsumption(t, d, sets)
				}
			}
			if len(sets) != 16 || len(slices) != 2+16 || devices != 16*(1+25) {
				t.Errorf("%d slices with %d counter sets and %d devices", len(slices), len(sets), devices)
			}
		})
	}
}

// checkConsumption: a device takes no more than there is, and of nothing that there is not.
func checkConsumption(t *testing.T, d resourceapi.Device, sets map[string]resourceapi.CounterSet) {
	t.Helper()
	if len(d.ConsumesCounters) != 1 {
		t.Errorf("%s consumes of %d counter sets", d.Name, len(d.ConsumesCounters))
		return
	}
	set := sets[d.ConsumesCounters[0].CounterSet]
	for name, c := range d.ConsumesCounters[0].Counters {
		if has := set.Counters[name].Value; has.Cmp(c.Value) < 0 || c.Value.Sign() <= 0 {
			t.Errorf("%s consumes %s %s of %s", d.Name, &c.Value, name, &has)
		}
	}
}

// TestCountersAllowWhatFitsAndNothingElse compares, for each pair of devices of a GPU, what the counters allow with
// what the simulated GPU does.
func TestCountersAllowWhatFitsAndNothingElse(t *testing.T) {
	node := partitioned(t, "dgx-h100", Policy{Dynamic: true})
	gpu := &node.GPUs[0]
	set := gpu.counterSet()
	for i := range gpu.Offers {
		for j := range gpu.Offers[:i] {
			a, b := &gpu.Offers[i], &gpu.Offers[j]
			sum := map[string]resource.Quantity{}
			for _, o := range []*Offer{a, b} {
				for name, c := range gpu.consumes(o)[0].Counters {
					q := sum[name]
					q.Add(c.Value)
					sum[name] = q
				}
			}
			fits := true
			for name, q := range sum {
				has := set.Counters[name].Value
				fits = fits && q.Cmp(has) <= 0
			}
			can := together(t, a, b)
			if fits != can {
				t.Errorf("%s and %s: the counters say %v, the GPU %v", a.Name, b.Name, fits, can)
			}
			if a.Partition == nil || b.Partition == nil {
				continue
			}
			p, q := a.Partition.At, b.Partition.At
			if p.Start < q.Start+q.Size && q.Start < p.Start+p.Size {
				continue
			}
			if beside := gpu.Beside(a.Partition.Profile.ID, b); beside != can {
				t.Errorf("%s beside %s: %v, the GPU %v", b.Name, a.Name, beside, can)
			}
		}
	}
}

func together(t *testing.T, a, b *Offer) bool {
	t.Helper()
	if a.Partition == nil || b.Partition == nil {
		return false
	}
	l, err := nvmlsim.New("dgx-h100", "node-a")
	if err != nil {
		t.Fatal(err)
	}
	commands := []nvmlsim.Command{&nvmlsim.SetMIG{GPU: "0", Enabled: true}}
	for _, o := range []*Offer{a, b} {
		commands = append(commands, &nvmlsim.CreateMIG{GPU: "0", Profile: o.Partition.Profile.Name, Start: &o.Partition.At.Start})
	}
	for i, c := range commands {
		if _, err := l.Machine().Do(c); err != nil {
			if i < 2 {
				t.Fatal(err)
			}
			return false
		}
	}
	return true
}

func TestAPartitionsAttributes(t *testing.T) {
	start := uint32(4)
	node := partitioned(t, "dgx-h100", Policy{Dynamic: true}, &nvmlsim.SetMIG{GPU: "0", Enabled: true}, &nvmlsim.CreateMIG{GPU: "0", Profile: "3g.40gb", Start: &start})
	gpu := &node.GPUs[0]
	for _, name := range []string{"-mig-3g40gb-4", "-mig-1g10gb-me-0"} {
		_, offer, err := node.Find(gpu.Name + name)
		if err != nil {
			t.Fatal(err)
		}
		d := node.Device(gpu, offer)
		got := map[string]string{}
		for _, a := range []resourceapi.QualifiedName{AttributeType, AttributeProfile, AttributeParentUUID, AttributeUUID, AttributeProductName, AttributeNVLinkDomain} {
			if v := d.Attributes[a].StringValue; v != nil {
				got[string(a)] = *v
			}
		}
		for c, v := range d.Capacity {
			got[string(c)] = v.Value.String()
		}
		want := map[string]string{
			"type": "mig", "profile": "1g.10gb+me", "parentUUID": gpu.UUID, "productName": "NVIDIA H100 80GB HBM3",
			"memory": "9984Mi", "multiprocessors": "16", "copyEngines": "1", "decoders": "1", "encoders": "0", "jpegEngines": "1", "ofaEngines": "1", "memorySlice0": "1",
		}
		if offer.Partition.UUID != "" {
			want = map[string]string{
				"type": "mig", "profile": "3g.40gb", "parentUUID": gpu.UUID, "uuid": offer.Partition.UUID, "productName": "NVIDIA H100 80GB HBM3",
				"memory": "40448Mi", "multiprocessors": "60", "copyEngines": "3", "decoders": "3", "encoders": "0", "jpegEngines": "3", "ofaEngines": "0",
				"memorySlice4": "1", "memorySlice5": "1", "memorySlice6": "1", "memorySlice7": "1",
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
