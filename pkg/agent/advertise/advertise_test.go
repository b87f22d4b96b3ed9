// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package advertise

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"stowage.dev/stowage/pkg/agent/discovery"
)

var first = discovery.GPU{Name: "gpu-0000-1b-00-0", PCIBusID: "0000:1b:00.0", UUID: "GPU-8a1b2c3d-0000-4000-8000-00000000000A"}

var second = discovery.GPU{Name: "gpu-0000-43-00-0", PCIBusID: "0000:43:00.0", UUID: "GPU-8a1b2c3d-0000-4000-8000-00000000000B"}

func TestPaths(t *testing.T) {
	tests := map[string]struct {
		first, second Path
		claimsOnly    bool
		unknown       []string
	}{
		"dra":                                              {first: DRA, second: DRA, claimsOnly: true},
		"device-plugin":                                    {first: DevicePlugin, second: DevicePlugin},
		"none":                                             {first: None, second: None},
		"0000:1B:00.0=device-plugin":                       {first: DevicePlugin, second: DRA},
		"00000000:1B:00.0=none":                            {first: None, second: DRA},
		"device-plugin,gpu-0000-1b-00-0=dra":               {first: DRA, second: DevicePlugin},
		"gpu-0000-1b-00-0=none,dra":                        {first: None, second: DRA},
		"0000:1b:00.0=dra":                                 {first: DRA, second: DRA, claimsOnly: true},
		"none," + first.UUID + "=device-plugin":            {first: DevicePlugin, second: None},
		"0000:1b:00.0=dra," + first.UUID + "=dra":          {first: DRA, second: DRA, claimsOnly: true},
		"0000:1b:00.0=dra," + first.UUID + "=none":         {first: None, second: DRA},
		"0000:99:00.0=none,gpu-0000-98-00-0=device-plugin": {first: DRA, second: DRA, unknown: []string{"0000:99:00.0", "gpu-0000-98-00-0"}},
	}
	for list, test := range tests {
		t.Run(list, func(t *testing.T) {
			paths, err := Parse(list)
			if err != nil {
				t.Fatal(err)
			}
			if got := [2]Path{paths.Of(&first), paths.Of(&second)}; got != [2]Path{test.first, test.second} {
				t.Errorf("paths %v, want %s and %s", got, test.first, test.second)
			}
			if paths.ClaimsOnly() != test.claimsOnly {
				t.Errorf("all by claims: %t", paths.ClaimsOnly())
			}
			if diff := cmp.Diff(test.unknown, paths.Unknown(&discovery.Node{GPUs: []discovery.GPU{first, second}})); diff != "" {
				t.Errorf("unknown (-want +got):\n%s", diff)
			}
		})
	}
	var lists []Paths
	for _, list := range []string{"0000:1b:00.0=device-plugin", "dra,00000000:1B:00.0=device-plugin", "device-plugin,gpu-0000-43-00-0=none", "none"} {
		paths, err := Parse(list)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Parse(paths.String())
		if err != nil || !again.Equal(&paths) {
			t.Errorf("%s is written %s, error %v", list, &paths, err)
		}
		lists = append(lists, paths)
	}
	if !lists[0].Equal(&lists[1]) || lists[1].Equal(&lists[2]) || lists[2].Equal(&lists[3]) {
		t.Error("which lists are equal")
	}
	for name, want := range map[string]Path{"00000000:1B:00.0": DevicePlugin, "gpu-0000-1b-00-0": "", "": ""} {
		if got := lists[0].Named(name); got != want {
			t.Errorf("%q is named %q, want %q", name, got, want)
		}
	}
	if path := lists[2].Named(""); path != DevicePlugin {
		t.Errorf("all others are named %q", path)
	}
	if path := new(Paths).Of(&first); path != DRA || !new(Paths).ClaimsOnly() {
		t.Errorf("without a word it is %s", path)
	}
}

