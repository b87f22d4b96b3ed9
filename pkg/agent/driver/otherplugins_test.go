// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2/ktesting"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/pluginpath"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/twopaths"
)

// TestAGPUOfAnotherDevicePluginIsGivenToNoClaim: it is tainted as long as the kubelet lists it, and each prepare asks anew. Where the kubelet does
// not answer, what was known stays, and nothing is begun.
func TestAGPUOfAnotherDevicePluginIsGivenToNoClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		agent := r.agent(ctx, newAPIServer())
		events := record.NewFakeRecorder(100)
		agent.reporter.recorder = events
		defer background(ctx, agent.reporter.run)() // which ends what it has begun
		uuids := map[string]string{}
		for _, gpu := range agent.opts.Hardware.Node().GPUs {
			uuids[gpu.Name] = gpu.UUID
		}
		of := func(resource string, ids ...string) (devices []ledger.PluginDevice) {
			for _, id := range ids {
				devices = append(devices, ledger.PluginDevice{Resource: resource, ID: id})
			}
			return devices
		}
		const askedAnew, longEnough = time.Second, 61 * time.Second
		all := []string{t4First, t4Second, "gpu-0000-00-1d-0", "gpu-0000-00-1e-0"}
		away := errors.New("the kubelet is away")
		for _, step := range []struct {
			name    string
			after   time.Duration // since the step before
			devices []ledger.PluginDevice
			err     error
			taken   []string // GPUs that claims do not get
			events  int
			prepare string // what a claim of the first GPU is told, empty if it is prepared
		}{
			{name: "no device plugin"},
			{name: "NVIDIA's comes with replicas", after: askedAnew, devices: of("nvidia.com/gpu", uuids[t4First]+"::0", uuids[t4First]+"::1"), taken: all[:1], events: 1, prepare: "nvidia.com/gpu"},
			{name: "and still offers it", after: askedAnew, devices: of("nvidia.com/gpu", uuids[t4First]+"::0"), taken: all[:1], prepare: "nvidia.com/gpu"},
			{name: "it has another GPU, too", after: askedAnew, devices: of("nvidia.com/gpu", uuids[t4First], uuids[t4Second]), taken: all[:2], events: 1, prepare: "nvidia.com/gpu"},
			{name: "the kubelet has just started", after: askedAnew, taken: all[:2], prepare: "nvidia.com/gpu"},
			{name: "the kubelet is away", after: askedAnew, err: away, taken: all[:2], prepare: away.Error()},
			{name: "it answers, and has just started", after: longEnough, taken: all[:2], prepare: "nvidia.com/gpu"},
			{name: "one is not offered any more", after: longEnough, devices: of("nvidia.com/gpu", uuids[t4Second]), taken: all[1:2]},
			{name: "one that is no GPU of the node", after: askedAnew, devices: of("nvidia.com/gpu", "GPU-00000000-0000-0000-0000-000000000000"), taken: all, events: 3, prepare: "nvidia.com/gpu"},
			{name: "it is offered no more", after: askedAnew, taken: all, prepare: "nvidia.com/gpu"},
			{name: "a NIC of NVIDIA", after: longEnough, devices: of("nvidia.com/hostdev", "0000:3b:00.0")},
			{name: "the one that was listed meanwhile", after: askedAnew, taken: all[:1], events: 1, prepare: "nvidia.com/gpu"},
			{name: "only others' devices", after: longEnough, devices: of("example.com/nic", "eth0")},
		} {
			r.pluginDevices, r.pluginDevicesErr = step.devices, step.err
			time.Sleep(step.after)
			agent.lookForForeign(ctx)
			var taken []string
			for _, device := range published(t, agent.opts.Hardware) {
				if name, ok := strings.CutSuffix(device, " in-use=device-plugin:NoSchedule"); ok {
					taken = append(taken, name)
				}
			}
			if step.err == nil {
				listed := 0 // now: who is missing hides nobody who comes
				for _, device := range step.devices {
					if strings.HasPrefix(device.Resource, "nvidia.com/") {
						listed++
					}
				}
				if got := *listedOn(t, agent.opts.Hardware); got != int64(listed) {
					t.Errorf("%s: the slices tell of %d devices of device plugins, want %d", step.name, got, listed)
				}
			}
			if diff := cmp.Diff(step.taken, taken); diff != "" {
				t.Errorf("%s: taken out (-want +got):\n%s", step.name, diff)
			}
			told := 0
			for len(events.Events) > 0 {
				if strings.Contains(<-events.Events, "Warning GPUOfDevicePlugin Device gpu-") {
					told++
				}
			}
			if told != step.events {
				t.Errorf("%s: %d events, want %d", step.name, told, step.events)
			}
			for _, gpu := range step.taken {
				use := agent.opts.Hardware.withheld.foreignUses()[gpu]
				condition := judgeNode(nodeView{gpus: []gpuView{{name: gpu, foreign: &use}}})
				if condition.Status != "False" || !strings.Contains(condition.Message, gpu+": another device plugin of this node offers it as nvidia.com/gpu") {
					t.Errorf("%s: the condition is %s, %q", step.name, condition.Status, condition.Message)
				}
			}
			metric := 0
			for _, gpu := range all {
				n, err := testutil.GetGaugeMetricValue(gpusOfDevicePlugins.WithLabelValues(gpu, "nvidia.com/gpu"))
				if err != nil {
					t.Fatal(err)
				}
				metric += int(n)
			}
			if metric != len(step.taken) {
				t.Errorf("%s: the metric counts %d, want %d", step.name, metric, len(step.taken))
			}

			p := agent.newPlugin(func(error) {})
			uid := types.UID("first-uid")
			prepared, err := p.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{allocatedClaim("first", t4First)})
			if err != nil {
				t.Fatal(err)
			}
			if got := prepared[uid].Err; (got == nil) != (step.prepare == "") || got != nil && !strings.Contains(got.Error(), step.prepare) {
				t.Errorf("%s: prepare says %v, want %q", step.name, got, step.prepare)
			}
			// One that is prepared stays so whoever comes later.
			if prepared[uid].Err == nil {
				r.pluginDevices = of("nvidia.com/gpu", uuids[t4First])
				time.Sleep(askedAnew)
				again, err := p.PrepareResourceClaims(ctx, []*resourceapi.ResourceClaim{allocatedClaim("first", t4First), allocatedClaim("late", t4First)})
				if err != nil || again[uid].Err != nil || again["late-uid"].Err == nil {
					t.Errorf("%s: again %v, %v, and a second claim %v", step.name, again[uid].Err, err, again["late-uid"].Err)
				}
				if err := agent.claims.Unprepare(ctx, uid); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// TestTheAgentBeforeIsNoOtherDevicePlugin: in an update the kubelet still lists what the agent before offers, when the next one looks first.
func TestTheAgentBeforeIsNoOtherDevicePlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		agent, stop := r.pluginAgent(ctx, newAPIServer(), "device-plugin", pluginpath.MIGNone)
		defer stop()
		for _, gpu := range agent.opts.Hardware.Node().GPUs {
			r.pluginDevices = append(r.pluginDevices, ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: gpu.UUID})
		}
		agent.lookForForeign(ctx)
		if uses := agent.opts.Hardware.withheld.foreignUses(); len(uses) > 0 {
			t.Errorf("taken for another's: %v", uses)
		}
	})
}

