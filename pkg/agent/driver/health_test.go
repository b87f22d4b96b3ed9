// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/stepaside"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// rig is a simulated machine, as several agents after one another see it. It is made inside of the bubble whose time it lives in.
type rig struct {
	t       *testing.T
	machine *nvmlsim.Machine
	state   string
	held    map[string]bool
	// wrap, if it is set, stands between agents and the library.
	wrap func(nvml.Library) nvml.Library
	// keeper says whether the driver may be open; it always may if it is not set.
	keeper *stepaside.Keeper
	// kubeletTakes that long to say what it runs.
	kubeletTakes time.Duration
	// pluginDevices are of device plugins, as the kubelet says.
	pluginDevices    []ledger.PluginDevice
	pluginDevicesErr error
	// podDevices are what only pods have of them, and listed counts the questions what pods have.
	podDevices []ledger.PluginDevice
	listed     atomic.Int32
	// devices, if it is set, says so at any time.
	devices func(ofPods bool) ([]ledger.PluginDevice, error)
	// sharing allows nothing if it is not set.
	sharing config.Rules
	shares  discovery.Shares
}

func newRig(t *testing.T, profile string) *rig {
	t.Helper()
	p, err := nvmlsim.LoadProfile(profile)
	if err != nil {
		t.Fatal(err)
	}
	return &rig{t: t, machine: nvmlsim.NewMachine(p, "node-1"), state: t.TempDir(), held: map[string]bool{}}
}

func (r *rig) hardware() *Hardware {
	return NewHardware(HardwareOptions{
		Open: func() (*nvml.Handle, error) {
			sim := r.machine.NVML()
			library := nvml.Adapt(sim, "sim")
			if r.wrap != nil {
				library = r.wrap(library)
			}
			return &nvml.Handle{Library: library, Raw: sim, Sysfs: sim.Sysfs(), Machine: r.machine, Simulated: true, Source: "sim"}, nil
		},
		Clock:    clock.RealClock{},
		Keeper:   r.keeper,
		StateDir: r.state,
		Held:     func(gpu string) bool { return r.held[gpu] },
	})
}

// found is hardware after its first look, which leads.
func (r *rig) found(ctx context.Context) *Hardware {
	r.t.Helper()
	h := r.hardware()
	h.Lead(ctx)
	if _, err := h.Discover(ctx); err != nil {
		r.t.Fatal(err)
	}
	return h
}

func (r *rig) do(c nvmlsim.Command) {
	r.t.Helper()
	if _, err := r.machine.Do(c); err != nil {
		r.t.Fatal(err)
	}
}

// published are the devices that would be published, each with the keys of its taints.
func published(t *testing.T, h *Hardware) []string {
	t.Helper()
	resources, ok := h.Resources("node-1")
	if !ok {
		t.Fatal("nothing is known")
	}
	var list []string
	for _, slice := range resources.Pools["node-1"].Slices {
		for _, device := range slice.Devices {
			text := device.Name
			for _, taint := range device.Taints {
				text += " " + strings.TrimPrefix(taint.Key, Name+"/") + "=" + taint.Value + ":" + string(taint.Effect)
			}
			list = append(list, text)
		}
	}
	return list
}

const first = "gpu-0000-1b-00-0"

// background runs f until the returned function is called.
func background(ctx context.Context, f func(ctx context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() { f(ctx) })
	return func() {
		cancel()
		group.Wait()
		time.Sleep(health.Deadline) // the calls into NVML that are under way
	}
}

