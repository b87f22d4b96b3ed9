// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestAGPUForAVirtualMachineExcludesTheGPUAndItsPartitions: of devices of one GPU the scheduler can only allocate what the counters have.
func TestAGPUForAVirtualMachineExcludesTheGPUAndItsPartitions(t *testing.T) {
	tests := map[string]struct {
		profile string
		policy  Policy
		before  []nvmlsim.Command
		// want is how many devices the first GPU has beside that for a virtual machine, -1 without that one.
		want  int
		warns string
	}{
		"beside the GPU":            {profile: "t4", policy: Policy{Passthrough: true}, want: 1},
		"of one that has MIG":       {profile: "dgx-h100", policy: Policy{Passthrough: true}, want: 1},
		"beside partitions":         {profile: "dgx-h100", policy: Policy{Passthrough: true, Dynamic: true}, want: 26},
		"not by default":            {profile: "dgx-h100", policy: Policy{Dynamic: true}, want: -1},
		"not in shares":             {profile: "t4", policy: Policy{Passthrough: true, Shares: Shares{All: true, MemoryStep: 1 << 30}}, want: -1},
		"not of an administrator's": {profile: "dgx-h100", policy: Policy{Passthrough: true}, before: []nvmlsim.Command{&nvmlsim.SetMIG{GPU: "0", Enabled: true}}, want: -1, warns: "MIG mode is enabled"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			node := partitioned(t, test.profile, test.policy, test.before...)
			gpu := &node.GPUs[0]
			var table strings.Builder
			if err := node.PrintTable(&table); err != nil || !strings.Contains(gpu.NoPassthrough, test.warns) || test.warns != "" && !strings.Contains(table.String(), "not offered to virtual machines: "+test.warns) {
				t.Errorf("%v, the reason is %q, and the table says\n%s", err, gpu.NoPassthrough, &table)
			}
			of := slices.IndexFunc(gpu.Offers, func(o Offer) bool { return o.Passthrough })
			if test.want < 0 {
				if of >= 0 {
					t.Errorf("it is offered: %v", gpu.Offers)
				}
				return
			}
			if of < 0 || len(gpu.Offers) != test.want+1 {
				t.Fatalf("offers %v, want one for a virtual machine and %d more", gpu.Offers, test.want)
			}
			device := node.Device(gpu, &gpu.Offers[of])
			checkDevice(t, device)
			all := gpu.counterSet().Counters
			if diff := cmp.Diff([]resourceapi.DeviceCounterConsumption{{CounterSet: gpu.Name, Counters: all}}, device.ConsumesCounters); diff != "" || len(all) == 0 {
				t.Errorf("it does not take all that the GPU has (-want +got):\n%s", diff)
			}
			for i := range gpu.Offers {
				if other := node.Device(gpu, &gpu.Offers[i]); len(other.ConsumesCounters) != 1 || len(other.ConsumesCounters[0].Counters) == 0 {
					t.Errorf("%s takes nothing of the GPU", other.Name)
				}
			}
		})
	}
}

