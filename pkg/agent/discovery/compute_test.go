// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// inParts is a GPU 0 with a 3g.40gb, from slice 4, that has these compute instances, beside one that is a 2g.20gb as a whole.
func inParts(t *testing.T, policy Policy, compute ...uint32) *Node {
	t.Helper()
	four, zero := uint32(4), uint32(0)
	return partitioned(t, "dgx-h100", policy,
		&nvmlsim.SetMIG{GPU: "0", Enabled: true},
		&nvmlsim.CreateMIG{GPU: "0", Profile: "3g.40gb", Start: &four, Compute: compute},
		&nvmlsim.CreateMIG{GPU: "0", Profile: "2g.20gb", Start: &zero},
	)
}

func TestComputeInstancesAreDevices(t *testing.T) {
	tests := map[string]struct {
		compute []uint32
		want    []string
	}{
		"one that is all":  {[]uint32{3}, []string{"-mig-2g20gb-0", "-mig-3g40gb-4"}},
		"three":            {[]uint32{1, 1, 1}, []string{"-mig-1c3g40gb-4-0", "-mig-1c3g40gb-4-1", "-mig-1c3g40gb-4-2", "-mig-2g20gb-0"}},
		"one of two":       {[]uint32{2, 1}, []string{"-mig-1c3g40gb-4-2", "-mig-2c3g40gb-4-0", "-mig-2g20gb-0"}},
		"one, not of all":  {[]uint32{1}, []string{"-mig-1c3g40gb-4-0", "-mig-2g20gb-0"}},
		"two that are all": {[]uint32{1, 1}, []string{"-mig-1c3g40gb-4-0", "-mig-1c3g40gb-4-1", "-mig-2g20gb-0"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			node := inParts(t, Policy{}, tc.compute...)
			gpu := &node.GPUs[0]
			got := names(gpu)
			slices.Sort(got)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
			uuids := map[string]bool{}
			for i := range gpu.Offers {
				d := node.Device(gpu, &gpu.Offers[i])
				checkDevice(t, d)
				uuids[*d.Attributes[AttributeUUID].StringValue] = true
				if len(d.ConsumesCounters) > 0 {
					t.Errorf("%s consumes counters, and nothing can be made beside it", d.Name)
				}
			}
			if len(uuids) != len(tc.want) || len(gpu.Warnings) > 0 {
				t.Errorf("UUIDs %v, warnings %q", uuids, gpu.Warnings)
			}
		})
	}
}

func TestAComputeInstancesAttributes(t *testing.T) {
	node := inParts(t, Policy{}, 2, 1)
	gpu := &node.GPUs[0]
	for name, want := range map[string]map[string]string{
		"-mig-1c3g40gb-4-2": {"profile": "1c.3g.40gb", "multiprocessors": "20"},
		"-mig-2c3g40gb-4-0": {"profile": "2c.3g.40gb", "multiprocessors": "40"},
	} {
		_, offer, err := node.Find(gpu.Name + name)
		if err != nil {
			t.Fatal(err)
		}
		d := node.Device(gpu, offer)
		got := map[string]string{}
		for _, a := range []resourceapi.QualifiedName{AttributeType, AttributeProfile, AttributeParentUUID, AttributeUUID} {
			got[string(a)] = *d.Attributes[a].StringValue
		}
		for c, v := range d.Capacity {
			got[string(c)] = v.Value.String()
		}
		for k, v := range map[string]string{
			"type": "mig", "parentUUID": gpu.UUID, "uuid": offer.Partition.UUID,
			"memory": "40448Mi", "copyEngines": "3", "decoders": "3", "encoders": "0", "jpegEngines": "3", "ofaEngines": "0",
		} {
			want[k] = v
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

// TestWhatIsInPartsIsNotInTheCounters: its devices exclude neither each other nor what can be made beside them.
func TestWhatIsInPartsIsNotInTheCounters(t *testing.T) {
	node := inParts(t, Policy{Dynamic: true}, 1, 1)
	gpu := &node.GPUs[0]
	set := gpu.counterSet()
	for name := range set.Counters {
		if strings.HasPrefix(name, "memory-slice-") && name >= "memory-slice-4" {
			t.Errorf("the set has %s, which is taken", name)
		}
	}
	if got := set.Counters["copy-engines"].Value; got.Value() != 8-3 {
		t.Errorf("%s copy engines are left, want 5", &got)
	}
	parts, others := 0, 0
	for i := range gpu.Offers {
		d := node.Device(gpu, &gpu.Offers[i])
		if strings.Contains(d.Name, "-1c3g40gb-") {
			if parts++; len(d.ConsumesCounters) > 0 {
				t.Errorf("%s consumes counters", d.Name)
			}
			continue
		}
		others++
		checkConsumption(t, d, map[string]resourceapi.CounterSet{set.Name: set})
	}
	if parts != 2 || others < 3 {
		t.Errorf("%d devices in parts and %d others", parts, others)
	}
}

// TestADriverThatDoesNotTellThePart: one device is all, of two it cannot be said which is which.
func TestADriverThatDoesNotTellThePart(t *testing.T) {
	for n, want := range map[int]int{1: 1, 2: 0} {
		node := inParts(t, Policy{}, 1, 1)
		gpu := &node.GPUs[0]
		for i := range gpu.MIGInstances {
			if devices := gpu.MIGInstances[i].Devices; len(devices) == 2 {
				gpu.MIGInstances[i].Devices = devices[:n]
			}
			for d := range gpu.MIGInstances[i].Devices {
				gpu.MIGInstances[i].Devices[d].Compute = nvml.Placement{}
			}
		}
		node.Offer(Policy{})
		if got := len(gpu.Offers) - 1; got != want || (want == 0) != (len(gpu.Warnings) == 2) {
			t.Errorf("of %d compute instances %d are offered, want %d; warnings %q", n, got, want, gpu.Warnings)
		}
	}
}
