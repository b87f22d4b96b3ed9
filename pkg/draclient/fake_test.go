// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package draclient

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/stats"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drav1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
)

// fakePlugin is a plugin that prepares every claim at once.
type fakePlugin struct {
	drav1.UnimplementedDRAPluginServer
	healthv1.UnimplementedDRAResourceHealthServer

	connections atomic.Int32 // open now
	accepted    atomic.Int32 // ever
	// answer, when set, replaces the answers.
	answer func(claims []*drav1.Claim) map[string]*drav1.NodePrepareResourceResponse
}

func (f *fakePlugin) NodePrepareResources(_ context.Context, r *drav1.NodePrepareResourcesRequest) (*drav1.NodePrepareResourcesResponse, error) {
	if f.answer != nil {
		return &drav1.NodePrepareResourcesResponse{Claims: f.answer(r.Claims)}, nil
	}
	answers := map[string]*drav1.NodePrepareResourceResponse{}
	for _, claim := range r.Claims {
		answers[claim.Uid] = &drav1.NodePrepareResourceResponse{Devices: []*drav1.Device{{
			RequestNames: []string{"gpu"}, PoolName: "pool", DeviceName: "gpu-0", CdiDeviceIds: []string{"vendor/class=" + claim.Uid},
		}}}
	}
	return &drav1.NodePrepareResourcesResponse{Claims: answers}, nil
}

func (f *fakePlugin) NodeUnprepareResources(_ context.Context, r *drav1.NodeUnprepareResourcesRequest) (*drav1.NodeUnprepareResourcesResponse, error) {
	answers := map[string]*drav1.NodeUnprepareResourceResponse{}
	for _, claim := range r.Claims {
		answers[claim.Uid] = &drav1.NodeUnprepareResourceResponse{}
	}
	return &drav1.NodeUnprepareResourcesResponse{Claims: answers}, nil
}

func (f *fakePlugin) NodeWatchResources(_ *healthv1.NodeWatchResourcesRequest, stream healthv1.DRAResourceHealth_NodeWatchResourcesServer) error {
	return stream.Send(&healthv1.NodeWatchResourcesResponse{Devices: []*healthv1.DeviceHealth{{
		Device: &healthv1.DeviceIdentifier{PoolName: "pool", DeviceName: "gpu-0"},
		Health: healthv1.HealthStatus_HEALTHY,
	}}})
}

// serve serves the plugin in every version at a socket until stop is called, which cuts connections off.
func (f *fakePlugin) serve(t testing.TB, socket string) (stop func()) {
	t.Helper()
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.StatsHandler(connectionCounter{f}))
	drav1.RegisterDRAPluginServer(server, f)
	drav1beta1.RegisterDRAPluginServer(server, drav1beta1.V1ServerWrapper{DRAPluginServer: f})
	healthv1.RegisterDRAResourceHealthServer(server, f)
	healthv1alpha1.RegisterDRAResourceHealthServer(server, healthv1.V1ServerWrapper{Server: f})
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		server.Stop()
		if err := <-done; err != nil {
			t.Errorf("serving the fake plugin: %v", err)
		}
	}
	t.Cleanup(stop)
	return stop
}

type connectionCounter struct{ *fakePlugin }

func (connectionCounter) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context { return ctx }
func (connectionCounter) HandleRPC(context.Context, stats.RPCStats)                       {}
func (connectionCounter) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context {
	return ctx
}

func (c connectionCounter) HandleConn(_ context.Context, s stats.ConnStats) {
	switch s.(type) {
	case *stats.ConnBegin:
		c.connections.Add(1)
		c.accepted.Add(1)
	case *stats.ConnEnd:
		c.connections.Add(-1)
	}
}

// socketPath is short: t.TempDir has the test's name in it, and a socket's path has at most 107 bytes.
func socketPath(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dra")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return filepath.Join(dir, "dra.sock")
}

func claims(uids ...string) []*drav1.Claim {
	var list []*drav1.Claim
	for _, uid := range uids {
		list = append(list, &drav1.Claim{Namespace: "default", Name: "claim-" + uid, Uid: uid})
	}
	return list
}

// prepareOne prepares one claim and says whether the answer is the fake's.
func prepareOne(ctx context.Context, c *Client) error {
	answers, err := c.Prepare(ctx, claims("uid"))
	if err != nil {
		return err
	}
	if ids := answers["uid"].GetDevices()[0].GetCdiDeviceIds(); len(ids) != 1 || ids[0] != "vendor/class=uid" {
		return fmt.Errorf("CDI devices: got %v", ids)
	}
	return nil
}

// healthOnce reads the first report of a stream of its own.
func healthOnce(ctx context.Context, c *Client) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := c.WatchHealth(ctx)
	if err != nil {
		return err
	}
	report, err := stream.Recv()
	if err == nil && report.Devices[0].Health != healthv1.HealthStatus_HEALTHY {
		err = fmt.Errorf("health: got %v", report)
	}
	return err
}

// eventually tries until there is no error.
func eventually(t *testing.T, try func() error) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := try()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
