// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/advertise"
	"stowage.dev/stowage/pkg/agent/deviceplugin"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/hold"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/pluginpath"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/reconcile"
	"stowage.dev/stowage/pkg/nvmlsim"
)

const t4First, t4Second = "gpu-0000-00-1b-0", "gpu-0000-00-1c-0"

// pluginAgent has GPUs on these paths. stop is for the end of the bubble.
func (r *rig) pluginAgent(ctx context.Context, api *apiServer, paths string, mig pluginpath.MIGStrategy) (agent *Agent, stop func()) {
	r.t.Helper()
	agent = r.agent(ctx, api)
	parsed, err := advertise.Parse(paths)
	if err != nil {
		r.t.Fatal(err)
	}
	agent.Advertise(pluginpath.Advertised{Paths: parsed, Strategies: []deviceplugin.Strategy{deviceplugin.CDIByCRI}, MIG: mig})
	agent.plugins.NodeRead(ctx, &corev1.Node{})
	return agent, background(ctx, agent.reporter.run) // which ends what it has begun
}

// records are the ledger, as another agent of the node has it.
func (r *rig) records() *ledger.Ledger { return ledger.At(durable.OS{}, prepare.LedgerDir(r.state)) }

// told are the devices of which the kubelet is told, each with its health.
func told(p *pluginpath.Path) (told []string) {
	resources, _ := p.Resources()
	for _, resource := range resources {
		for _, device := range resource.Devices {
			health := "unhealthy"
			if device.Healthy {
				health = "healthy"
			}
			told = append(told, device.Name+" "+health)
		}
	}
	return told
}

// holdOf is what the kubelet was given, as the ledger has it.
func holdOf(device deviceplugin.Device) *ledger.Entry {
	of := ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: device.ID}
	return &ledger.Entry{
		Claim: ledger.Claim{UID: hold.UID(of), Name: "nvidia.com.gpu." + device.Name, Plugin: of}, State: ledger.PrepareCompleted,
		Devices: []ledger.Device{{Request: hold.Request, Pool: "node-1", Device: device.Name, GPU: device.Name, UUID: device.UUID}},
	}
}

// TestWhatTheKubeletIsToldOf: what keeps claims from a GPU keeps others from it. A GPU that was told of stays, and recovers.
func TestWhatTheKubeletIsToldOf(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		api := newAPIServer(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}})
		agent, stop := r.pluginAgent(ctx, api, "device-plugin", pluginpath.MIGNone)
		defer stop()
		defer background(ctx, agent.opts.Hardware.Watch)()
		p := agent.plugins
		all := func(first, second string) []string {
			return []string{t4First + " " + first, t4Second + " " + second, "gpu-0000-00-1d-0 healthy", "gpu-0000-00-1e-0 healthy"}
		}
		check := func(when string, want []string) {
			t.Helper()
			time.Sleep(time.Minute) // until health has been looked at
			if err := p.Look(ctx); err != nil {
				t.Error(err)
			}
			if diff := cmp.Diff(want, told(p)); diff != "" {
				t.Errorf("%s (-want +got):\n%s", when, diff)
			}
		}

		// Slices of before have the first two.
		slice := &resourceapi.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "old"}, Spec: resourceapi.ResourceSliceSpec{
			Driver: Name, NodeName: new("node-1"), Devices: []resourceapi.Device{{Name: t4First + "-mig-1g10gb-0"}, {Name: t4Second}},
		}}
		if _, err := api.ResourceV1().ResourceSlices().Create(ctx, slice, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		check("while slices have two", []string{"gpu-0000-00-1d-0 healthy", "gpu-0000-00-1e-0 healthy"})
		if err := api.ResourceV1().ResourceSlices().Delete(ctx, "old", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		check("when they are gone", all("healthy", "healthy"))
		api.away.Store(true) // which has proved what it had to
		check("without the API server", all("healthy", "healthy"))
		api.away.Store(false)

		resources, _ := p.Resources()
		devices := resources[0].Devices
		claim := &ledger.Entry{Claim: ledger.Claim{UID: "train-uid", Namespace: "default", Name: "train"}, State: ledger.PrepareCompleted, Devices: []ledger.Device{{Device: t4First, GPU: t4First}}}
		for _, entry := range []*ledger.Entry{claim, holdOf(devices[1])} {
			if err := r.records().Put(entry); err != nil {
				t.Fatal(err)
			}
		}
		check("a claim has one, and a pod another", all("unhealthy", "healthy"))
		if err := r.records().Remove("train-uid"); err != nil {
			t.Fatal(err)
		}
		r.do(&nvmlsim.LoseGPU{GPU: "1"})
		check("the claim has ended, and a GPU is lost", all("healthy", "unhealthy"))
		r.do(&nvmlsim.RestoreGPU{GPU: "1"})
		check("both work", all("healthy", "healthy"))
		agent.opts.Hardware.withheld.setOccupied([]occupiedPlace{{gpu: t4First, claim: "train-uid", quarantined: true}})
		check("in quarantine", all("unhealthy", "healthy"))
		agent.opts.Hardware.withheld.setOccupied(nil)
		r.do(&nvmlsim.RaiseXID{GPU: "1", Code: 74})
		check("out of quarantine, and with a fault", all("healthy", "unhealthy"))
		// Nobody has the last one, so nothing else remembers it. The node's capacity stays.
		r.do(&nvmlsim.RemoveGPU{GPU: "3"})
		if _, err := agent.opts.Hardware.Discover(ctx); err != nil {
			t.Fatal(err)
		}
		three := all("healthy", "unhealthy")
		three[3] = "gpu-0000-00-1e-0 unhealthy"
		check("one has been pulled out", three)
		r.do(&nvmlsim.AddGPU{GPU: "3"})
		if _, err := agent.opts.Hardware.Discover(ctx); err != nil {
			t.Fatal(err)
		}
		check("it is back", all("healthy", "unhealthy"))
	})
}

