package driver

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// flaky is NVML with faults per GPU.
type flaky struct {
	nvml.Library
	ask func(uuid string) error
}

func (f *flaky) DeviceByUUID(uuid string) (nvml.Device, error) {
	if err := f.ask(uuid); err != nil {
		return nil, err
	}
	return f.Library.DeviceByUUID(uuid)
}

// flakyHardware returns eight discovered GPUs whose answers go through ask.
func flakyHardware(t *testing.T, ctx context.Context, ask func(uuid string) error) *Hardware {
	t.Helper()
	h := NewHardware(func() (*nvml.Handle, error) {
		handle, err := nvml.Open("sim:dgx-h100", nvml.OpenOptions{NodeName: "node-1", ProcRoot: t.TempDir()})
		if err == nil {
			handle.Library = &flaky{Library: handle.Library, ask: ask}
		}
		return handle, err
	}, clock.RealClock{})
	if _, err := h.Discover(ctx); err != nil {
		t.Fatal(err)
	}
	return h
}

const first = "gpu-0000-1b-00-0"

// TestHealthIsSetAndClearedAndSentOften watches the stream that the kubelet reads while a GPU is lost and comes
// back. The kubelet takes a device's health for unknown after 30 s without a report.
func TestHealthIsSetAndClearedAndSentOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		ctx, cancel := context.WithCancel(ctx)
		var lost atomic.Value // string
		h := flakyHardware(t, ctx, func(uuid string) error {
			if uuid == lost.Load() {
				return nvml.ErrGPULost
			}
			return nil
		})
		uuid := h.offered()[0].UUID
		p := &plugin{hardware: h, pool: "node-1"}
		reports := make(chan kubeletplugin.DeviceHealthReport)
		watched, served := make(chan struct{}), make(chan error)
		go func() { h.watch(ctx); close(watched) }()
		go func() { served <- p.WatchHealthStatus(ctx, reports) }()

		// next returns the first GPU's health in the first report that has the wanted one.
		next := func(want kubeletplugin.HealthStatus) kubeletplugin.DeviceHealth {
			t.Helper()
			for range 20 {
				start := time.Now()
				report := <-reports
				if gap := time.Since(start); gap > 15*time.Second {
					t.Errorf("%s without a report", gap)
				}
				if len(report.Devices) != 8 {
					t.Fatalf("report about %d devices", len(report.Devices))
				}
				if report.Devices[0].Health == want {
					return report.Devices[0]
				}
			}
			t.Fatalf("no report says %s", want)
			return kubeletplugin.DeviceHealth{}
		}
		if got := next(kubeletplugin.HealthStatusHealthy); got.DeviceName != first || got.PoolName != "node-1" {
			t.Errorf("health of %+v", got)
		}
		lost.Store(uuid)
		if got := next(kubeletplugin.HealthStatusUnhealthy); got.Message == "" {
			t.Error("no message")
		}
		if _, err := h.GPU(ctx, first); !errors.Is(err, nvml.ErrGPULost) {
			t.Errorf("a lost GPU for prepare: %v", err)
		}
		lost.Store("")
		next(kubeletplugin.HealthStatusHealthy)

		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
		<-watched
	})
}

// TestAHungGPUBlocksNothingElse: a call into NVML cannot be cancelled.
func TestAHungGPUBlocksNothingElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		var hung atomic.Value // string
		var calls atomic.Int64
		release := make(chan struct{})
		h := flakyHardware(t, ctx, func(uuid string) error {
			if uuid == hung.Load() {
				calls.Add(1)
				<-release
			}
			return nil
		})
		gpus := h.offered()
		hung.Store(gpus[0].UUID)
		start := time.Now()
		for range 3 {
			if _, err := h.GPU(ctx, gpus[0].Name); err == nil {
				t.Error("a hung GPU is fine for prepare")
			}
		}
		if took := time.Since(start); took > probeTimeout {
			t.Errorf("three calls for a hung GPU took %s, want the time of one (%s)", took, probeTimeout)
		}
		start = time.Now()
		if _, err := h.GPU(ctx, gpus[1].Name); err != nil || time.Since(start) > 0 {
			t.Errorf("another GPU: %v after %s", err, time.Since(start))
		}
		devices, _ := h.health("node-1")
		if devices[0].Health != kubeletplugin.HealthStatusUnhealthy || devices[1].Health != kubeletplugin.HealthStatusHealthy {
			t.Errorf("health %v and %v", devices[0].Health, devices[1].Health)
		}
		if got := calls.Load(); got != 1 {
			t.Errorf("%d calls hang, want 1", got)
		}
		close(release)
		synctest.Wait()
		if _, err := h.GPU(ctx, gpus[0].Name); err != nil {
			t.Errorf("after the call came back: %v", err)
		}
	})
}
