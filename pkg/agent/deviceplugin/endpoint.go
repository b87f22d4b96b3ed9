// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// The kubelet has no patience of its own for Allocate, which keeps it from all other pods; for PreStartContainer it is 30 s.
const (
	allocateTimeout = 5 * time.Second
	startTimeout    = (pluginapi.KubeletPreStartContainerRPCTimeoutInSecs - 2) * time.Second
	stopTimeout     = 10 * time.Second
)

// endpoint serves one resource at one socket, for one registration: the kubelet tells endpoints of a resource apart by their
// sockets alone, and would take the end of an earlier one for the end of its successor at the same socket.
type endpoint struct {
	pluginapi.UnimplementedDevicePluginServer

	resource string
	opts     *Options
	socket   string
	server   *grpc.Server
	file     os.FileInfo
	served   chan struct{}
	// ending is closed before the server stops: streams never end by themselves.
	ending chan struct{}

	mu      sync.Mutex
	streams int
	// idleSince is when the last stream ended, or when the endpoint began.
	idleSince time.Time
}

var _ pluginapi.DevicePluginServer = &endpoint{}

// serve makes the socket and serves it.
func serve(ctx context.Context, opts *Options, resource, socket string) (*endpoint, error) {
	if len(socket) > maxSocketPath {
		return nil, fmt.Errorf("the kubelet's folder %s is too deep: the socket path %s has %d bytes, at most %d are possible", opts.Dir, socket,
			len(socket), maxSocketPath)
	}
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("make the socket for %s: %w", resource, err)
	}
	// By hand: by then the file may be another's.
	listener.SetUnlinkOnClose(false)
	file, err := os.Lstat(socket)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the socket for %s: %w", resource, err), listener.Close())
	}
	e := &endpoint{
		resource: resource, opts: opts, socket: socket, file: file, server: grpc.NewServer(), idleSince: opts.Clock.Now(),
		served: make(chan struct{}), ending: make(chan struct{}),
	}
	pluginapi.RegisterDevicePluginServer(e.server, e)
	go func() {
		defer close(e.served)
		if err := e.server.Serve(listener); err != nil {
			utilruntime.HandleErrorWithContext(ctx, err, "Device plugin's socket is not served any more", "resource", resource, "socket", socket)
		}
	}()
	return e, nil
}

// stop answers the calls that are under way, as far as that can be done in stopTimeout: the kubelet asks again to start a container.
func (e *endpoint) stop() {
	close(e.ending)
	cut := time.AfterFunc(stopTimeout, e.server.Stop)
	defer cut.Stop()
	e.server.GracefulStop()
	<-e.served
	if e.hasSocket() {
		_ = os.Remove(e.socket)
	}
}

func (e *endpoint) hasSocket() bool {
	now, err := os.Lstat(e.socket)
	return err == nil && os.SameFile(e.file, now)
}

// listened tells whether the kubelet listens to the endpoint, or may be about to.
func (e *endpoint) listened() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.streams > 0 || e.opts.Clock.Since(e.idleSince) < e.opts.StreamGrace
}

// GetDevicePluginOptions implements pluginapi.DevicePluginServer.
func (e *endpoint) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return options, nil
}

var options = &pluginapi.DevicePluginOptions{PreStartRequired: true, GetPreferredAllocationAvailable: true}

// ListAndWatch implements pluginapi.DevicePluginServer: all devices, at once and whenever one has changed.
func (e *endpoint) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	e.mu.Lock()
	e.streams++
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.streams--
		e.idleSince = e.opts.Clock.Now()
	}()
	var last []*pluginapi.Device
	for {
		resource, changed := e.find()
		if now := listOf(resource); last == nil || !slices.EqualFunc(last, now, equal) {
			if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: now}); err != nil {
				return err
			}
			last = now
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		case <-e.ending:
			return nil
		}
	}
}

// find is the resource as it is now; it has no devices if it is not there any more.
func (e *endpoint) find() (*Resource, <-chan struct{}) {
	resources, changed := e.opts.Inventory.Resources()
	if at := slices.IndexFunc(resources, func(r Resource) bool { return r.Name == e.resource }); at >= 0 {
		return &resources[at], changed
	}
	return &Resource{Name: e.resource}, changed
}

func listOf(resource *Resource) []*pluginapi.Device {
	list := make([]*pluginapi.Device, 0, len(resource.Devices))
	for _, device := range resource.Devices {
		d := &pluginapi.Device{ID: device.ID, Health: pluginapi.Unhealthy}
		if device.Healthy {
			d.Health = pluginapi.Healthy
		}
		if device.NUMANode != nil {
			d.Topology = &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(*device.NUMANode)}}}
		}
		list = append(list, d)
	}
	return list
}

func equal(a, b *pluginapi.Device) bool {
	return a.ID == b.ID && a.Health == b.Health &&
		slices.EqualFunc(a.GetTopology().GetNodes(), b.GetTopology().GetNodes(), func(a, b *pluginapi.NUMANode) bool { return a.ID == b.ID })
}

