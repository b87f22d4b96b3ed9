// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"context"
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// kubelet answers as it is told, and else as one that does not serve the question.
type kubelet struct {
	api.UnsafePodResourcesListerServer
	list        func(context.Context) (*api.ListPodResourcesResponse, error)
	get         func(namespace, name string) (*api.GetPodResourcesResponse, error)
	allocatable func() (*api.AllocatableResourcesResponse, error)
}

var errOld = status.Error(codes.Unimplemented, "unknown method")

func (k *kubelet) List(ctx context.Context, _ *api.ListPodResourcesRequest) (*api.ListPodResourcesResponse, error) {
	if k.list == nil {
		return nil, errOld
	}
	return k.list(ctx)
}

func (k *kubelet) Get(_ context.Context, r *api.GetPodResourcesRequest) (*api.GetPodResourcesResponse, error) {
	if k.get == nil {
		return nil, errOld
	}
	return k.get(r.GetPodNamespace(), r.GetPodName())
}

func (k *kubelet) GetAllocatableResources(context.Context, *api.AllocatableResourcesRequest) (*api.AllocatableResourcesResponse, error) {
	if k.allocatable == nil {
		return nil, errOld
	}
	return k.allocatable()
}

// lists is a kubelet with these pods.
func lists(pods ...*api.PodResources) *kubelet {
	return &kubelet{list: func(context.Context) (*api.ListPodResourcesResponse, error) {
		return &api.ListPodResourcesResponse{PodResources: pods}, nil
	}}
}

// socket is a path for one.
func socket(t *testing.T) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "k.sock")
}

// serve serves the kubelet's socket until stop is called or the test ends.
func serve(t *testing.T, path string, k *kubelet) (stop func()) {
	t.Helper()
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	api.RegisterPodResourcesListerServer(server, k)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener)
	}()
	stop = func() {
		server.Stop()
		<-done
	}
	t.Cleanup(stop)
	return stop
}

// uses is a pod with one container that has this claim's devices.
func uses(namespace, pod, container string, claim *api.DynamicResource) *api.PodResources {
	return &api.PodResources{Namespace: namespace, Name: pod, Containers: []*api.ContainerResources{{
		Name: container, DynamicResources: []*api.DynamicResource{claim},
	}}}
}