func TestWhatIsPublishedForVirtualMachines(t *testing.T) {
	node := partitioned(t, "dgx-h100", Policy{Passthrough: true})
	gpu := &node.GPUs[0]
	device := node.Device(gpu, &gpu.Offers[1])
	got := map[string]string{"name": device.Name}
	for name, a := range device.Attributes {
		switch {
		case a.StringValue != nil:
			got[string(name)] = *a.StringValue
		case a.IntValue != nil:
			got[string(name)] = fmt.Sprint(*a.IntValue)
		case a.BoolValue != nil:
			got[string(name)] = fmt.Sprint(*a.BoolValue)
		}
	}
	want := map[string]string{
		"name": "gpu-0000-1b-00-0-vfio", "type": "vfio", "uuid": gpu.UUID, "productName": "NVIDIA H100 80GB HBM3", "brand": "Nvidia", "architecture": "Hopper",
		"vendorID": "0x10de", "deviceID": "0x2330", "iommuGroup": "20", "iommuFDEnabled": "true",
		"resource.kubernetes.io/pciBusID": "0000:1b:00.0", "resource.kubernetes.io/pcieRoot": "pci0000:15", "resource.kubernetes.io/numaNode": "0",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if memory := device.Capacity[CapacityMemory]; memory.Value.Value() != int64(gpu.MemoryBytes) {
		t.Errorf("memory %v", memory.Value.String())
	}
}

// TestAGPUThatNVMLDoesNotSee: an administrator has given it to vfio-pci.
func TestAGPUThatNVMLDoesNotSee(t *testing.T) {
	lib, sysfs := machine(t, "dgx-h100")
	kernel := sysfs.(nvmlsim.Sysfs)
	const address = "0000:1b:00.0"
	for _, write := range [][2]string{
		{"bus/pci/drivers/nvidia/unbind", address}, {"bus/pci/devices/" + address + "/driver_override", "vfio-pci"}, {"bus/pci/drivers/vfio-pci/bind", address},
	} {
		if err := kernel.Write(write[0], write[1]); err != nil {
			t.Fatal(err)
		}
	}
	node := discover(t, lib, sysfs)
	if len(node.GPUs) != 8 || len(node.Failures) > 0 || !node.GPUs[0].Bound() || !node.GPUs[0].Unseen() || node.GPUs[1].Bound() {
		t.Fatalf("GPUs %+v, failures %v", node.GPUs, node.Failures)
	}
	gpu := &node.GPUs[0]
	if gpu.NotOffered != notSeen || len(gpu.Offers) > 0 {
		t.Errorf("without the policy: %q, %v", gpu.NotOffered, gpu.Offers)
	}
	var table strings.Builder
	if err := node.PrintTable(&table); err != nil || !strings.Contains(table.String(), "gpu-0000-1b-00-0   -                       -         -") {
		t.Errorf("%v\n%s", err, &table)
	}
	node.Offer(Policy{Passthrough: true, Dynamic: true})
	if len(gpu.Offers) != 1 || gpu.Offers[0].Name != "gpu-0000-1b-00-0-vfio" || gpu.NotOffered != "" {
		t.Fatalf("with the policy: %v, %q", gpu.Offers, gpu.NotOffered)
	}
	device := node.Device(gpu, &gpu.Offers[0])
	checkDevice(t, device)
	if _, known := device.Attributes[AttributeUUID]; known || len(device.Capacity) > 0 || len(device.ConsumesCounters) > 0 {
		t.Errorf("device %+v of a GPU of which nothing is known", device)
	}
}

// TestWhatIsRememberedHasTheIndicesOfNow: an agent that starts while it must not open NVML knows the indices of the one before it, and
// claims may have passed other GPUs through since.
func TestWhatIsRememberedHasTheIndicesOfNow(t *testing.T) {
	const first, second, third = "0000:1b:00.0", "0000:43:00.0", "0000:52:00.0"
	for name, test := range map[string]struct{ before, now []string }{
		"the first is taken since":             {now: []string{first}},
		"both before another are":              {now: []string{first, second}},
		"the first has come back since":        {before: []string{first}},
		"another has been taken in its place":  {before: []string{first}, now: []string{second}},
		"all have come back":                   {before: []string{first, second, third}},
		"nothing has changed":                  {before: []string{first, third}, now: []string{first, third}},
		"one that is behind them is taken now": {before: []string{second}, now: []string{second, third}},
	} {
		t.Run(name, func(t *testing.T) {
			lib, sysfs := machine(t, "dgx-h100")
			kernel := sysfs.(nvmlsim.Sysfs)
			give := func(addresses []string, from, to string) {
				t.Helper()
				for _, address := range addresses {
					for _, write := range [][2]string{
						{"bus/pci/drivers/" + from + "/unbind", address},
						{"bus/pci/devices/" + address + "/driver_override", to},
						{"bus/pci/drivers/" + to + "/bind", address},
					} {
						if err := kernel.Write(write[0], write[1]); err != nil {
							t.Fatal(err)
						}
					}
				}
			}
			all := discover(t, lib, sysfs)
			give(test.before, "nvidia", "vfio-pci")
			known := discover(t, lib, sysfs)
			for i := range known.GPUs {
				if gpu := &known.GPUs[i]; gpu.Unseen() { // a claim has it
					passthrough := gpu.Passthrough
					*gpu = all.GPUs[i]
					gpu.Passthrough = passthrough
				}
			}
			give(test.before, "vfio-pci", "nvidia")
			give(test.now, "nvidia", "vfio-pci")
			for range 2 {
				known.AskPassthrough(sysfs)
				for i, want := range all.GPUs {
					shares := Shares{GPUs: []string{strconv.Itoa(i)}}.byName(known)
					if shares.GPUs[0] != want.Name {
						t.Errorf("the GPU of index %d is %s, want %s", i, shares.GPUs[0], want.Name)
					}
				}
			}
		})
	}
}
