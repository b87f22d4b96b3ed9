// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package kubelettest has a stand-in for the kubelet's device manager, with what is unkind in the real one
// (k8s.io/kubernetes/pkg/kubelet/cm/devicemanager): it deletes sockets when it starts, knows an endpoint by its socket alone, takes
// the end of a stream for the end of the plugin, asks again for the same devices, and never says that a pod has ended.
package kubelettest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// Kubelet is a device manager with its folder. Its methods may be called concurrently.
type Kubelet struct {
	pluginapi.UnimplementedRegistrationServer

	dir    string
	server *grpc.Server
	served chan struct{}

	mu        sync.Mutex
	changed   chan struct{}
	endpoints map[string]*endpoint // the last of each resource
	all       []*endpoint
	sockets   map[string]bool // that are connected
	lists     map[string][]List
	refuse    error
	stopped   bool
	group     sync.WaitGroup
}

// List is what a plugin has said of its devices.
type List struct {
	Socket  string
	Devices []*pluginapi.Device
}

type endpoint struct {
	socket  string
	conn    *grpc.ClientConn
	client  pluginapi.DevicePluginClient
	options *pluginapi.DevicePluginOptions
	cancel  context.CancelFunc
	// stopped endpoints have all their devices unhealthy.
	stopped bool
	devices []*pluginapi.Device
}

// Start deletes the sockets in the folder and serves registrations there until Stop, or until the test ends.
func Start(t testing.TB, dir string) *Kubelet {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if entry.Type()&os.ModeSocket != 0 {
			if err := os.Remove(filepath.Join(dir, entry.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Fatal(err)
			}
		}
	}
	k := &Kubelet{
		dir: dir, server: grpc.NewServer(), served: make(chan struct{}), changed: make(chan struct{}),
		endpoints: map[string]*endpoint{}, sockets: map[string]bool{}, lists: map[string][]List{},
	}
	listener, err := net.Listen("unix", filepath.Join(dir, "kubelet.sock"))
	if err != nil {
		t.Fatal(err)
	}
	pluginapi.RegisterRegistrationServer(k.server, k)
	go func() {
		defer close(k.served)
		_ = k.server.Serve(listener)
	}()
	t.Cleanup(k.Stop)
	return k
}

// Stop ends it as a kubelet ends: its own socket goes, those of plugins stay.
func (k *Kubelet) Stop() {
	k.mu.Lock()
	k.stopped = true
	for _, e := range k.all {
		e.cancel()
	}
	k.mu.Unlock()
	k.server.Stop()
	<-k.served
	k.group.Wait()
}

// Refuse lets registrations fail with the error, until it is nil.
func (k *Kubelet) Refuse(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.refuse = err
}

// Register implements pluginapi.RegistrationServer.
func (k *Kubelet) Register(ctx context.Context, request *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	socket := filepath.Join(k.dir, request.GetEndpoint())
	k.mu.Lock()
	refuse, connected := k.refuse, k.sockets[socket]
	k.mu.Unlock()
	switch {
	case refuse != nil:
		return nil, refuse
	case request.GetVersion() != pluginapi.Version:
		return nil, fmt.Errorf("unsupported version %q", request.GetVersion())
	case connected:
		return nil, fmt.Errorf("device plugin already connected: %s", socket)
	}
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	client := pluginapi.NewDevicePluginClient(conn)
	options, err := client.GetDevicePluginOptions(ctx, &pluginapi.Empty{})
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	streaming, cancel := context.WithCancel(context.WithoutCancel(ctx))
	e := &endpoint{socket: socket, conn: conn, client: client, options: options, cancel: cancel}
	stopped := false
	k.change(func() {
		// A plugin may register while the kubelet stops. Nobody would end its stream.
		if stopped = k.stopped; stopped {
			return
		}
		k.endpoints[request.GetResourceName()] = e
		k.all = append(k.all, e)
		k.sockets[socket] = true
		k.group.Go(func() { k.listen(streaming, request.GetResourceName(), e) })
	})
	if stopped {
		cancel()
		return nil, errors.Join(errors.New("the kubelet has stopped"), conn.Close())
	}
	return &pluginapi.Empty{}, nil
}

