// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// answered is one pod in all its detail, with CDI names added up as a kubelet does.
var answered = &api.PodResources{Namespace: "team-a", Name: "train-0", Containers: []*api.ContainerResources{
	{
		Name: "main",
		Devices: []*api.ContainerDevices{
			{ResourceName: "nvidia.com/gpu", DeviceIds: []string{"GPU-1", "GPU-2"}}, {ResourceName: "vendor.com/nic", DeviceIds: []string{"nic0"}},
		},
		DynamicResources: []*api.DynamicResource{{ClaimNamespace: "team-a", ClaimName: "gpus", ClaimResources: []*api.ClaimResource{
			{CdiDevices: cdi("v/c=1"), DriverName: "gpu.nvidia.com", PoolName: "node-1", DeviceName: "gpu-0"},
			{CdiDevices: cdi("v/c=1", "v/c=2"), DriverName: "gpu.nvidia.com", PoolName: "node-1", DeviceName: "gpu-1", ShareId: ptr("s1")},
		}}},
	},
	{Name: "sidecar"},
}}

var understood = Pod{Namespace: "team-a", Name: "train-0", Containers: []Container{
	{
		Name:    "main",
		Devices: []Devices{{"nvidia.com/gpu", []string{"GPU-1", "GPU-2"}}, {"vendor.com/nic", []string{"nic0"}}},
		Claims: []Claim{{
			Namespace: "team-a", Name: "gpus",
			Devices: []ClaimDevice{{"gpu.nvidia.com", "node-1", "gpu-0", ""}, {"gpu.nvidia.com", "node-1", "gpu-1", "s1"}},
			CDI:     []string{"v/c=1", "v/c=2"},
		}},
	},
	{Name: "sidecar"},
}}

func cdi(names ...string) (devices []*api.CDIDevice) {
	for _, name := range names {
		devices = append(devices, &api.CDIDevice{Name: name})
	}
	return devices
}

func ptr[T any](v T) *T { return &v }

func TestTheAnswerIsUnderstood(t *testing.T) {
	path := socket(t)
	k := lists(answered, &api.PodResources{Namespace: "team-b", Name: "idle"})
	k.get = func(namespace, name string) (*api.GetPodResourcesResponse, error) {
		if namespace+"/"+name != "team-a/train-0" {
			return nil, fmt.Errorf("pod %s in namespace %s not found", name, namespace)
		}
		return &api.GetPodResourcesResponse{PodResources: answered}, nil
	}
	k.allocatable = func() (*api.AllocatableResourcesResponse, error) {
		return &api.AllocatableResourcesResponse{Devices: answered.Containers[0].Devices}, nil
	}
	serve(t, path, k)
	client := New(path)
	pods, err := client.List(t.Context())
	if diff := cmp.Diff([]Pod{understood, {Namespace: "team-b", Name: "idle"}}, pods); diff != "" || err != nil {
		t.Errorf("List: %v (-want +got):\n%s", err, diff)
	}
	pod, err := client.Get(t.Context(), "team-a", "train-0")
	if diff := cmp.Diff(understood, pod); diff != "" || err != nil {
		t.Errorf("Get: %v (-want +got):\n%s", err, diff)
	}
	if _, err := client.Get(t.Context(), "team-a", "train-1"); err == nil || !strings.Contains(err.Error(), "team-a/train-1") {
		t.Errorf("Get of no pod: %v", err)
	}
	devices, err := client.Allocatable(t.Context())
	if diff := cmp.Diff(understood.Containers[0].Devices, devices); diff != "" || err != nil {
		t.Errorf("Allocatable: %v (-want +got):\n%s", err, diff)
	}
}

