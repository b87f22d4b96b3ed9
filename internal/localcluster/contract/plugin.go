// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// resourceName is what the device plugin offers.
const resourceName = "example.com/device"

// plugin is a device plugin. Each allocation sets a variable to the IDs.
type plugin struct {
	pluginapi.UnimplementedDevicePluginServer

	mu      sync.Mutex
	devices map[string]bool // whether healthy, by ID
	changed chan struct{}
	calls   []string
}

func newPlugin(ids ...string) *plugin {
	p := &plugin{devices: map[string]bool{}, changed: make(chan struct{})}
	for _, id := range ids {
		p.devices[id] = true
	}
	return p
}

// start serves at a socket of that name until stop is called, and registers the plugin.
func (p *plugin) start(t *testing.T, k *Kubelet, endpoint string) (stop func()) {
	t.Helper()
	dir := filepath.Join(k.Root, "device-plugins")
	listener, err := net.Listen("unix", filepath.Join(dir, endpoint))
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, p)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) })
	stop = sync.OnceFunc(func() {
		server.Stop()
		serving.Wait()
		_ = os.Remove(filepath.Join(dir, endpoint))
	})
	conn, err := grpc.NewClient("unix:"+filepath.Join(dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	eventually(t, func() error { // a kubelet that has just started may not listen yet
		_, err := pluginapi.NewRegistrationClient(conn).Register(t.Context(), &pluginapi.RegisterRequest{
			Version: pluginapi.Version, Endpoint: endpoint, ResourceName: resourceName, Options: options(),
		})
		return err
	})
	return stop
}

func options() *pluginapi.DevicePluginOptions {
	return &pluginapi.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true}
}

// GetDevicePluginOptions implements the API.
func (*plugin) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return options(), nil
}

// ListAndWatch implements the API.
func (p *plugin) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	for {
		p.mu.Lock()
		answer, changed := &pluginapi.ListAndWatchResponse{}, p.changed
		for id, healthy := range p.devices {
			device := &pluginapi.Device{ID: id, Health: pluginapi.Unhealthy}
			if healthy {
				device.Health = pluginapi.Healthy
			}
			answer.Devices = append(answer.Devices, device)
		}
		p.mu.Unlock()
		if err := stream.Send(answer); err != nil {
			return err
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-changed:
		}
	}
}

// GetPreferredAllocation implements the API: the last ones are preferred.
func (*plugin) GetPreferredAllocation(
	_ context.Context, request *pluginapi.PreferredAllocationRequest,
) (*pluginapi.PreferredAllocationResponse, error) {
	answer := &pluginapi.PreferredAllocationResponse{}
	for _, container := range request.GetContainerRequests() {
		ids := slices.Clone(container.GetMustIncludeDeviceIDs())
		for _, id := range slices.Backward(slices.Sorted(slices.Values(container.GetAvailableDeviceIDs()))) {
			if len(ids) < int(container.GetAllocationSize()) && !slices.Contains(ids, id) {
				ids = append(ids, id)
			}
		}
		answer.ContainerResponses = append(answer.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return answer, nil
}

// Allocate implements the API.
func (p *plugin) Allocate(_ context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	answer := &pluginapi.AllocateResponse{}
	for _, container := range request.GetContainerRequests() {
		ids := p.note("allocate", container.GetDevicesIds())
		response := &pluginapi.ContainerAllocateResponse{Envs: map[string]string{"STOWAGE_IDS": ids}}
		answer.ContainerResponses = append(answer.ContainerResponses, response)
	}
	return answer, nil
}

// PreStartContainer implements the API.
func (p *plugin) PreStartContainer(
	_ context.Context, request *pluginapi.PreStartContainerRequest,
) (*pluginapi.PreStartContainerResponse, error) {
	p.note("start", request.GetDevicesIds())
	return &pluginapi.PreStartContainerResponse{}, nil
}

func (p *plugin) note(call string, ids []string) string {
	text := strings.Join(slices.Sorted(slices.Values(ids)), ",")
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls = append(p.calls, fmt.Sprintf("%s %s", call, text))
	return text
}

func (p *plugin) set(id string, healthy bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.devices[id] = healthy
	close(p.changed)
	p.changed = make(chan struct{})
}

// since are the calls after so many.
func (p *plugin) since(n int) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.calls[n:])
}
