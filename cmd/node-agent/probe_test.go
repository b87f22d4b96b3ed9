// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// fakeAgent is a plugin with its registrar on one socket.
type fakeAgent struct {
	registration.UnimplementedRegistrationServer
	healthv1.UnimplementedDRAResourceHealthServer
	kind     string
	endpoint string
}

func (f *fakeAgent) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: f.kind, Name: "gpu.nvidia.com", Endpoint: f.endpoint,
		SupportedVersions: []string{"v1.DRAPlugin", "v1.DRAResourceHealth"},
	}, nil
}

func (f *fakeAgent) NodeWatchResources(_ *healthv1.NodeWatchResourcesRequest, stream healthv1.DRAResourceHealth_NodeWatchResourcesServer) error {
	return stream.Send(&healthv1.NodeWatchResourcesResponse{Devices: []*healthv1.DeviceHealth{
		{Device: &healthv1.DeviceIdentifier{PoolName: "n", DeviceName: "gpu-1"}, Health: healthv1.HealthStatus_UNHEALTHY, Message: "hot"},
		{Device: &healthv1.DeviceIdentifier{PoolName: "n", DeviceName: "gpu-0"}, Health: healthv1.HealthStatus_HEALTHY},
	}})
}

func TestProbeShowsWhatAKubeletSees(t *testing.T) {
	root, err := os.MkdirTemp("", "probe")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(root)
	registry := filepath.Join(root, "plugins_registry")
	if err := os.Mkdir(registry, 0o700); err != nil {
		t.Fatal(err)
	}
	run := func() (string, error) {
		cmd := newCommand()
		var out bytes.Buffer
		cmd.SetOut(&out)
		cmd.SetArgs([]string{"probe", "--kubelet-root-dir=" + root})
		err := cmd.ExecuteContext(t.Context())
		return out.String(), err
	}
	if _, err := run(); err == nil || !strings.Contains(err.Error(), registry) {
		t.Errorf("without an agent: %v, want an error that names the folder", err)
	}

	socket := filepath.Join(registry, "gpu.nvidia.com-reg.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	agent := &fakeAgent{kind: registration.DRAPlugin, endpoint: socket}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, agent)
	healthv1.RegisterDRAResourceHealthServer(server, agent)
	done := make(chan error)
	go func() { done <- server.Serve(listener) }()
	defer func() {
		server.Stop()
		<-done
	}()
	out, err := run()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"endpoint   " + socket, "spoken     v1.DRAPlugin, v1.DRAResourceHealth", "gpu-0   Healthy    \ngpu-1   Unhealthy  hot\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("it prints\n%s\nwithout %q", out, want)
		}
	}

	agent.kind = registration.DevicePlugin
	if _, err := run(); err == nil || !strings.Contains(err.Error(), `type "DevicePlugin"`) {
		t.Errorf("a plugin of another kind: %v", err)
	}
}
