// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestDevicesAreComparedBySize(t *testing.T) {
	with := func(capacity map[resourceapi.QualifiedName]string) *resourceapi.Device {
		device := &resourceapi.Device{Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{}}
		for name, amount := range capacity {
			device.Capacity[name] = resourceapi.DeviceCapacity{Value: resource.MustParse(amount)}
		}
		return device
	}
	memory := func(amount string) *resourceapi.Device {
		return with(map[resourceapi.QualifiedName]string{"memory": amount})
	}
	ascending := []*resourceapi.Device{
		{},
		memory("1"), memory("2Gi"),
		with(map[resourceapi.QualifiedName]string{"memory": "10Gi", "multiprocessors": "14", "copyEngines": "1", "decoders": "1", "memorySlice0": "1"}),
		memory("16Gi"), memory("24Gi"), memory("80Gi"), memory("94Gi"), memory("180Gi"), memory("192Gi"), memory("7Ei"), memory("18446744073709551617"),
	}
	for i, device := range ascending[1:] {
		if a, b := deviceSize(ascending[i]), deviceSize(device); a >= b {
			t.Errorf("%v has size %d, %v has %d", ascending[i].Capacity, a, device.Capacity, b)
		}
	}
	for _, nothing := range []string{"0", "-1"} {
		if size := deviceSize(memory(nothing)); size != 0 {
			t.Errorf("with %s of memory the size is %d, want 0", nothing, size)
		}
	}

	for name, amounts := range map[string][]string{"all equal": {"16Gi", "16Gi", "16Gi"}, "the last is larger": {"16Gi", "16Gi", "80Gi"}, "different": {"80Gi", "16Gi", "40Gi"}} {
		t.Run(name, func(t *testing.T) {
			p := &NodePool{}
			var want, got []int
			for _, amount := range amounts {
				p.devices = append(p.devices, memory(amount))
				want = append(want, int(deviceSize(memory(amount))))
			}
			p.measure()
			for i := range p.devices {
				got = append(got, p.Size(i))
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("sizes (-want +got):\n%s", diff)
			}
			if size, same := p.SameSize(); same != (name == "all equal") || same && size != want[0] {
				t.Errorf("SameSize says %d, %t", size, same)
			}
		})
	}
}
