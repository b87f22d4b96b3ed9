// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hollow

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

const driverName = "gpu.example.com"

// fakePlugin is a DRA driver: real sockets and protocol, by way of kubeletplugin, and simple decisions.
type fakePlugin struct {
	root, cdiRoot string

	mu       sync.Mutex
	failure  error // of Prepare and Unprepare
	noCDI    bool  // return CDI devices without defining them
	prepared map[types.UID]bool
	calls    []string
}

var _ kubeletplugin.DRAPlugin = &fakePlugin{}

// start runs the plugin until stop is called.
func (f *fakePlugin) start(t *testing.T, client kubernetes.Interface) (stop func()) {
	t.Helper()
	data := filepath.Join(f.root, "plugins", driverName)
	if err := os.MkdirAll(data, 0o755); err != nil {
		t.Fatal(err)
	}
	helper, err := kubeletplugin.Start(t.Context(), f,
		kubeletplugin.DriverName(driverName),
		kubeletplugin.KubeClient(client),
		kubeletplugin.NodeName("node"),
		kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.RegistrarDirectoryPath(registryFolder(f.root)),
	)
	if err != nil {
		t.Fatal(err)
	}
	return helper.Stop
}

func (f *fakePlugin) PrepareResourceClaims(_ context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		f.calls = append(f.calls, "prepare "+claim.Name)
		results[claim.UID] = f.prepare(claim)
	}
	return results, nil
}

func (f *fakePlugin) prepare(claim *resourceapi.ResourceClaim) kubeletplugin.PrepareResult {
	if f.failure != nil {
		return kubeletplugin.PrepareResult{Err: f.failure}
	}
	var result kubeletplugin.PrepareResult
	spec := &cdispecs.Spec{Version: "0.6.0", Kind: "example.com/gpu"}
	for i, device := range claim.Status.Allocation.Devices.Results {
		name := string(claim.UID) + "-" + device.Device
		spec.Devices = append(spec.Devices, cdispecs.Device{Name: name, ContainerEdits: cdispecs.ContainerEdits{
			Env:         []string{fmt.Sprintf("GPU_%s=%s", device.Request, device.Device)},
			DeviceNodes: []*cdispecs.DeviceNode{{Path: "/dev/" + device.Device, Type: "c", Major: 240, Minor: int64(i)}},
		}})
		result.Devices = append(result.Devices, kubeletplugin.Device{
			Requests: []string{device.Request}, PoolName: device.Pool, DeviceName: device.Device,
			CDIDeviceIDs: []string{"example.com/gpu=" + name},
		})
	}
	if !f.noCDI {
		cache, err := cdi.NewCache(cdi.WithSpecDirs(f.cdiRoot), cdi.WithAutoRefresh(false))
		if err == nil {
			err = cache.WriteSpec(spec, string(claim.UID))
		}
		if err != nil {
			return kubeletplugin.PrepareResult{Err: err}
		}
	}
	f.prepared[claim.UID] = true
	return result
}

func (f *fakePlugin) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	results := map[types.UID]error{}
	for _, claim := range claims {
		f.calls = append(f.calls, "unprepare "+claim.Name)
		if results[claim.UID] = f.failure; f.failure == nil {
			delete(f.prepared, claim.UID)
		}
	}
	return results, nil
}

func (f *fakePlugin) HandleError(context.Context, error, string) {}

func (f *fakePlugin) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return nil
}

func (f *fakePlugin) setFailure(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failure = err
}

func (f *fakePlugin) called() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string{}, f.calls...)
}

var errBroken = errors.New("the GPU is broken")

// eventually tries until there is no error.
func eventually(t *testing.T, try func() error) {
	t.Helper()
	deadline := time.Now().Add(2 * time.Minute)
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
