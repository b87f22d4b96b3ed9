// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/pluginpath"
	"stowage.dev/stowage/pkg/twopaths"
)

// writeCheckpoint is what the kubelet does when it has given devices to pods; nil takes the file away.
func (r *rig) writeCheckpoint(pods map[ledger.PluginDevice]types.UID) {
	r.t.Helper()
	dir := filepath.Join(r.state, "device-plugins")
	file := filepath.Join(dir, "kubelet_internal_checkpoint")
	if pods == nil {
		if err := os.Remove(file); err != nil {
			r.t.Fatal(err)
		}
		return
	}
	type entry struct {
		PodUID                      types.UID
		ContainerName, ResourceName string
		DeviceIDs                   map[int64][]string
	}
	entries := []entry{}
	for device, pod := range pods {
		entries = append(entries, entry{pod, "app", device.Resource, map[int64][]string{0: {device.ID}}})
	}
	data, err := json.Marshal(map[string]any{"Data": map[string]any{"PodDeviceEntries": entries, "RegisteredDevices": map[string][]string{}}})
	if err = errors.Join(err, os.MkdirAll(dir, 0o700), os.WriteFile(file, data, 0o600)); err != nil {
		r.t.Fatal(err)
	}
}

// TestOurPluginGivesNothingThatAnotherOneHas: each time the kubelet is asked anew. A pod that has its device already keeps it, also for a
// container that starts again.
func TestOurPluginGivesNothingThatAnotherOneHas(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		agent, stop := r.pluginAgent(ctx, newAPIServer(), "device-plugin", pluginpath.MIGNone)
		defer stop()
		gpus := agent.opts.Hardware.Node().GPUs
		device := func(n int) []deviceplugin.Device {
			return []deviceplugin.Device{{ID: gpus[n].UUID, UUID: gpus[n].UUID, Name: gpus[n].Name}}
		}
		allocate := func(n int) error { return agent.plugins.Allocated(ctx, pluginpath.GPUResource, device(n)) }
		start := func(n int) error { return agent.plugins.Starting(ctx, pluginpath.GPUResource, device(n)) }
		// others are the GPUs that another plugin offers as two replicas each.
		others := func(list ...int) {
			r.pluginDevices = nil
			for n := range gpus {
				r.pluginDevices = append(r.pluginDevices, ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: gpus[n].UUID}) // ours
			}
			for _, n := range list {
				for _, replica := range []string{"::0", "::1"} {
					r.pluginDevices = append(r.pluginDevices, ledger.PluginDevice{Resource: "nvidia.com/gpu.shared", ID: gpus[n].UUID + replica})
				}
			}
		}
		pods := func(list ...types.UID) {
			have := map[ledger.PluginDevice]types.UID{}
			for n, pod := range list {
				if pod != "" {
					have[ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: gpus[n].UUID}] = pod
				}
			}
			r.writeCheckpoint(have)
		}
		away := errors.New("the kubelet is away")
		type step struct {
			name    string
			prepare func()
			do      func() error
			is      error  // the error wraps it
			says    string // and says that; empty for success
		}
		refuses := func(name string, prepare func(), do func() error) step {
			return step{name, prepare, do, deviceplugin.ErrRefused, "another device plugin of this node offers the GPU of device"}
		}
		nothing := func() {}
		first := func() error { return start(0) }
		for _, step := range []step{
			{"nobody else has it", func() { others(1) }, func() error { return allocate(0) }, nil, ""},
			refuses("another plugin has the second", nothing, func() error { return allocate(1) }),
			refuses("and within the second the third", func() { others(1, 2) }, func() error { return allocate(2) }),
			{"the first pod starts", func() { pods("pod-1") }, first, nil, ""},
			{"its next container, when another plugin has come", func() { others(0, 1) }, func() error { return allocate(0) }, nil, ""},
			{"which starts", nothing, first, nil, ""},
			refuses("another pod does not", func() { pods("pod-2") }, first),
			refuses("nor does one of which it is not known which it is", func() { r.writeCheckpoint(nil) }, first),
			{"its plugin has been away for a minute", func() {
				others()
				_ = first()
				time.Sleep(61 * time.Second)
				pods("pod-2")
			}, first, nil, ""},
			{"who has the fourth is not known", func() { r.pluginDevicesErr = away }, func() error { return allocate(3) }, away, away.Error()},
			{"it does not start", func() { pods("pod-2", "", "", "pod-4") }, func() error { return start(3) }, away, away.Error()},
			{"before it is known", func() { r.pluginDevicesErr = nil }, func() error { return start(3) }, nil, ""},
		} {
			step.prepare()
			err := step.do()
			if (err == nil) != (step.says == "") || err != nil && (!errors.Is(err, step.is) || !strings.Contains(err.Error(), step.says)) {
				t.Errorf("%s: %v, want %q", step.name, err, step.says)
			}
			if errors.Is(err, deviceplugin.ErrRefused) != errors.Is(step.is, deviceplugin.ErrRefused) {
				t.Errorf("%s: %v: a pod is failed for good", step.name, err)
			}
		}
	})
}

