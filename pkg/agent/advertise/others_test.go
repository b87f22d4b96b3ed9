// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package advertise

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// TestGPUsOfOtherDevicePlugins are told by what NVIDIA's and Google's plugins, and those for virtual machines, call them.
func TestGPUsOfOtherDevicePlugins(t *testing.T) {
	const (
		first, second, mig = "GPU-8a1b2c3d-0000-0000-0000-000000000001", "GPU-8a1b2c3d-0000-0000-0000-000000000002", "MIG-8a1b2c3d-0000-0000-0000-000000000003"
		gone               = "GPU-8a1b2c3d-0000-0000-0000-000000000009"
	)
	node := &discovery.Node{GPUs: []discovery.GPU{
		{Name: "gpu-0000-1b-00-0", UUID: first, PCIBusID: "0000:1b:00.0", Minor: 0},
		{Name: "gpu-0000-43-00-0", UUID: second, PCIBusID: "0000:43:00.0", Minor: 1, MIGInstances: []nvml.GPUInstance{{Devices: []nvml.MIGDevice{{UUID: mig}}}}},
		{Name: "gpu-0000-52-00-0", PCIBusID: "0000:52:00.0", Minor: 2, Passthrough: &discovery.Passthrough{Bound: true, Group: "12"}},
		{Name: "gpu-0000-64-00-0", UUID: "GPU-8a1b2c3d-0000-0000-0000-000000000004", PCIBusID: "0000:64:00.0", Minor: 2},
	}}
	of := func(resource string, ids ...string) (devices []ledger.PluginDevice) {
		for _, id := range ids {
			devices = append(devices, ledger.PluginDevice{Resource: resource, ID: id})
		}
		return devices
	}
	tests := map[string]struct {
		devices []ledger.PluginDevice
		want    map[string]string
		unknown []ledger.PluginDevice
	}{
		"nothing":                     {want: map[string]string{}},
		"a whole GPU":                 {devices: of("nvidia.com/gpu", first), want: map[string]string{"gpu-0000-1b-00-0": "nvidia.com/gpu"}},
		"a MIG device":                {devices: of("nvidia.com/mig-1g.10gb", mig), want: map[string]string{"gpu-0000-43-00-0": "nvidia.com/mig-1g.10gb"}},
		"replicas":                    {devices: of("nvidia.com/gpu.shared", second+"::0", second+"::1"), want: map[string]string{"gpu-0000-43-00-0": "nvidia.com/gpu.shared"}},
		"by minor number, and a part": {devices: of("nvidia.com/gpu", "nvidia1/gi3", "nvidia0/vgpu1"), want: map[string]string{"gpu-0000-1b-00-0": "nvidia.com/gpu", "gpu-0000-43-00-0": "nvidia.com/gpu"}},
		"NICs of NVIDIA":              {devices: append(of("nvidia.com/hostdev", "0000:3b:00.0"), of("nvidia.com/rdma_shared", "0", "mlx5_0")...), want: map[string]string{}},
		"a GPU of KubeVirt's plugin":  {devices: of("nvidia.com/GA102GL_A10", "12"), want: map[string]string{"gpu-0000-52-00-0": "nvidia.com/GA102GL_A10"}},
		"by the number of its model":  {devices: of("nvidia.com/2330", "12"), want: map[string]string{"gpu-0000-52-00-0": "nvidia.com/2330"}},
		"a group that is not known":   {devices: of("nvidia.com/GA102GL_A10", "13"), want: map[string]string{}, unknown: of("nvidia.com/GA102GL_A10", "13")},
		"a vGPU":                      {devices: of("nvidia.com/NVIDIA_A10-24Q", "c7a5d2e4-5f0b-5c1d-8e9f-0a1b2c3d4e5f"), want: map[string]string{}, unknown: of("nvidia.com/NVIDIA_A10-24Q", "c7a5d2e4-5f0b-5c1d-8e9f-0a1b2c3d4e5f")},
		"a part by memory":            {devices: of("aliyun.com/gpu-mem", second+"-_-7"), want: map[string]string{"gpu-0000-43-00-0": "aliyun.com/gpu-mem"}},
		"a long domain":               {devices: of("vendor.example.com/H100", "00000000:43:00.0"), want: map[string]string{"gpu-0000-43-00-0": "vendor.example.com/H100"}},
		"an address of no GPU":        {devices: of("nvidia.com/gpu", "0000:99:00.0"), want: map[string]string{}},
		"the minor of a GPU that virtual machines have": {devices: of("example.com/gpu", "nvidia2"), want: map[string]string{"gpu-0000-64-00-0": "example.com/gpu"}},
		"for virtual machines":                          {devices: of("vendor.example.com/H100", "0000:43:00.0"), want: map[string]string{"gpu-0000-43-00-0": "vendor.example.com/H100"}},
		"two resources of one GPU":                      {devices: append(of("nvidia.com/pgpu", first), of("nvidia.com/gpu", first)...), want: map[string]string{"gpu-0000-1b-00-0": "nvidia.com/gpu"}},
		"others' devices":                               {devices: of("example.com/nic", "eth0", first[4:]), want: map[string]string{}},
		"NVIDIA's of another form":                      {devices: of("nvidia.com/gpu", "0", first), want: map[string]string{"gpu-0000-1b-00-0": "nvidia.com/gpu"}, unknown: of("nvidia.com/gpu", "0")},
		"a GPU that is not there":                       {devices: of("nvidia.com/gpu", gone), want: map[string]string{}, unknown: of("nvidia.com/gpu", gone)},
		"a minor that is of the second":                 {devices: of("nvidia.com/gpu", "nvidia1"), want: map[string]string{"gpu-0000-43-00-0": "nvidia.com/gpu"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			got, unknown := OfPlugins(node, test.devices)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("GPUs (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.unknown, unknown); diff != "" {
				t.Errorf("unknown (-want +got):\n%s", diff)
			}
		})
	}
}