// TestGPUsOnAnotherPathAreInNoSlice, as are those that pods still have.
func TestGPUsOnAnotherPathAreInNoSlice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		tests := map[string]struct {
			paths string
			held  bool // a pod has the second GPU
			want  []string
		}{
			"all by claims":                         {paths: "dra", want: []string{t4First, t4Second, "gpu-0000-00-1d-0", "gpu-0000-00-1e-0"}},
			"by claims, and a pod has one":          {paths: "dra", held: true, want: []string{t4First, "gpu-0000-00-1d-0", "gpu-0000-00-1e-0"}},
			"one by the device plugin, one by none": {paths: t4First + "=device-plugin,0000:00:1d.0=none", want: []string{t4Second, "gpu-0000-00-1e-0"}},
			"none":                                  {paths: "none"},
		}
		for name, test := range tests {
			r := newRig(t, "t4")
			agent, stop := r.pluginAgent(ctx, newAPIServer(), test.paths, pluginpath.MIGNone)
			defer stop()
			if test.held {
				entry := holdOf(deviceplugin.Device{ID: "GPU-1", Name: t4Second})
				if err := r.records().Put(entry); err != nil {
					t.Fatal(err)
				}
				if !agent.plugins.HeldChanged() || agent.plugins.HeldChanged() {
					t.Errorf("%s: it is not news once", name)
				}
			}
			resources := agent.publisher.wanted()
			var got []string
			for _, slice := range resources.Pools["node-1"].Slices {
				for _, device := range slice.Devices {
					got = append(got, device.Name)
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", name, diff)
			}
			if len(resources.Pools["node-1"].Slices) == 0 {
				t.Errorf("%s: no slice tells that the driver runs", name)
			}
		}
	})
}