// TestADeviceThatIsHeldByAnotherNameIsUnhealthy: the kubelet would be refused it, and the pod fail for good.
func TestADeviceThatIsHeldByAnotherNameIsUnhealthy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		agent, stop := r.pluginAgent(ctx, newAPIServer(), "device-plugin", pluginpath.MIGNone)
		defer stop()
		if err := agent.plugins.Look(ctx); err != nil {
			t.Fatal(err)
		}
		resources, _ := agent.plugins.Resources()
		before := resources[0].Devices[1]
		before.ID, before.UUID = "GPU-of-before", "GPU-of-before" // replaced, while a pod has it
		if err := errors.Join(r.records().Put(holdOf(before)), r.records().Put(holdOf(resources[0].Devices[0]))); err != nil {
			t.Fatal(err)
		}
		if err := agent.plugins.Look(ctx); err != nil {
			t.Fatal(err)
		}
		want := []string{t4First + " healthy", t4Second + " unhealthy", "gpu-0000-00-1d-0 healthy", "gpu-0000-00-1e-0 healthy"}
		if diff := cmp.Diff(want, told(agent.plugins)); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// TestOurOwnDevicePluginIsNoOther: its GPUs would come and go for ever.
func TestOurOwnDevicePluginIsNoOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, ctx := ktesting.NewTestContext(t)
		r := newRig(t, "t4")
		agent, stop := r.pluginAgent(ctx, newAPIServer(), t4First+"=device-plugin", pluginpath.MIGNone)
		defer stop()
		if err := agent.plugins.Look(ctx); err != nil {
			t.Fatal(err)
		}
		resources, _ := agent.plugins.Resources()
		offered := resources[0].Devices[0]
		held := agent.opts.Hardware.Node().GPUs[1] // which a pod has had since before it came to claims
		for _, id := range []string{offered.ID, held.UUID} {
			r.pluginDevices = append(r.pluginDevices, ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: id})
		}
		if err := r.records().Put(holdOf(resources[0].Devices[0])); err != nil {
			t.Fatal(err)
		}
		second := resources[0].Devices[0]
		second.ID, second.UUID, second.Name = held.UUID, held.UUID, held.Name
		if err := r.records().Put(holdOf(second)); err != nil {
			t.Fatal(err)
		}
		agent.lookForForeign(ctx)
		if tainted := slices.DeleteFunc(published(t, agent.opts.Hardware), func(d string) bool { return !strings.Contains(d, "device-plugin") }); len(tainted) > 0 {
			t.Errorf("tainted: %q", tainted)
		}
		if err := agent.plugins.Look(ctx); err != nil {
			t.Fatal(err)
		}
		if got := told(agent.plugins); !slices.Equal(got, []string{t4First + " healthy"}) {
			t.Errorf("the kubelet is told of %q", got)
		}
	})
}

