// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package kubelettest

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// silent is a plugin whose stream does not end by itself.
type silent struct {
	pluginapi.UnimplementedDevicePluginServer
	asked func()
}

func (s silent) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	s.asked()
	return &pluginapi.DevicePluginOptions{}, nil
}

func (silent) ListAndWatch(_ *pluginapi.Empty, stream grpc.ServerStreamingServer[pluginapi.ListAndWatchResponse]) error {
	<-stream.Context().Done()
	return nil
}

// TestAKubeletThatStopsIsNotHeldByAPluginThatRegisters: a plugin that is asked what it can do as the kubelet stops is not listened to any
// more. Otherwise Stop might wait for its stream, and the test that calls it for ever.
func TestAKubeletThatStopsIsNotHeldByAPluginThatRegisters(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "kubelet") // short enough for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	k := Start(t, dir)
	listener, err := net.Listen("unix", filepath.Join(dir, "plugin.sock"))
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	pluginapi.RegisterDevicePluginServer(server, silent{asked: k.Stop})
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() { server.Stop(); <-served })

	request := &pluginapi.RegisterRequest{Version: pluginapi.Version, Endpoint: "plugin.sock", ResourceName: "example.com/gpu"}
	if _, err := k.Register(t.Context(), request); err == nil {
		t.Error("a plugin is registered with a kubelet that has stopped")
	}
	if got := k.Resources(); len(got) > 0 {
		t.Errorf("resources %v", got)
	}
}