// TestAGPUWithoutAUUIDMayBeTheOneThatIsNamed: who keeps a GPU from all others may have given it to vfio-pci.
func TestAGPUWithoutAUUIDMayBeTheOneThatIsNamed(t *testing.T) {
	unseen := first
	unseen.UUID = ""
	for list, want := range map[string][2]Path{ // of that GPU, and of the second one
		"dra":                                       {DRA, DRA},
		"dra," + first.UUID + "=none":               {None, DRA},
		first.UUID + "=device-plugin":               {None, DRA},
		"none," + first.UUID + "=dra":               {None, None},
		"dra," + first.UUID + "=dra":                {DRA, DRA},
		"dra," + second.UUID + "=none":              {DRA, None}, // which is there
		"dra,gpu-0000-99-00-0=none":                 {DRA, DRA},
		"0000:1b:00.0=dra," + first.UUID + "=none":  {DRA, DRA},
		first.Name + "=dra," + first.UUID + "=none": {DRA, DRA},
	} {
		t.Run(list, func(t *testing.T) {
			paths, err := Parse(list)
			if err != nil {
				t.Fatal(err)
			}
			got := paths.On(&discovery.Node{GPUs: []discovery.GPU{unseen, second}})
			if diff := cmp.Diff(map[string]Path{first.Name: want[0], second.Name: want[1]}, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			got = paths.On(&discovery.Node{GPUs: []discovery.GPU{first, second}})
			if diff := cmp.Diff(map[string]Path{first.Name: paths.Of(&first), second.Name: want[1]}, got); diff != "" {
				t.Errorf("with its UUID (-want +got):\n%s", diff)
			}
		})
	}
}

func TestParseNamesWhatIsWrong(t *testing.T) {
	for list, says := range map[string]string{
		"":                                  `"": "" is no path`,
		"DRA":                               `"DRA": "DRA" is no path: want dra, device-plugin or none`,
		"dra,":                              `"": "" is no path`,
		"dra,none":                          `"none": there is a path for all GPUs already, dra`,
		"0000:1b:00.0=plugin":               `"0000:1b:00.0=plugin": "plugin" is no path`,
		"0=dra":                             `"0=dra": want a GPU by its UUID`, // an index is another GPU's after a reboot
		"=dra":                              `"=dra": want a GPU`,
		"0000:1b:00.0=dra,0000:1B:00.0=dra": `"0000:1B:00.0=dra": that GPU has a path already, dra`,
	} {
		if paths, err := Parse(list); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, error %v; want one with %s", list, paths, err, says)
		}
	}
}

func TestWithhold(t *testing.T) {
	device := func(names ...string) (devices []resourceapi.Device) {
		for _, name := range names {
			devices = append(devices, resourceapi.Device{Name: name})
		}
		return devices
	}
	resources := resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{"node-1": {Generation: 3, Slices: []resourceslice.Slice{
		{SharedCounters: []resourceapi.CounterSet{{Name: first.Name}, {Name: second.Name}}},
		{Devices: device(first.Name, first.Name+"-mig-1g10gb-0")},
		{Devices: device(second.Name), PerDeviceNodeSelection: new(true)},
	}}}}
	before := resources.Pools["node-1"].Slices[0]
	tests := map[string]struct {
		withheld []string
		want     []resourceslice.Slice
	}{
		"none": {want: resources.Pools["node-1"].Slices},
		"one, with its partitions and counters": {withheld: []string{first.Name}, want: []resourceslice.Slice{
			{SharedCounters: []resourceapi.CounterSet{{Name: second.Name}}}, {Devices: device(second.Name), PerDeviceNodeSelection: new(true)},
		}},
		"all: a slice tells that the driver runs": {withheld: []string{first.Name, second.Name}, want: []resourceslice.Slice{{}}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got := Withhold(resources, func(gpu string) bool { return strings.Contains(strings.Join(test.withheld, " "), gpu) })
			want := map[string]resourceslice.Pool{"node-1": {Generation: 3, Slices: test.want}}
			if diff := cmp.Diff(want, got.Pools); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	if diff := cmp.Diff(before, resources.Pools["node-1"].Slices[0]); diff != "" {
		t.Errorf("what was given has changed (-before +after):\n%s", diff)
	}
}

func TestGPUOf(t *testing.T) {
	for device, want := range map[string]string{
		"gpu-0000-1b-00-0":                  "gpu-0000-1b-00-0",
		"gpu-0000-1b-00-0-mig-1c3g40gb-4-1": "gpu-0000-1b-00-0",
		"gpu-0000-1b-00-0-vfio":             "gpu-0000-1b-00-0",
		"other":                             "other",
		"":                                  "",
	} {
		if got := GPUOf(device); got != want {
			t.Errorf("%q: %q, want %q", device, got, want)
		}
	}
}