// TestADevicePluginsDeviceIsReleasedWhenItsPodHasEnded: by the kubelet's checkpoint, which keeps a pod until the next one comes, and by the API
// server. What is not known keeps it.
func TestADevicePluginsDeviceIsReleasedWhenItsPodHasEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		pod := func(name string) *corev1.Pod {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name + "-uid")}}
			pod.Spec.NodeName, pod.Status.Phase = "node-1", corev1.PodPending
			return pod
		}
		first, second := pod("first"), pod("second")
		api := newAPIServer(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", UID: "node-uid"}}, first, second)
		agent, stopReporter := r.pluginAgent(ctx, api, "device-plugin", pluginpath.MIGNone)
		defer stopReporter()
		agent.registered.Store(time.Now().Add(-time.Hour).UnixNano())
		p := agent.plugins
		checkpoint := filepath.Join(r.state, "device-plugins", "kubelet_internal_checkpoint")
		if err := os.MkdirAll(filepath.Dir(checkpoint), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := p.Look(ctx); err != nil {
			t.Fatal(err)
		}
		resources, _ := p.Resources()
		devices := resources[0].Devices
		// An init container has the first one, which the kubelet's list leaves out.
		writeFile(t, checkpoint, fmt.Sprintf(`{"Data":{"PodDeviceEntries":[`+
			`{"PodUID":"first-uid","ContainerName":"init","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":[%q]}},`+
			`{"PodUID":"second-uid","ContainerName":"app","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":[%q]}}],"RegisteredDevices":{}}}`, devices[0].ID, devices[1].ID))
		for _, device := range devices[:2] {
			if err := p.Starting(ctx, pluginpath.GPUResource, []deviceplugin.Device{device}); err != nil {
				t.Fatal(err)
			}
		}
		held := func() (held []string) {
			for _, device := range devices {
				if HeldInLedger(r.state)(device.Name) {
					held = append(held, device.Name)
				}
			}
			return held
		}
		want := func(when string, want ...string) {
			t.Helper()
			if diff := cmp.Diff(want, held()); diff != "" {
				t.Errorf("%s: held (-want +got):\n%s", when, diff)
			}
		}
		defer background(ctx, agent.leftovers.Run)()
		time.Sleep(5*time.Minute + 30*time.Second) // between two looks
		want("while their pods have not ended", t4First, t4Second)
		if got := told(agent.plugins); !strings.HasSuffix(got[0], " healthy") {
			t.Errorf("told: %v", got)
		}

		writeFile(t, checkpoint, `{"V3":{}}`)
		if err := api.CoreV1().Pods("default").Delete(ctx, "first", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Minute)
		want("while the kubelet's checkpoint is not understood", t4First, t4Second)

		// Of the pod that is gone the kubelet remembers until it allocates again.
		writeFile(t, checkpoint, fmt.Sprintf(`{"Data":{"PodDeviceEntries":[`+
			`{"PodUID":"first-uid","ContainerName":"init","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":[%q]}},`+
			`{"PodUID":"second-uid","ContainerName":"app","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":[%q]}}],"RegisteredDevices":{}}}`, devices[0].ID, devices[1].ID))
		r.do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 42, Kind: nvmlsim.ProcessCompute, Pod: "first-uid"}})
		time.Sleep(5 * time.Minute)
		want("while its process runs, as of a pod that was deleted by force", t4First, t4Second)
		r.do(&nvmlsim.RemoveProcess{GPU: "0", PID: 42})
		time.Sleep(3 * time.Minute)
		want("when it is certain", t4Second)

		// The next pod has been given the other one, and its image takes its time: what the pod before has left is not the next one's.
		if _, err := api.CoreV1().Pods("default").Create(ctx, pod("third"), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		writeFile(t, checkpoint, fmt.Sprintf(`{"Data":{"PodDeviceEntries":[`+
			`{"PodUID":"third-uid","ContainerName":"app","ResourceName":"nvidia.com/gpu","DeviceIDs":{"0":[%q]}}],"RegisteredDevices":{}}}`, devices[1].ID))
		r.do(&nvmlsim.AddProcess{GPU: "1", Process: nvmlsim.Process{PID: 43, Kind: nvmlsim.ProcessCompute, Pod: "second-uid"}})
		time.Sleep(5 * time.Minute)
		wantPods := func(when string, pods ...types.UID) {
			t.Helper()
			record, err := r.records().Get(hold.UID(ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: devices[1].ID}))
			if err != nil || record == nil || record.Entry == nil || !slices.Equal(record.Entry.Pods, pods) {
				t.Errorf("%s: record %+v, %v; want the pods %v", when, record, err, pods)
			}
		}
		wantPods("before a container starts", "second-uid")
		if err := p.Starting(ctx, pluginpath.GPUResource, devices[1:2]); err != nil {
			t.Error(err)
		}
		wantPods("when one starts", "third-uid")
		if left := r.machine.State().GPUs[1].Processes; len(left) > 0 {
			t.Errorf("processes that the pod before has left: %v", left)
		}
	})
}

