// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/hold"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/pluginpath"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// TestTheKubeletIsNotAskedWhatPodsHaveWhileItGives: while it gives one, that question makes it forget the device, which the next pod gets,
// too. It is asked when the container starts.
func TestTheKubeletIsNotAskedWhatPodsHaveWhileItGives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		agent, stop := r.pluginAgent(ctx, newAPIServer(), "device-plugin", pluginpath.MIGNone)
		defer stop()
		of := func(n int) (devices []deviceplugin.Device, of ledger.PluginDevice) {
			gpu := agent.opts.Hardware.Node().GPUs[n]
			device := deviceplugin.Device{ID: gpu.UUID, UUID: gpu.UUID, Name: gpu.Name}
			return []deviceplugin.Device{device}, ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: gpu.UUID}
		}
		have := map[ledger.PluginDevice]types.UID{}
		for n, pod := range []types.UID{"pod-1", "pod-2"} {
			devices, device := of(n)
			have[device] = pod
			// A pod has the GPU, by a plugin that does not offer it any more.
			r.podDevices = []ledger.PluginDevice{{Resource: "nvidia.com/gpu.shared", ID: devices[0].ID + "::0"}}
			time.Sleep(time.Minute)
			asked := r.listed.Load()
			if err := agent.plugins.Allocated(ctx, pluginpath.GPUResource, devices); err != nil || r.listed.Load() != asked {
				t.Errorf("%s: %v; the kubelet was asked %d times what pods have", device, err, r.listed.Load()-asked)
			}
			r.writeCheckpoint(have)
			if err := agent.plugins.Starting(ctx, pluginpath.GPUResource, devices); !errors.Is(err, deviceplugin.ErrRefused) || r.listed.Load() == asked {
				t.Errorf("%s starts: %v, want that another plugin's pod has it", device, err)
			}
		}
		// What the kubelet has said of pods before counts.
		devices, device := of(2)
		r.podDevices = []ledger.PluginDevice{{Resource: "nvidia.com/gpu.shared", ID: devices[0].ID + "::0"}}
		time.Sleep(time.Minute)
		if _, _, err := agent.plugins.OfOthers(ctx); err != nil {
			t.Fatal(err)
		}
		asked := r.listed.Load()
		if err := agent.plugins.Allocated(ctx, pluginpath.GPUResource, devices); !errors.Is(err, deviceplugin.ErrRefused) || r.listed.Load() != asked {
			t.Errorf("%s: %v, want that another plugin's pod has it; the kubelet was asked %d times what pods have", device, err, r.listed.Load()-asked)
		}
	})
}

// TestADeviceThatTheKubeletGivesToTwoPods: no container starts with it before one of them is gone. Another device is as ever.
func TestADeviceThatTheKubeletGivesToTwoPods(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		pod := func(name string) *corev1.Pod {
			return &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name + "-uid")}, Spec: corev1.PodSpec{NodeName: "node-1"},
			}
		}
		api := newAPIServer(pod("first"), pod("second"), pod("third"))
		agent, stop := r.pluginAgent(ctx, api, "device-plugin", pluginpath.MIGNone)
		defer stop()
		gpus := agent.opts.Hardware.Node().GPUs
		start := func(n int) error {
			return agent.plugins.Starting(ctx, pluginpath.GPUResource, []deviceplugin.Device{{ID: gpus[n].UUID, UUID: gpus[n].UUID, Name: gpus[n].Name}})
		}
		entry := func(pod string, n int) string {
			return `{"PodUID":"` + pod + `-uid","ContainerName":"app","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":["` + gpus[n].UUID + `"]}}`
		}
		given := func(entries ...string) {
			r.writeCheckpoint(map[ledger.PluginDevice]types.UID{}) // makes the folder
			writeFile(t, r.state+"/device-plugins/kubelet_internal_checkpoint",
				`{"Data":{"PodDeviceEntries":[`+strings.Join(entries, ",")+`],"RegisteredDevices":{}}}`)
		}
		given(entry("first", 0), entry("first", 0), entry("third", 1)) // in two containers
		if err := errors.Join(start(0), start(1)); err != nil {
			t.Fatal(err)
		}
		given(entry("first", 0), entry("second", 0), entry("third", 1))
		if err := start(0); err == nil || !strings.Contains(err.Error(), "the pods first-uid and second-uid") {
			t.Errorf("two pods have it: %v", err)
		}
		if err := start(1); err != nil {
			t.Errorf("one pod has the other: %v", err)
		}
		if err := api.CoreV1().Pods("default").Delete(ctx, "first", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		if err := start(0); err != nil {
			t.Errorf("one is gone, which the kubelet remembers until it gives devices again: %v", err)
		}
	})
}

