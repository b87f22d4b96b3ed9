// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"tags.cncf.io/container-device-interface/specs-go"

	"stowage.dev/stowage/pkg/agent/cdi"
)

// fakeBackend names what it was asked for.
type fakeBackend struct{}

func (fakeBackend) Ready(context.Context) error { return nil }

func (fakeBackend) CommonEdits(context.Context) (*specs.ContainerEdits, error) {
	return &specs.ContainerEdits{Mounts: []*specs.Mount{{HostPath: "/libcuda.so", ContainerPath: "/libcuda.so"}}}, nil
}

func (fakeBackend) GPUEdits(_ context.Context, gpu cdi.GPU) (*specs.ContainerEdits, error) {
	return &specs.ContainerEdits{DeviceNodes: []*specs.DeviceNode{{Path: "/dev/" + gpu.Name}}}, nil
}

func (fakeBackend) ControlNodes(context.Context) error { return nil }

func (fakeBackend) VisibleDevices(uuids []string) string { return strings.Join(uuids, ",") }

func (fakeBackend) NodeEdits(_ context.Context, names []string) (*specs.ContainerEdits, error) {
	edits := &specs.ContainerEdits{}
	for _, name := range names {
		edits.DeviceNodes = append(edits.DeviceNodes, &specs.DeviceNode{Path: "/dev/" + name})
	}
	return edits, nil
}

// TestNothingOfTheDriverGoesToAVirtualMachine, also if another request of the claim has a GPU of the driver.
func TestNothingOfTheDriverGoesToAVirtualMachine(t *testing.T) {
	vm := cdi.Device{Request: "vm", Name: "gpu-0-vfio", GPU: cdi.GPU{Name: "gpu-0", UUID: "0000:1b:00.0"}, Nodes: []string{"vfio/12", "vfio/vfio"}}
	host := cdi.Device{Request: "host", Name: "gpu-1", GPU: cdi.GPU{Name: "gpu-1", UUID: "GPU-1"}}
	tests := map[string]struct {
		devices []cdi.Device
		// want has, for the claim's every container and for each device, nodes, mounts and variables.
		want []string
	}{
		"alone": {[]cdi.Device{vm}, []string{
			"", "/dev/vfio/12 /dev/vfio/vfio STOWAGE_GPU_0_VFIO=0000:1b:00.0 NVIDIA_VISIBLE_DEVICES=void",
		}},
		"a GPU of the driver alone": {[]cdi.Device{host}, []string{
			"/libcuda.so", "/dev/gpu-1 STOWAGE_GPU_1=GPU-1 NVIDIA_VISIBLE_DEVICES=GPU-1",
		}},
		"both": {[]cdi.Device{vm, host}, []string{
			"", "/dev/vfio/12 /dev/vfio/vfio STOWAGE_GPU_0_VFIO=0000:1b:00.0 NVIDIA_VISIBLE_DEVICES=void",
			"/dev/gpu-1 /libcuda.so STOWAGE_GPU_1=GPU-1 NVIDIA_VISIBLE_DEVICES=GPU-1",
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			spec, err := cdi.BuildSpec(t.Context(), fakeBackend{}, "uid", test.devices)
			if err != nil {
				t.Fatal(err)
			}
			got := []string{words(&spec.ContainerEdits)}
			for i := range spec.Devices {
				got = append(got, words(&spec.Devices[i].ContainerEdits))
			}
			if !slices.Equal(test.want, got) {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func words(edits *specs.ContainerEdits) string {
	var list []string
	for _, node := range edits.DeviceNodes {
		list = append(list, node.Path)
	}
	for _, mount := range edits.Mounts {
		list = append(list, mount.ContainerPath)
	}
	return strings.Join(append(list, edits.Env...), " ")
}

func TestTheKernelsNodesMustBeThere(t *testing.T) {
	backend := cdi.NewDriver(cdi.DriverOptions{DriverRoot: "/"})
	edits, err := backend.NodeEdits(t.Context(), []string{"null", "zero"})
	if err != nil || words(edits) != "/dev/null /dev/zero" || edits.DeviceNodes[0].HostPath != "/dev/null" || edits.DeviceNodes[0].Permissions != "rw" {
		t.Errorf("edits %+v, %v", edits, err)
	}
	for _, name := range []string{"vfio/no-such-group", "shm"} {
		if _, err := backend.NodeEdits(t.Context(), []string{"null", name}); err == nil || !strings.Contains(err.Error(), "/dev/"+name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
