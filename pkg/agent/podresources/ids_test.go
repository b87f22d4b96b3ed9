// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const (
	uuid1 = "GPU-8f6e8c33-3b2a-5a0e-9a6b-1f2e3d4c5b6a"
	uuid2 = "GPU-00000000-0000-0000-0000-000000000002"
	mig1  = "MIG-c7a5d2e4-5f0b-5c1d-8e9f-0a1b2c3d4e5f"
)

func TestDeviceIDsOfAllPlugins(t *testing.T) {
	for id, want := range map[string]DeviceID{
		uuid1:                            {UUID: uuid1},
		mig1:                             {UUID: mig1},
		uuid1 + "::3":                    {UUID: uuid1, Replica: ptr(3)},
		mig1 + "::0":                     {UUID: mig1, Replica: ptr(0)},
		uuid1 + "-7":                     {UUID: uuid1, Replica: ptr(7)},
		uuid1 + "-_-79":                  {UUID: uuid1, Replica: ptr(79)},
		"MIG-" + uuid1 + "/1/0":          {UUID: uuid1, GPUInstance: ptr(1), ComputeInstance: ptr(0)},
		"MIG-" + uuid1 + "/11/2::4":      {UUID: uuid1, GPUInstance: ptr(11), ComputeInstance: ptr(2), Replica: ptr(4)},
		"nvidia0":                        {Minor: ptr(0)},
		"nvidia12/vgpu1":                 {Minor: ptr(12), Replica: ptr(1)},
		"nvidia0/gi3":                    {Minor: ptr(0), GPUInstance: ptr(3)},
		"nvidia0/gi3/vgpu2":              {Minor: ptr(0), GPUInstance: ptr(3), Replica: ptr(2)},
		"0000:1b:00.0":                   {PCIBusID: "0000:1b:00.0"},
		"00000000:1b:00.0":               {PCIBusID: "0000:1b:00.0"},
		"00010000:1b:00.0":               {PCIBusID: "10000:1b:00.0"},
		"":                               {},
		"nvidiactl":                      {},
		"nvidia":                         {},
		"nvidia0/vgpu":                   {},
		"nvidia-1":                       {},
		"nvidia123456":                   {},
		uuid1 + "::":                     {},
		uuid1 + "::-1":                   {},
		uuid1 + ":3":                     {},
		uuid1 + "::123456":               {},
		uuid1 + "::3\n":                  {},
		" " + uuid1:                      {},
		strings.ToUpper(uuid1):           {},
		"GPU-" + uuid1:                   {},
		"MIG-" + uuid1 + "/1":            {},
		uuid1 + strings.Repeat("0", 300): {},
		"mlx5_0":                         {},
		"1b:00.0":                        {},
		"0000:1b:00.8":                   {},
	} {
		got, err := ParseDeviceID(id)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", id, diff)
		}
		if bad := want == (DeviceID{}); (err != nil) != bad || bad && len(id) > 0 && !strings.Contains(err.Error(), id[:min(len(id), 6)]) {
			t.Errorf("%q: error %v, want one that quotes it: %v", id, err, bad)
		}
	}
}

// FuzzParseDeviceID: an ID is bounded, and what is read from it names one thing.
func FuzzParseDeviceID(f *testing.F) {
	for _, id := range []string{uuid1 + "::3", mig1, "MIG-" + uuid1 + "/1/0", "nvidia0/gi3/vgpu2", "0000:1b:00.0", uuid1 + "-7", "nic0", "\xff"} {
		f.Add(id)
	}
	f.Fuzz(func(t *testing.T, id string) {
		got, err := ParseDeviceID(id)
		if err != nil {
			if got != (DeviceID{}) || len(err.Error()) > 3000 {
				t.Errorf("%q: %+v with an error of %d bytes", id, got, len(err.Error()))
			}
			return
		}
		names := 0
		for _, named := range []bool{got.UUID != "", got.PCIBusID != "", got.Minor != nil} {
			if named {
				names++
			}
		}
		if names != 1 || len(id) > maxDeviceID {
			t.Errorf("%q names %d things: %+v", id, names, got)
		}
		if got.UUID != "" && !strings.Contains(id, got.UUID) || got.PCIBusID != "" && got.PCIBusID != id {
			t.Errorf("%q: %+v is not in it", id, got)
		}
		for _, n := range []*int{got.Minor, got.GPUInstance, got.ComputeInstance, got.Replica} {
			if n != nil && (*n < 0 || *n > 99999) {
				t.Errorf("%q: the number %d", id, *n)
			}
		}
		if got.ComputeInstance != nil && got.GPUInstance == nil {
			t.Errorf("%q: a compute instance of no GPU instance", id)
		}
	})
}