// TestHealthIsSetAndClearedAndSentOften watches the stream that the kubelet reads while a GPU is lost and comes back. The kubelet takes a
// device's health for unknown after 30 s without a report, and forgets everything when any stream of the driver ends.
func TestHealthIsSetAndClearedAndSentOften(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		_, ctx := ktesting.NewTestContext(t)
		ctx, cancel := context.WithCancel(ctx)
		h := r.found(ctx)
		p := &plugin{hardware: h, pool: "node-1"}
		reports := make(chan kubeletplugin.DeviceHealthReport)
		served := make(chan error)
		go func() { served <- p.WatchHealthStatus(ctx, reports) }()
		synctest.Wait()
		select {
		case report := <-reports:
			t.Errorf("a report before any GPU was asked: %v", report.Devices[0])
		default:
		}
		stop := background(ctx, h.Watch)

		// next returns the first GPU's health in the first report that has the wanted one.
		next := func(want kubeletplugin.HealthStatus) kubeletplugin.DeviceHealth {
			t.Helper()
			for range 200 {
				start := time.Now()
				report := <-reports
				if gap := time.Since(start); gap > reportInterval {
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
		if report := <-reports; report.Devices[0].Health != kubeletplugin.HealthStatusHealthy {
			t.Errorf("the first report: %v", report.Devices[0])
		}
		if got := next(kubeletplugin.HealthStatusHealthy); got.DeviceName != first || got.PoolName != "node-1" {
			t.Errorf("health of %+v", got)
		}
		r.do(&nvmlsim.LoseGPU{GPU: "0"})
		if got := next(kubeletplugin.HealthStatusUnhealthy); !strings.Contains(got.Message, "fallen off") {
			t.Errorf("message %q", got.Message)
		}
		if _, err := h.Find(ctx, first); !errors.Is(err, nvml.ErrGPULost) {
			t.Errorf("a lost GPU for prepare: %v", err)
		}
		if got, want := published(t, h)[0], first+" gpu-lost=:NoExecute"; got != want {
			t.Errorf("published %q, want %q", got, want)
		}
		r.do(&nvmlsim.RestoreGPU{GPU: "0"})
		next(kubeletplugin.HealthStatusHealthy)
		if got := published(t, h)[0]; got != first {
			t.Errorf("published %q after it is well again", got)
		}
		r.do(&nvmlsim.RaiseXID{GPU: "0", Code: 74})
		next(kubeletplugin.HealthStatusUnhealthy)
		if got, want := published(t, h)[0], first+" xid=74:NoSchedule"; got != want {
			t.Errorf("published %q, want %q", got, want)
		}
		if _, err := h.Find(ctx, first); err != nil {
			t.Errorf("a GPU with a taint that a claim may tolerate, for prepare: %v", err)
		}
		r.do(&nvmlsim.RemapRows{GPU: "1", Rows: nvmlsim.Rows{Pending: true}})
		time.Sleep(time.Minute)
		if got, want := published(t, h)[1], "gpu-0000-43-00-0 row-remap-pending=:None"; got != want {
			t.Errorf("published %q, want %q", got, want)
		}

		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
		stop()
	})
}

// TestALostGPUStaysPublished: with the device its taint would go, and nobody would move its pods.
func TestALostGPUStaysPublished(t *testing.T) {
	tests := map[string]struct {
		happens nvmlsim.Command
		held    bool
		want    string // of the first GPU, empty if it is not published
	}{
		"lost":                       {happens: &nvmlsim.LoseGPU{GPU: "0"}, want: first + " gpu-lost=:NoExecute"},
		"taken out, nobody holds it": {happens: &nvmlsim.RemoveGPU{GPU: "0"}},
		"taken out of a pod's hands": {happens: &nvmlsim.RemoveGPU{GPU: "0"}, held: true, want: first + " gpu-lost=:NoExecute"},
		"hung":                       {happens: &nvmlsim.HangGPU{GPU: "0"}, want: first + " hung=:NoSchedule"},
	}
	for name, tc := range tests {
		for _, restart := range []bool{false, true} {
			t.Run(map[bool]string{false: name, true: name + ", and then the agent starts"}[restart], func(t *testing.T) {
				want := strings.Replace(tc.want, first, "gpu-0000-00-1b-0", 1)
				synctest.Test(t, func(t *testing.T) {
					r := newRig(t, "t4")
					r.held["gpu-0000-00-1b-0"] = tc.held
					_, ctx := ktesting.NewTestContext(t)
					h := r.found(ctx)
					before := published(t, h)
					stop := background(ctx, h.Watch)
					r.do(tc.happens)
					if restart {
						stop()
						h = r.found(ctx)
						stop = background(ctx, h.Watch)
					}
					time.Sleep(time.Minute)
					if _, err := h.Discover(ctx); err != nil {
						t.Fatal(err)
					}
					time.Sleep(time.Minute)
					after := published(t, h)
					if want == "" {
						if diff := cmp.Diff(before[1:], after); diff != "" {
							t.Errorf("published (-want +got):\n%s", diff)
						}
					} else if diff := cmp.Diff(append([]string{want}, before[1:]...), after); diff != "" {
						t.Errorf("published (-want +got):\n%s", diff)
					}
					r.do(&nvmlsim.Reboot{}) // lets calls return that hang
					stop()
				})
			})
		}
	}
}

func TestGPUsThatComeArePublished(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "t4")
		_, ctx := ktesting.NewTestContext(t)
		r.do(&nvmlsim.RemoveGPU{GPU: "3"})
		h := r.found(ctx)
		stop := background(ctx, h.Watch)
		if got := len(published(t, h)); got != 3 {
			t.Errorf("%d GPUs are published, want 3", got)
		}
		synctest.Wait()
		r.do(&nvmlsim.RaiseXID{GPU: "0", Code: 119})
		synctest.Wait()
		r.do(&nvmlsim.AddGPU{GPU: "3"})
		if _, err := h.Discover(ctx); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		got := published(t, h)
		if len(got) != 4 || !strings.HasSuffix(got[0], "xid=119:NoSchedule") {
			t.Errorf("published %q, want 4, with the XID of the first still known: the driver was not loaded anew", got)
		}
		stop()
	})
}