// TestADevicePluginsDeviceIsNotOccupied, as the kubelet gives it to the next pod at once.
func TestADevicePluginsDeviceIsNotOccupied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		agent, stop := r.pluginAgent(ctx, newAPIServer(), "device-plugin", pluginpath.MIGNone)
		defer stop()
		agent.reconciled(reconcile.Summary{Occupied: []reconcile.Held{
			{GPU: t4First, Claim: holdOf(deviceplugin.Device{ID: "GPU-1", Name: t4First}).Claim, Why: reconcile.Left},
			{GPU: t4Second, Claim: ledger.Claim{UID: "train-uid", Namespace: "default", Name: "train"}, Why: reconcile.Left},
		}})
		var tainted []string
		for _, device := range published(t, agent.opts.Hardware) {
			if strings.Contains(device, string(reasonOccupied)) {
				tainted = append(tainted, device)
			}
		}
		if diff := cmp.Diff([]string{t4Second + " occupied=train-uid:NoSchedule"}, tainted); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// TestMIGDevicesOfTheDevicePlugin are those that an administrator has made. Two pods have two of one GPU.
func TestMIGDevicesOfTheDevicePlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "dgx-h100")
		r.do(&nvmlsim.SetMIG{GPU: "0", Enabled: true})
		r.partition("1g.10gb", 0)
		r.partition("1g.10gb", 1)
		const gpu, other = "gpu-0000-1b-00-0", "gpu-0000-43-00-0"
		tests := map[string]struct {
			paths string
			mig   pluginpath.MIGStrategy
			want  map[string][]string
		}{
			"none": {paths: gpu + "=device-plugin", want: map[string][]string{}},
			"mixed": {paths: gpu + "=device-plugin," + other + "=device-plugin", mig: pluginpath.MIGMixed, want: map[string][]string{
				pluginpath.GPUResource: {other}, "nvidia.com/mig-1g.10gb": {gpu + "-mig-1g10gb-0", gpu + "-mig-1g10gb-1"},
			}},
			"single":                               {paths: gpu + "=device-plugin", mig: pluginpath.MIGSingle, want: map[string][]string{pluginpath.GPUResource: {gpu + "-mig-1g10gb-0", gpu + "-mig-1g10gb-1"}}},
			"single, and a GPU is not partitioned": {paths: gpu + "=device-plugin," + other + "=device-plugin", mig: pluginpath.MIGSingle, want: map[string][]string{pluginpath.GPUResource: {other}}},
		}
		for name, test := range tests {
			agent, stop := r.pluginAgent(ctx, newAPIServer(), test.paths, test.mig)
			defer stop()
			p := agent.plugins
			if err := p.Look(ctx); err != nil {
				t.Fatal(err)
			}
			resources, _ := p.Resources()
			got := map[string][]string{}
			for _, resource := range resources {
				for _, device := range resource.Devices {
					if got[resource.Name] = append(got[resource.Name], device.Name); !device.Healthy {
						t.Errorf("%s: %s %s is not healthy", name, resource.Name, device.Name)
					}
					if strings.HasPrefix(device.ID, "MIG-") != strings.Contains(device.Name, "-mig-") {
						t.Errorf("%s: %s has the ID %s", name, device.Name, device.ID)
					}
				}
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", name, diff)
			}
			if test.mig != pluginpath.MIGMixed {
				continue
			}
			for _, device := range resources[1].Devices {
				if err := p.Allocated(ctx, resources[1].Name, []deviceplugin.Device{device}); err != nil {
					t.Fatal(err)
				}
				record, err := r.records().Get(hold.UID(ledger.PluginDevice{Resource: resources[1].Name, ID: device.ID}))
				if err != nil || record == nil || record.Entry == nil || record.Entry.Devices[0].UUID != device.ID || record.Entry.Devices[0].CDIDeviceIDs[0] != device.CDIName {
					t.Errorf("record of %s: %+v, %v", device.ID, record, err)
				}
			}
			if err := p.Look(ctx); err != nil {
				t.Fatal(err)
			}
			if resources, _ := p.Resources(); !resources[1].Devices[0].Healthy || !resources[1].Devices[1].Healthy {
				t.Errorf("devices that pods have: %+v", resources[1].Devices)
			}
			// The next agents have another ledger.
			for _, device := range resources[1].Devices {
				if err := agent.claims.Unprepare(ctx, hold.UID(ledger.PluginDevice{Resource: resources[1].Name, ID: device.ID})); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}
