// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	registerapi "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	cdispecs "tags.cncf.io/container-device-interface/specs-go"
)

// driverName is that of the DRA driver. It differs from that of real ones, and from the device plugin's domain.
const driverName = "contract.example.com"

var errBroken = errors.New("the device is broken")

// driver is a DRA driver: real sockets and protocol, by way of kubeletplugin, and simple decisions. Each device sets a variable.
type driver struct {
	cdiRoot string

	mu      sync.Mutex
	failure error // of what is prepared
	calls   []string
}

var _ kubeletplugin.DRAPlugin = &driver{}

// start runs the driver until stop is called, and waits until the kubelet has registered it.
func (d *driver) start(t *testing.T, k *Kubelet) (stop func()) {
	t.Helper()
	data := filepath.Join(k.Root, "plugins", driverName)
	if err := os.MkdirAll(data, 0o755); err != nil {
		t.Fatal(err)
	}
	registered := make(chan struct{})
	tell := sync.OnceFunc(func() { close(registered) })
	told := func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
		if status, is := request.(*registerapi.RegistrationStatus); is && status.GetPluginRegistered() {
			defer tell()
		}
		return handle(ctx, request)
	}
	helper, err := kubeletplugin.Start(t.Context(), d, kubeletplugin.GRPCInterceptor(told),
		kubeletplugin.DriverName(driverName), kubeletplugin.KubeClient(k.Client), kubeletplugin.NodeName(k.Node),
		kubeletplugin.PluginDataDirectoryPath(data), kubeletplugin.RegistrarDirectoryPath(filepath.Join(k.Root, "plugins_registry")),
	)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-registered:
	case <-time.After(patience):
		helper.Stop()
		t.Fatal("the DRA driver is not registered")
	}
	return sync.OnceFunc(helper.Stop)
}

// PrepareResourceClaims implements kubeletplugin.DRAPlugin.
func (d *driver) PrepareResourceClaims(
	_ context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		d.calls = append(d.calls, "prepare "+claim.Name)
		results[claim.UID] = d.prepare(claim)
	}
	return results, nil
}

func (d *driver) prepare(claim *resourceapi.ResourceClaim) (result kubeletplugin.PrepareResult) {
	if d.failure != nil {
		return kubeletplugin.PrepareResult{Err: d.failure}
	}
	spec := &cdispecs.Spec{Version: "0.6.0", Kind: "contract.example.com/device"}
	for _, device := range claim.Status.Allocation.Devices.Results {
		name := string(claim.UID) + "-" + device.Device
		spec.Devices = append(spec.Devices, cdispecs.Device{Name: name, ContainerEdits: cdispecs.ContainerEdits{
			Env: []string{fmt.Sprintf("STOWAGE_%s=%s", device.Request, device.Device)},
		}})
		result.Devices = append(result.Devices, kubeletplugin.Device{
			Requests: []string{device.Request}, PoolName: device.Pool, DeviceName: device.Device, CDIDeviceIDs: []string{spec.Kind + "=" + name},
		})
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(d.cdiRoot), cdi.WithAutoRefresh(false))
	if err == nil {
		err = cache.WriteSpec(spec, string(claim.UID))
	}
	if err != nil {
		return kubeletplugin.PrepareResult{Err: err}
	}
	return result
}

// UnprepareResourceClaims implements kubeletplugin.DRAPlugin.
func (d *driver) UnprepareResourceClaims(_ context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	results := map[types.UID]error{}
	for _, claim := range claims {
		d.calls = append(d.calls, "unprepare "+claim.Name)
		results[claim.UID] = nil
	}
	return results, nil
}

// HandleError implements kubeletplugin.DRAPlugin.
func (*driver) HandleError(context.Context, error, string) {}

// WatchHealthStatus implements kubeletplugin.DRAPlugin.
func (*driver) WatchHealthStatus(context.Context, chan<- kubeletplugin.DeviceHealthReport) error {
	return nil
}

func (d *driver) fail(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.failure = err
}

// called are the calls for the claim, in order.
func (d *driver) called(claim string) (calls []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, call := range d.calls {
		if call == "prepare "+claim || call == "unprepare "+claim {
			calls = append(calls, call)
		}
	}
	return calls
}
