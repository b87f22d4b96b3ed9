// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"
	"k8s.io/apimachinery/pkg/types"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// kubelet is the PodResources service.
type kubelet struct {
	podresources.UnimplementedPodResourcesListerServer
}

func (*kubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	return &podresources.ListPodResourcesResponse{PodResources: []*podresources.PodResources{{
		Namespace: "default", Name: "pod",
		Containers: []*podresources.ContainerResources{
			{Name: "a", DynamicResources: []*podresources.DynamicResource{{ClaimName: "one"}}, Devices: []*podresources.ContainerDevices{
				{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-1", "GPU-2"}}, {ResourceName: "example.com/nic", DeviceIds: []string{"GPU-1"}},
			}},
			{Name: "b", DynamicResources: []*podresources.DynamicResource{{ClaimName: "two", ClaimResources: []*podresources.ClaimResource{
				{CdiDevices: []*podresources.CDIDevice{{Name: "k8s.gpu.nvidia.com/claim=two-uid_gpu_gpu-0"}, {Name: "k8s.gpu.nvidia.com/claim=two-uid_gpu_gpu-1"}}},
				{CdiDevices: []*podresources.CDIDevice{{Name: "nic.example.com/claim=other-uid_nic_nic-0"}, {Name: "odd"}}},
			}}}},
		},
	}}}, nil
}

func TestWhatTheKubeletRunsIsRead(t *testing.T) {
	dir, err := os.MkdirTemp("", "kubelet")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "kubelet.sock")
	for what, at := range map[string]string{"a kubelet that is not there": socket, "a socket that cannot be": "\x7f"} {
		if _, err := KubeletAt(at)(t.Context()); err == nil {
			t.Errorf("%s answers", what)
		}
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	ended := connections{ended: make(chan struct{}, 1)}
	server := grpc.NewServer(grpc.StatsHandler(ended))
	podresources.RegisterPodResourcesListerServer(server, &kubelet{})
	done := make(chan error)
	go func() { done <- server.Serve(listener) }()
	defer func() { server.Stop(); <-done }()
	pods, err := KubeletAt(socket)(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []KubeletPod{{
		Namespace: "default", Name: "pod", Claims: []string{"one", "two"}, CDIClaims: []types.UID{"two-uid"},
		Devices: []ledger.PluginDevice{{Resource: "nvidia.com/gpu", ID: "GPU-1"}, {Resource: "nvidia.com/gpu", ID: "GPU-2"}, {Resource: "example.com/nic", ID: "GPU-1"}},
	}}
	if diff := cmp.Diff(want, pods); diff != "" {
		t.Errorf("pods (-want +got):\n%s", diff)
	}
	select {
	case <-ended.ended:
	case <-time.After(time.Minute):
		t.Error("the connection stays")
	}
}

// connections tells when one has ended.
type connections struct{ ended chan struct{} }

func (connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (connections) HandleRPC(context.Context, stats.RPCStats)                         {}
func (connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (c connections) HandleConn(_ context.Context, s stats.ConnStats) {
	if _, ok := s.(*stats.ConnEnd); ok {
		c.ended <- struct{}{}
	}
}