// TestAGPUThatIsGivenAwayUnderOurNameIsTold: a claim has a GPU that waits for the device plugin API, and a plugin that has
// registered our own resource offers it. Another one, which is free, is our own. It is over when the claim has ended.
func TestAGPUThatIsGivenAwayUnderOurNameIsTold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		m := newMover(ctx, t)
		defer func() { m.stop() }()
		if err := m.prepare("train", t4First); err != nil {
			t.Fatal(err)
		}
		m.annotate(t4First + "=device-plugin," + t4Second + "=device-plugin")
		m.step()
		m.agent.reporter.recorder = record.NewFakeRecorder(100)
		look := func(list ...string) (events []string) {
			t.Helper()
			m.r.pluginDevices = nil
			for _, gpu := range list {
				m.r.pluginDevices = append(m.r.pluginDevices, ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: m.uuid(gpu)})
			}
			time.Sleep(2 * time.Second)
			m.agent.lookForForeign(ctx)
			m.step()
			for recorder := m.agent.reporter.recorder.(*record.FakeRecorder); len(recorder.Events) > 0; {
				if event := <-recorder.Events; strings.Contains(event, reasonOfDevicePlugin) {
					events = append(events, event)
				}
			}
			return events
		}
		told := func(when string, want int) {
			t.Helper()
			for gpu, want := range map[string]int{t4First: want, t4Second: 0} {
				n, err := testutil.GetGaugeMetricValue(gpusOfDevicePlugins.WithLabelValues(gpu, pluginpath.GPUResource))
				if err != nil || int(n) != want {
					t.Errorf("%s: the metric of %s is %v, %v; want %d", when, gpu, n, err, want)
				}
			}
			tainted := false
			for _, slice := range m.agent.publisher.wanted().Pools["node-1"].Slices {
				for i := range slice.Devices {
					if twopaths.IsTainted(Name, &slice.Devices[i]) {
						tainted = true
						if slice.Devices[i].Name != t4First {
							t.Errorf("%s: %s is another plugin's", when, slice.Devices[i].Name)
						}
					}
				}
			}
			if tainted != (want == 1) {
				t.Errorf("%s: tainted %t, want %t: the scheduler sends pods there", when, tainted, want == 1)
			}
		}
		if events := look(t4Second); len(events) > 0 {
			t.Errorf("events about our own devices: %q", events)
		}
		told("ours alone", 0)
		if events := look(t4First, t4Second); len(events) != 1 || !strings.Contains(events[0], t4First) {
			t.Errorf("events %q, want one about %s", events, t4First)
		}
		told("another plugin", 1)
		if err := m.allocate(t4First); !errors.Is(err, deviceplugin.ErrRefused) {
			t.Errorf("it is given to a third one: %v", err)
		}
		if err := m.agent.claims.Unprepare(ctx, "train-uid"); err != nil {
			t.Fatal(err)
		}
		look(t4First, t4Second)
		told("the claim has ended", 0)
	})
}
