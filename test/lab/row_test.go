// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

func TestJudgeAcceptsOnlyExactlyTheAllocatedGPUs(t *testing.T) {
	var found discovered
	if err := json.Unmarshal([]byte(`{"gpus": [
		{"name": "gpu-0", "uuid": "GPU-aaaaaaaa-0", "minor": 0},
		{"name": "gpu-1", "uuid": "GPU-bbbbbbbb-1", "minor": 1},
		{"name": "gpu-2", "uuid": "GPU-cccccccc-2", "minor": 2, "migEnabled": true, "migInstances": [
			{"ID": 9, "ProfileID": 19, "Placement": {"Start": 0, "Size": 1}, "Devices": [{"UUID": "MIG-dddddddd-3"}]},
			{"ID": 10, "ProfileID": 14, "Placement": {"Start": 4, "Size": 2}, "Devices": [{"UUID": "MIG-eeeeeeee-4"}]}]}]}`), &found); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		allocated []string
		seen      Sight
		want      string // part of the error; empty for none
	}{
		"the same GPUs": {
			allocated: []string{"gpu-1", "gpu-0"},
			seen:      Sight{VisibleDevices: []string{"GPU-aaaaaaaa-0", "GPU-bbbbbbbb-1"}, Minors: []int{0, 1}},
		},
		"a partition": {
			allocated: []string{"gpu-2-mig-2g20gb-4"},
			seen:      Sight{VisibleDevices: []string{"MIG-eeeeeeee-4"}, Minors: []int{2}},
		},
		"the partition beside it": {
			allocated: []string{"gpu-2-mig-1g10gb-me-0"},
			seen:      Sight{VisibleDevices: []string{"MIG-eeeeeeee-4"}, Minors: []int{2}},
			want:      "the container has [MIG-eeeeeeee-4], allocated is [MIG-dddddddd-3]",
		},
		"a partition that has not been made": {
			allocated: []string{"gpu-2-mig-1g10gb-1"},
			want:      "gpu-2-mig-1g10gb-1 does not exist",
		},
		"another GPU": {
			allocated: []string{"gpu-0"},
			seen:      Sight{VisibleDevices: []string{"GPU-bbbbbbbb-1"}, Minors: []int{1}},
			want:      "the container has [GPU-bbbbbbbb-1], allocated is [GPU-aaaaaaaa-0]",
		},
		"device metadata of another GPU": {
			allocated: []string{"gpu-0"},
			seen:      Sight{VisibleDevices: []string{"GPU-aaaaaaaa-0"}, Told: []string{"GPU-bbbbbbbb-1"}, Minors: []int{0}},
			want:      "device metadata: the container has [GPU-bbbbbbbb-1], allocated is [GPU-aaaaaaaa-0]",
		},
		"a device node too many": {
			allocated: []string{"gpu-0"},
			seen:      Sight{VisibleDevices: []string{"GPU-aaaaaaaa-0"}, Minors: []int{0, 1}},
			want:      "the container has [0 1], allocated is [0]",
		},
		"a device node listed twice": {
			allocated: []string{"gpu-0"},
			seen:      Sight{VisibleDevices: []string{"GPU-aaaaaaaa-0"}, Minors: []int{0, 0}},
			want:      "the container has [0 0]",
		},
		"no device in the container": {
			allocated: []string{"gpu-0"},
			seen:      Sight{VisibleDevices: []string{"void"}},
			want:      "NVIDIA_VISIBLE_DEVICES",
		},
		"a node that the cgroup refuses": {
			allocated: []string{"gpu-0"},
			seen: Sight{
				VisibleDevices: []string{"GPU-aaaaaaaa-0"}, Minors: []int{0},
				Problems: []string{"/dev/nvidia0: open gives EPERM"},
			},
			want: "EPERM",
		},
		"a device that the node does not have": {
			allocated: []string{"gpu-7"},
			want:      "gpu-7 does not exist",
		},
		"nothing allocated": {
			want: "no device is allocated",
		},
	} {
		t.Run(name, func(t *testing.T) {
			var results []resourceapi.DeviceRequestAllocationResult
			for _, device := range test.allocated {
				results = append(results, resourceapi.DeviceRequestAllocationResult{Driver: DriverName, Pool: "node", Device: device})
			}
			if test.seen.Told == nil {
				test.seen.Told = test.seen.VisibleDevices
			}
			err := judge(results, found.GPUs, test.seen)
			switch {
			case test.want == "" && err != nil:
				t.Errorf("unexpected error: %v", err)
			case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
				t.Errorf("got error %v, want one with %q", err, test.want)
			}
		})
	}
}

func TestDoublesNamesBothHolders(t *testing.T) {
	claim := func(name, device string, admin bool) resourceapi.ResourceClaim {
		return resourceapi.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
			Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
				Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
					{Driver: DriverName, Pool: "node", Device: device, AdminAccess: ptr.To(admin)},
				}},
			}},
		}
	}
	share := func(name, device, id string) resourceapi.ResourceClaim {
		c := claim(name, device, false)
		c.Status.Allocation.Devices.Results[0].ShareID = ptr.To(types.UID(id))
		return c
	}
	got := Doubles([]resourceapi.ResourceClaim{
		share("half", "gpu-2", "s1"), share("other-half", "gpu-2", "s2"),
		share("part", "gpu-3", "s3"), claim("whole", "gpu-3", false),
		claim("b", "gpu-0", false), claim("a", "gpu-0", false),
		claim("c", "gpu-1", false), claim("admin", "gpu-1", true),
		{ObjectMeta: metav1.ObjectMeta{Name: "pending"}},
	})
	want := []string{"gpu.nvidia.com/node/gpu-0 is held by ns/a and ns/b", "gpu.nvidia.com/node/gpu-3 is held by ns/part and ns/whole"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("unexpected doubles (-want +got):\n%s", diff)
	}
}