// GetPreferredAllocation implements pluginapi.DevicePluginServer. It never fails: the kubelet would fail the pod.
func (e *endpoint) GetPreferredAllocation(ctx context.Context,
	request *pluginapi.PreferredAllocationRequest,
) (*pluginapi.PreferredAllocationResponse, error) {
	resource, _ := e.find()
	response := &pluginapi.PreferredAllocationResponse{}
	for _, container := range request.GetContainerRequests() {
		ids := preferred(resource, container)
		klog.FromContext(ctx).V(4).Info("Preferred devices", "resource", e.resource, "devices", ids, "must", container.GetMustIncludeDeviceIDs())
		response.ContainerResponses = append(response.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return response, nil
}

// Allocate implements pluginapi.DevicePluginServer.
func (e *endpoint) Allocate(ctx context.Context, request *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "resource", e.resource)
	response := &pluginapi.AllocateResponse{}
	for _, container := range request.GetContainerRequests() {
		devices, err := e.devices(container.GetDevicesIds())
		if resource, _ := e.find(); err == nil && resource.Single && len(devices) > 1 {
			// A container that has several from before starts again with them.
			err = status.Errorf(codes.InvalidArgument,
				"%d devices of %s: a container can have one on this node, whose GPUs are shared by MPS, because it can use one MPS daemon",
				len(devices), e.resource)
		}
		if err != nil {
			logger.Info("Devices are not given to a container", "reason", err.Error())
			return nil, err
		}
		if err := e.allocated(ctx, devices); err != nil {
			return nil, err
		}
		of, err := answer(e.opts.Strategies, e.resource, devices)
		if err != nil {
			return nil, status.Error(codes.Internal, err.Error())
		}
		logger.V(2).Info("Devices are given to a container", "devices", container.GetDevicesIds())
		response.ContainerResponses = append(response.ContainerResponses, of)
	}
	return response, nil
}

// allocated leaves to PreStartContainer what may pass.
func (e *endpoint) allocated(ctx context.Context, devices []Device) error {
	switch err := cutOff(ctx, allocateTimeout, func(ctx context.Context) error { return e.opts.Holder.Allocated(ctx, e.resource, devices) }); {
	case errors.Is(err, ErrRefused):
		utilruntime.HandleErrorWithContext(ctx, err, "Devices are not given to a container", "resource", e.resource)
		return status.Error(codes.FailedPrecondition, err.Error())
	case err != nil:
		klog.FromContext(ctx).Info("Devices are given to a container and are not ready yet, it will not start before they are",
			"resource", e.resource, "reason", err.Error())
	}
	return nil
}

// cutOff returns after that time at the latest, also if f is in a system call that nothing ends, on a disk that hangs: the kubelet admits
// no other pod meanwhile.
func cutOff(ctx context.Context, after time.Duration, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, after, fmt.Errorf("not done after %s: %w", after, context.DeadlineExceeded))
	done := make(chan error, 1)
	go func() {
		defer cancel()
		done <- f(ctx)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		select {
		case err := <-done: // f has ended, and with it the context
			return err
		default:
			return context.Cause(ctx)
		}
	}
}

// PreStartContainer implements pluginapi.DevicePluginServer.
func (e *endpoint) PreStartContainer(ctx context.Context,
	request *pluginapi.PreStartContainerRequest,
) (*pluginapi.PreStartContainerResponse, error) {
	devices, err := e.devices(request.GetDevicesIds())
	if err != nil {
		return nil, err
	}
	if err := cutOff(ctx, startTimeout,
		func(ctx context.Context) error { return e.opts.Holder.Starting(ctx, e.resource, devices) }); err != nil {
		utilruntime.HandleErrorWithContext(ctx, err, "Container does not start before its devices are ready", "resource", e.resource)
		return nil, status.Error(codes.FailedPrecondition, err.Error())
	}
	return &pluginapi.PreStartContainerResponse{}, nil
}

// devices are those with the IDs, each once and in the order of the inventory, so that the same IDs in another order get the same
// answer. The error names an ID that there is not. A device that is not healthy is one all the same: it may have been given before.
func (e *endpoint) devices(ids []string) ([]Device, error) {
	resource, _ := e.find()
	// Before anything is looked for: the kubelet repeats none.
	if len(ids) == 0 || len(ids) > len(resource.Devices) {
		return nil, status.Errorf(codes.InvalidArgument, "%d devices of %s, of which there are %d", len(ids), e.resource, len(resource.Devices))
	}
	for _, id := range ids {
		if !slices.ContainsFunc(resource.Devices, func(d Device) bool { return d.ID == id }) {
			return nil, status.Errorf(codes.NotFound, "this node has no device %q of %s", id, e.resource)
		}
	}
	var devices []Device
	for _, device := range resource.Devices {
		if slices.Contains(ids, device.ID) {
			devices = append(devices, device)
		}
	}
	return devices, nil
}

// register tells the kubelet of the endpoint. The kubelet connects before it answers.
func (e *endpoint) register(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	conn, err := dial(e.opts.kubeletSocket())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, conn.Close()) }()
	_, err = pluginapi.NewRegistrationClient(conn).Register(ctx, &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: filepath.Base(e.socket), ResourceName: e.resource, Options: options,
	})
	return err
}