// TestTheKubeletIsAskedAtItsSocket, where an administrator says that it is: asked elsewhere, a node would seem to have no device plugins.
func TestTheKubeletIsAskedAtItsSocket(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	r := newRig(t, "t4")
	socket := filepath.Join(t.TempDir(), "kubelet.sock")
	if err := os.WriteFile(socket, nil, 0o600); err != nil { // nobody listens
		t.Fatal(err)
	}
	hardware := r.found(ctx)
	agent, err := New(Options{
		NodeName: "node-1", Client: newAPIServer(), KubeletRoot: r.state, StateDir: r.state, CDIDir: filepath.Join(r.state, "cdi"), Hardware: hardware,
		Backend: r.agent(ctx, newAPIServer()).opts.Backend, Tools: sharing.NewSimulated(r.machine), Kubelet: Kubelet{Socket: socket},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := agent.plugins.OfOthers(ctx); err == nil || !strings.Contains(err.Error(), socket) {
		t.Errorf("device plugins: %v, want an error of %s", err, socket)
	}
	if _, err := agent.opts.Kubelet.Pods(ctx); err == nil || !strings.Contains(err.Error(), socket) {
		t.Errorf("pods: %v, want an error of %s", err, socket)
	}
}

// listedOn is how many devices of device plugins the first device says that the agent has seen.
func listedOn(t *testing.T, hardware *Hardware) *int64 {
	t.Helper()
	resources, ok := hardware.Resources("node-1")
	if !ok {
		t.Fatal("nothing is known")
	}
	for _, slice := range resources.Pools["node-1"].Slices {
		for _, device := range slice.Devices {
			return device.Attributes[twopaths.Listed].IntValue
		}
	}
	t.Fatal("no device")
	return nil
}