func TestTheDriverGoesAndComes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "t4")
		_, ctx := ktesting.NewTestContext(t)
		h := r.found(ctx)
		stop := background(ctx, h.Watch)
		device := published(t, h)[0]
		synctest.Wait()
		r.do(&nvmlsim.RaiseXID{GPU: "0", Code: 119})
		synctest.Wait()
		r.do(&nvmlsim.UnloadDriver{})
		time.Sleep(15 * time.Second)
		select {
		case <-h.again:
		default:
			t.Error("nobody asks for another look")
		}
		for range 5 {
			if _, err := h.Discover(ctx); !errors.Is(err, nvml.ErrDriverNotLoaded) {
				t.Errorf("a look without a driver: %v", err)
			}
			if _, err := h.Find(ctx, device); !errors.Is(err, nvml.ErrDriverNotLoaded) {
				t.Errorf("a GPU for prepare: %v, want the reason", err)
			}
			time.Sleep(10 * time.Second)
		}
		if got := published(t, h)[1]; !strings.HasSuffix(got, " no-driver=:NoSchedule") {
			t.Errorf("published %q without a driver", got)
		}
		r.do(&nvmlsim.LoadDriver{})
		if _, err := h.Discover(ctx); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if got := published(t, h); got[0] != device || strings.Contains(strings.Join(got, ""), "no-driver") {
			t.Errorf("published %q with the driver loaded anew", got)
		}
		if _, err := h.Find(ctx, device); err != nil {
			t.Errorf("a GPU for prepare: %v", err)
		}
		stop()
	})
}

// TestAHungGPUBlocksNothingElse: a call into NVML cannot be cancelled.
func TestAHungGPUBlocksNothingElse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, "dgx-h100")
		_, ctx := ktesting.NewTestContext(t)
		h := r.found(ctx)
		gpus := h.inventory.node.GPUs
		r.do(&nvmlsim.HangGPU{GPU: "0"})
		start := time.Now()
		for range 3 {
			if _, err := h.Find(ctx, gpus[0].Name); err == nil {
				t.Error("a hung GPU is fine for prepare")
			}
		}
		if took := time.Since(start); took > 10*time.Second {
			t.Errorf("three calls for a hung GPU took %s, want the time of one", took)
		}
		start = time.Now()
		if _, err := h.Find(ctx, gpus[1].Name); err != nil || time.Since(start) > 0 {
			t.Errorf("another GPU: %v after %s", err, time.Since(start))
		}
		// An agent that starts now finds the others.
		start = time.Now()
		fresh := r.hardware()
		node, err := fresh.Discover(ctx)
		if err != nil || len(node.Failures) != 1 || len(node.GPUs) != 8 || time.Since(start) > 15*time.Second {
			t.Errorf("a first look: %v after %s", err, time.Since(start))
		}
		// It does not hold another thread for each look.
		start = time.Now()
		if _, err := fresh.Discover(ctx); err != nil || time.Since(start) > 0 {
			t.Errorf("a second look: %v after %s, want it at once", err, time.Since(start))
		}
		r.do(&nvmlsim.UnhangGPU{GPU: "0"})
		synctest.Wait()
		if _, err := h.Find(ctx, gpus[0].Name); err != nil {
			t.Errorf("after the call came back: %v", err)
		}
		if node, err := fresh.Discover(ctx); err != nil || len(node.Failures) != 0 {
			t.Errorf("a look after the call came back: %v, %v", node.Failures, err)
		}
	})
}

func TestRememberedGPUsOfAnotherKindAreSaidAndNotUsed(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	for name, content := range map[string]string{"truncated": `{"version": 1, "gpus": [{"na`, "newer": `{"version": 2, "gpus": []}`, "empty": ""} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, "t4")
			writeFile(t, filepath.Join(r.state, "gpus.json"), content)
			if got := len(published(t, r.found(ctx))); got != 4 {
				t.Errorf("%d GPUs are published, want 4", got)
			}
			if known := r.hardware().memory.load(ctx).GPUs; len(known) != 4 {
				t.Errorf("%d GPUs are remembered afterwards, want 4", len(known))
			}
		})
	}
}

func writeFile(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
