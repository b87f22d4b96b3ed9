// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package pluginpath

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// kubelet has a pod with two devices, and plugins that offer one of these and another one.
type kubelet struct {
	api.UnsafePodResourcesListerServer
	allocatable, list error
}

func (k *kubelet) Get(context.Context, *api.GetPodResourcesRequest) (*api.GetPodResourcesResponse, error) {
	return nil, status.Error(codes.Unimplemented, "unknown method")
}

func (k *kubelet) GetAllocatableResources(context.Context, *api.AllocatableResourcesRequest) (*api.AllocatableResourcesResponse, error) {
	return &api.AllocatableResourcesResponse{Devices: []*api.ContainerDevices{
		{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-1"}}, {ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-2"}},
	}}, k.allocatable
}

func (k *kubelet) List(context.Context, *api.ListPodResourcesRequest) (*api.ListPodResourcesResponse, error) {
	return &api.ListPodResourcesResponse{PodResources: []*api.PodResources{{Namespace: "default", Name: "pod", Containers: []*api.ContainerResources{
		{Name: "a", Devices: []*api.ContainerDevices{{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-1"}}}},
		{Name: "b", Devices: []*api.ContainerDevices{{ResourceName: "example.com/gpu", DeviceIds: []string{"GPU-3"}}}},
	}}}}, k.list
}

// TestDevicesOfTheNodesPlugins are those that are offered and those that pods have, one that is not healthy among them. What cannot be asked is
// an error, and not a node without device plugins.
func TestDevicesOfTheNodesPlugins(t *testing.T) {
	gpu := func(resource, id string) ledger.PluginDevice { return ledger.PluginDevice{Resource: resource, ID: id} }
	held := []ledger.PluginDevice{gpu("nvidia.com/gpu", "GPU-1"), gpu("example.com/gpu", "GPU-3")}
	for name, test := range map[string]struct {
		kubelet   *kubelet
		notOfPods bool
		want      []ledger.PluginDevice
		code      codes.Code
	}{
		"offered, and what pods have":    {kubelet: &kubelet{}, want: append([]ledger.PluginDevice{gpu("nvidia.com/gpu", "GPU-1"), gpu("nvidia.com/gpu", "GPU-2")}, held...)},
		"a kubelet before 1.23":          {kubelet: &kubelet{allocatable: status.Error(codes.Unimplemented, "unknown method")}, want: held},
		"it does not say what there is":  {kubelet: &kubelet{allocatable: status.Error(codes.Unavailable, "not yet")}, code: codes.Unavailable},
		"it is not asked what pods have": {kubelet: &kubelet{list: status.Error(codes.Internal, "no")}, notOfPods: true, want: []ledger.PluginDevice{gpu("nvidia.com/gpu", "GPU-1"), gpu("nvidia.com/gpu", "GPU-2")}},
		"it does not list":               {kubelet: &kubelet{list: status.Error(codes.Internal, "no")}, code: codes.Internal},
		"there is no socket":             {},
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(t.TempDir(), "k.sock")
			if test.kubelet != nil {
				listener, err := net.Listen("unix", socket)
				if err != nil {
					t.Fatal(err)
				}
				server := grpc.NewServer()
				api.RegisterPodResourcesListerServer(server, test.kubelet)
				go func() { _ = server.Serve(listener) }()
				defer server.Stop()
			}
			devices, err := DevicesAt(socket)(t.Context(), !test.notOfPods)
			if status.Code(err) != test.code {
				t.Errorf("error %v, want %s", err, test.code)
			}
			if diff := cmp.Diff(test.want, devices); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}
}