// TestAnOldKubelet: of 1.30 it names no driver, pool and device, has Get behind a gate, and of 1.22 knows no allocatable resources.
func TestAnOldKubelet(t *testing.T) {
	path := socket(t)
	serve(t, path, lists(uses("team-a", "train-0", "main", &api.DynamicResource{
		ClaimNamespace: "team-a", ClaimName: "gpus", ClaimResources: []*api.ClaimResource{{CdiDevices: cdi("v/c=1")}},
	})))
	client := New(path)
	want := Pod{Namespace: "team-a", Name: "train-0", Containers: []Container{{
		Name: "main", Claims: []Claim{{Namespace: "team-a", Name: "gpus", CDI: []string{"v/c=1"}}},
	}}}
	pod, err := client.Get(t.Context(), "team-a", "train-0")
	if diff := cmp.Diff(want, pod); diff != "" || err != nil {
		t.Errorf("Get: %v (-want +got):\n%s", err, diff)
	}
	if _, err := client.Get(t.Context(), "team-b", "train-0"); err == nil || errors.Is(err, ErrNotServed) {
		t.Errorf("Get of no pod: %v", err)
	}
	if _, err := client.Allocatable(t.Context()); !errors.Is(err, ErrNotServed) {
		t.Errorf("Allocatable: %v, want that it is not served", err)
	}
}

// TestAnUnkindKubelet: whatever it does, the client has its answer in time, or an error that names the socket.
func TestAnUnkindKubelet(t *testing.T) {
	for name, tc := range map[string]struct {
		kubelet func(t *testing.T, path string)
		want    string // what the error says; empty for an answer
	}{
		"away":              {func(*testing.T, string) {}, "no such file"},
		"takes no question": {deaf, "DeadlineExceeded"},
		"not the kubelet":   {chatty, "Unavailable"},
		"does not answer": {func(t *testing.T, path string) {
			serve(t, path, &kubelet{list: func(ctx context.Context) (*api.ListPodResourcesResponse, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}})
		}, "DeadlineExceeded"},
		"has too many questions": {func(t *testing.T, path string) {
			serve(t, path, &kubelet{list: func(context.Context) (*api.ListPodResourcesResponse, error) {
				return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
			}})
		}, "rate limit"},
		"a large answer": {func(t *testing.T, path string) { serve(t, path, lists(podOfBytes(MaxAnswer-1024))) }, ""},
		"one too large":  {func(t *testing.T, path string) { serve(t, path, lists(podOfBytes(MaxAnswer+1))) }, "larger than max"},
	} {
		t.Run(name, func(t *testing.T) {
			path := socket(t)
			tc.kubelet(t, path)
			client := New(path)
			client.patience = 3 * time.Second
			if tc.want == "DeadlineExceeded" {
				client.patience = 50 * time.Millisecond
			}
			pods, err := client.List(t.Context())
			switch {
			case tc.want == "" && (err != nil || len(pods) != 1):
				t.Errorf("%d pods, %v", len(pods), err)
			case tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), path)):
				t.Errorf("%v, want %q and the socket", err, tc.want)
			}
		})
	}
}

// podOfBytes is as large as that in an answer, roughly.
func podOfBytes(n int) *api.PodResources {
	return &api.PodResources{Name: strings.Repeat("x", n)}
}

// deaf takes connections and reads nothing.
func deaf(t *testing.T, path string) {
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
}

// chatty speaks another protocol.
func chatty(t *testing.T, path string) {
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	t.Cleanup(func() {
		listener.Close()
		<-done
	})
	go func() {
		defer close(done)
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			fmt.Fprintln(conn, "220 mail.example.com ESMTP")
			conn.Close()
		}
	}()
}

// TestAKubeletThatWasRestartedIsAskedAtOnce: no connection, and no pause after a failed one, is left of before.
func TestAKubeletThatWasRestartedIsAskedAtOnce(t *testing.T) {
	path := socket(t)
	client := New(path)
	for i := range 3 {
		name := fmt.Sprint("pod-", i)
		stop := serve(t, path, lists(&api.PodResources{Name: name}))
		pods, err := client.List(t.Context())
		if err != nil || len(pods) != 1 || pods[0].Name != name {
			t.Errorf("start %d: %v, %v", i, pods, err)
		}
		stop()
		if _, err := client.List(t.Context()); err == nil {
			t.Errorf("start %d: an answer of a kubelet that is away", i)
		}
	}
}
