// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/klog/v2/ktesting"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// hung is on a disk that does not answer, whatever a context says.
type hung struct{ ends chan struct{} }

func (h *hung) Allocated(context.Context, string, []Device) error { <-h.ends; return nil }
func (h *hung) Starting(context.Context, string, []Device) error  { <-h.ends; return nil }

func (h *hung) Resources() ([]Resource, <-chan struct{}) {
	return []Resource{{Name: "nvidia.com/gpu", Devices: []Device{{ID: "GPU-1", CDIName: "k8s.gpu.nvidia.com/claim=1"}, {ID: "GPU-2", CDIName: "k8s.gpu.nvidia.com/claim=2"}}}}, nil
}

// TestADiskThatHangsHoldsUpNoOtherPod: the kubelet waits for Allocate without an end, and admits nobody meanwhile. The container does not start
// before PreStartContainer has found the disk to answer.
func TestADiskThatHangsHoldsUpNoOtherPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		h := &hung{ends: make(chan struct{})}
		e := &endpoint{resource: "nvidia.com/gpu", opts: &Options{Inventory: h, Holder: h, Strategies: []Strategy{CDIByCRI}}}
		for _, id := range []string{"GPU-1", "GPU-2"} {
			begun := time.Now()
			response, err := e.Allocate(ctx, &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: []string{id}}}})
			if took := time.Since(begun); took != allocateTimeout || err != nil || len(response.GetContainerResponses()[0].GetCdiDevices()) != 1 {
				t.Errorf("%s: %v, %v after %s; want a device after %s", id, response, err, took, allocateTimeout)
			}
		}
		start := func() error {
			_, err := e.PreStartContainer(ctx, &pluginapi.PreStartContainerRequest{DevicesIds: []string{"GPU-1"}})
			return err
		}
		if err := start(); err == nil || !strings.Contains(err.Error(), "not done after 28s") {
			t.Errorf("a container starts on a disk that hangs: %v", err)
		}
		close(h.ends)
		if err := start(); err != nil {
			t.Errorf("when the disk answers: %v", err)
		}
	})
}

// A plugin that cannot register makes a socket for each try, and removes it. Were it told of that, it would try again at once, and for ever.
func TestAPluginThatCannotRegisterIsNotToldOfItsOwnSockets(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	ctx, cancel := context.WithCancel(ctx)
	s := New(Options{Dir: t.TempDir()})
	first, second := s.toldOfEvents(), s.toldOfEvents()
	done := make(chan struct{})
	go func() { defer close(done); s.watch(ctx) }()
	defer func() { cancel(); <-done }()
	await := func(what string, c <-chan struct{}) {
		t.Helper()
		select {
		case <-c:
		case <-time.After(time.Minute):
			t.Fatalf("not told within a minute: %s", what)
		}
	}
	// Until the folder is watched, an event may be missed.
	for n, told := 0, false; !told; n++ {
		if err := os.WriteFile(filepath.Join(s.opts.Dir, "stowage-gpu-1.sock"), make([]byte, n), 0o600); err != nil {
			t.Fatal(err)
		}
		select {
		case <-first.any:
			told = true
		case <-time.After(time.Millisecond):
		}
	}
	await("the second plugin, of the first one's socket", second.any)
	for _, e := range []events{first, second} {
		select {
		case <-e.kubelet:
			t.Error("told of the kubelet, and it was a plugin's socket")
		default:
		}
	}
	if err := os.WriteFile(filepath.Join(s.opts.Dir, "kubelet.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	await("the first plugin, of the kubelet's socket", first.kubelet)
	await("the second plugin, of the kubelet's socket", second.kubelet)
}