// TestPodsThatHaveJustComeHaveTheDeviceToo: which pods there are is kept for a while, and none of that while is taken for one that has
// ended. What the pod before has left is cleared although the kubelet still remembers that pod.
func TestPodsThatHaveJustComeHaveTheDeviceToo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		api := newAPIServer()
		agent, stop := r.pluginAgent(ctx, api, "device-plugin", pluginpath.MIGNone)
		defer stop()
		gpu := agent.opts.Hardware.Node().GPUs[0]
		of := ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: gpu.UUID}
		start := func() error {
			return agent.plugins.Starting(ctx, of.Resource, []deviceplugin.Device{{ID: gpu.UUID, UUID: gpu.UUID, Name: gpu.Name}})
		}
		pods := func() []types.UID {
			record, err := r.records().Get(hold.UID(of))
			if err != nil || record == nil {
				t.Fatalf("%v, %v", record, err)
			}
			return record.Entry.Pods
		}
		given := func(names ...string) {
			var entries []string
			for _, name := range names {
				entries = append(entries, `{"PodUID":"`+name+`-uid","ContainerName":"app","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":["`+gpu.UUID+`"]}}`)
				pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name + "-uid")}}
				pod.Spec.NodeName = "node-1"
				_ = api.Tracker().Add(pod) // it may be there
			}
			r.writeCheckpoint(map[ledger.PluginDevice]types.UID{}) // makes the folder
			writeFile(t, r.state+"/device-plugins/kubelet_internal_checkpoint",
				`{"Data":{"PodDeviceEntries":[`+strings.Join(entries, ",")+`],"RegisteredDevices":{}}}`)
		}
		known := func() {
			record, err := r.records().Get(hold.UID(of))
			if err == nil {
				_, err = agent.plugins.Claim(ctx, record.Entry.Claim.Name)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		given("first")
		if err := start(); err != nil {
			t.Fatal(err)
		}
		known()
		given("first", "second")
		if err := start(); err == nil || !strings.Contains(err.Error(), "the pods first-uid and second-uid") {
			t.Errorf("the second has come since: %v", err)
		}
		if err := api.CoreV1().Pods("default").Delete(ctx, "first", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := start(); err != nil || !slices.Equal(pods(), []types.UID{"second-uid"}) {
			t.Errorf("the first is gone: %v; recorded for %v", err, pods())
		}
		if err := api.CoreV1().Pods("default").Delete(ctx, "second", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := start(); err == nil {
			t.Error("neither is known, and one starts")
		}
	})
}

// TestMIGDevicesOfTwoProfilesAreOurs: pods have devices of two profiles of one GPU. Those that are beside them are offered still, and are
// nobody else's. One that lies where a claim is, is another plugin's.
func TestMIGDevicesOfTwoProfilesAreOurs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "dgx-h100")
		r.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
		r.partition("1g.10gb", 0)
		r.partition("1g.10gb", 1)
		r.partition("2g.20gb", 2)
		r.partition("2g.20gb", 4)
		const gpu = "gpu-0000-1b-00-0"
		agent, stop := r.pluginAgent(ctx, newAPIServer(), gpu+"=device-plugin", pluginpath.MIGMixed)
		defer stop()
		if err := agent.plugins.Look(ctx); err != nil {
			t.Fatal(err)
		}
		others := func() string {
			time.Sleep(2 * time.Second)
			resources, _, err := agent.plugins.OfOthers(ctx)
			if err != nil {
				t.Fatal(err)
			}
			return resources[gpu]
		}
		resources, _ := agent.plugins.Resources()
		for _, resource := range resources {
			for _, device := range resource.Devices {
				r.pluginDevices = append(r.pluginDevices, ledger.PluginDevice{Resource: resource.Name, ID: device.ID})
			}
		}
		if len(r.pluginDevices) != 4 {
			t.Fatalf("offered are %v", r.pluginDevices)
		}
		for i := range 2 {
			for _, resource := range resources {
				if err := agent.plugins.Allocated(ctx, resource.Name, resource.Devices[i:i+1]); err != nil {
					t.Fatalf("%s of %s: %v", resource.Devices[i].Name, resource.Name, err)
				}
				if other := others(); other != "" {
					t.Errorf("%s has been given, and the GPU is offered by another plugin, as %s", resource.Devices[i].Name, other)
				}
			}
		}
		if err := agent.claims.Unprepare(ctx, holdUID(resources[1], 1)); err != nil {
			t.Fatal(err)
		}
		entry := holdOf(resources[1].Devices[1])
		record, err := r.records().Get(holdUID(resources[1], 0))
		if err != nil {
			t.Fatal(err)
		}
		entry.Claim = ledger.Claim{UID: "train-uid", Namespace: "default", Name: "train"}
		entry.Devices = record.Entry.Devices
		if err := agent.claims.Unprepare(ctx, holdUID(resources[1], 0)); err != nil {
			t.Fatal(err)
		}
		if err := r.records().Put(entry); err != nil {
			t.Fatal(err)
		}
		if other := others(); other != resources[1].Name {
			t.Errorf("a claim has the place of a device that is offered: it is of %q, want %s", other, resources[1].Name)
		}
	})
}

func holdUID(resource deviceplugin.Resource, n int) types.UID {
	return hold.UID(ledger.PluginDevice{Resource: resource.Name, ID: resource.Devices[n].ID})
}