func (k *Kubelet) listen(ctx context.Context, resource string, e *endpoint) {
	defer func() {
		e.cancel()
		_ = e.conn.Close()
		k.change(func() { e.stopped = true; delete(k.sockets, e.socket) })
	}()
	stream, err := e.client.ListAndWatch(ctx, &pluginapi.Empty{})
	if err != nil {
		return
	}
	for {
		response, err := stream.Recv()
		if err != nil {
			return
		}
		k.change(func() {
			e.devices = response.GetDevices()
			k.lists[resource] = append(k.lists[resource], List{Socket: filepath.Base(e.socket), Devices: response.GetDevices()})
		})
	}
}

func (k *Kubelet) change(f func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	f()
	close(k.changed)
	k.changed = make(chan struct{})
}

// Await waits until the resource has that many allocatable devices.
func (k *Kubelet) Await(t testing.TB, resource string, allocatable int) {
	t.Helper()
	k.until(t, fmt.Sprintf("%s has %d allocatable devices", resource, allocatable),
		func() bool { return len(k.allocatable(resource)) == allocatable })
}

// AwaitDevice waits until the plugin that is registered now has told of the device, healthy or not.
func (k *Kubelet) AwaitDevice(t testing.TB, resource, id string) {
	t.Helper()
	k.until(t, fmt.Sprintf("%s has the device %s", resource, id), func() bool {
		e := k.endpoints[resource]
		return e != nil && !e.stopped && slices.ContainsFunc(e.devices, func(d *pluginapi.Device) bool { return d.GetID() == id })
	})
}

// AwaitAnother waits until the resource is registered at another socket than that.
func (k *Kubelet) AwaitAnother(t testing.TB, resource, socket string) {
	t.Helper()
	k.until(t, resource+" is registered at another socket than "+socket, func() bool {
		e := k.endpoints[resource]
		return e != nil && e.socket != socket
	})
}

// until waits for the condition, which is asked after each change with the lock held.
func (k *Kubelet) until(t testing.TB, what string, is func() bool) {
	t.Helper()
	timeout := time.After(time.Minute)
	for {
		k.mu.Lock()
		now, changed := is(), k.changed
		k.mu.Unlock()
		if now {
			return
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("not within a minute: %s", what)
		}
	}
}

func (k *Kubelet) allocatable(resource string) (ids []string) {
	e := k.endpoints[resource]
	if e == nil || e.stopped {
		return nil
	}
	for _, device := range e.devices {
		if device.GetHealth() == pluginapi.Healthy {
			ids = append(ids, device.GetID())
		}
	}
	return ids
}

// Resources that have been registered.
func (k *Kubelet) Resources() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Sorted(maps.Keys(k.endpoints))
}

// Lists are all that the resource's plugins have said since Start.
func (k *Kubelet) Lists(resource string) []List {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.lists[resource])
}

// Socket of the resource's last endpoint, by its path.
func (k *Kubelet) Socket(resource string) string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.endpoints[resource].socket
}

// Options of the resource's last endpoint.
func (k *Kubelet) Options(resource string) *pluginapi.DevicePluginOptions {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.endpoints[resource].options
}

// CutStream ends what the kubelet listens to, as an error of the stream does: it lets the plugin go.
func (k *Kubelet) CutStream(resource string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.endpoints[resource].cancel()
}

// Client of the resource's last endpoint.
func (k *Kubelet) Client(resource string) pluginapi.DevicePluginClient {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.endpoints[resource].client
}

// Allocate asks for devices of a container.
func (k *Kubelet) Allocate(ctx context.Context, resource string, ids ...string) (*pluginapi.ContainerAllocateResponse, error) {
	response, err := k.Client(resource).Allocate(ctx,
		&pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: ids}}})
	if err != nil {
		return nil, err
	}
	if n := len(response.GetContainerResponses()); n != 1 {
		return nil, fmt.Errorf("%d responses for one container", n)
	}
	return response.GetContainerResponses()[0], nil
}

// PreStart tells that a container with the devices is about to start.
func (k *Kubelet) PreStart(ctx context.Context, resource string, ids ...string) error {
	_, err := k.Client(resource).PreStartContainer(ctx, &pluginapi.PreStartContainerRequest{DevicesIds: ids})
	return err
}
