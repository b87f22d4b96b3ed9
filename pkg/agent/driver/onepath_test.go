// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	drapb "k8s.io/kubelet/pkg/apis/dra/v1"

	"stowage.dev/stowage/pkg/agent/deviceplugin/kubelettest"
	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/hold"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/pluginpath"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/nvmlsim"
)

// plugins is a kubelet's device manager on the machine.
func (m *machine) plugins() *kubelettest.Kubelet {
	m.t.Helper()
	must(m.t, os.MkdirAll(m.path("device-plugins"), 0o750))
	m.writeCheckpoint(nil)
	return kubelettest.Start(m.t, m.path("device-plugins"))
}

// serves runs an agent that the kubelet knows, until stop or the end of the test.
func (m *machine) serves() (stop func() error) {
	m.t.Helper()
	stop = m.run("")
	m.register(driver.Name + "-reg.sock")
	return stop
}

// writeCheckpoint does what the kubelet does when it has allocated devices: pod by device.
func (m *machine) writeCheckpoint(pods map[string]types.UID) {
	m.t.Helper()
	type entry struct {
		PodUID                      types.UID
		ContainerName, ResourceName string
		DeviceIDs                   map[int64][]string
	}
	var content struct {
		Data struct {
			PodDeviceEntries  []entry
			RegisteredDevices map[string][]string
		}
	}
	content.Data.RegisteredDevices = map[string][]string{}
	for device, pod := range pods {
		content.Data.PodDeviceEntries = append(content.Data.PodDeviceEntries, entry{pod, "app", deviceOf(device).Resource, map[int64][]string{0: {device}}})
	}
	data, err := json.Marshal(content)
	must(m.t, err)
	must(m.t, os.WriteFile(m.path("device-plugins", "kubelet_internal_checkpoint"), data, 0o600))
}

// uuids of the machine's GPUs, in order.
func (m *machine) uuids() (uuids []string) {
	m.t.Helper()
	library := nvml.Adapt(m.gpus.NVML(), "sim")
	must(m.t, library.Init())
	for i := range m.gpus.State().GPUs {
		device, err := library.Device(i)
		must(m.t, err)
		uuid, err := device.UUID()
		must(m.t, err)
		uuids = append(uuids, uuid)
	}
	must(m.t, library.Shutdown())
	return uuids
}

// deviceOf is the device with that ID: a GPU, or a replica of one.
func deviceOf(id string) ledger.PluginDevice {
	if strings.Contains(id, "::") {
		return ledger.PluginDevice{Resource: pluginpath.SharedResource, ID: id}
	}
	return ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: id}
}

// holder is the record of a device that the kubelet was given, nil if there is none.
func (m *machine) holder(id string) *ledger.Entry {
	m.t.Helper()
	record, err := ledger.At(durable.OS{}, prepare.LedgerDir(m.path("state"))).Get(hold.UID(deviceOf(id)))
	must(m.t, err)
	if record == nil {
		return nil
	}
	must(m.t, record.Err)
	return record.Entry
}

func names(response *pluginapi.ContainerAllocateResponse) (names []string) {
	for _, device := range response.GetCdiDevices() {
		names = append(names, device.GetName())
	}
	return names
}

// TestAGPUIsOfferedByOnePath, and what is asked for by the other one is refused, whoever asks.
func TestAGPUIsOfferedByOnePath(t *testing.T) {
	m := newMachine(t)
	uuids := m.uuids()
	m.advertise = "0000:1b:00.0=device-plugin," + uuids[1] + "=device-plugin," + uuids[2] + "=none"
	kubelet := m.plugins()
	m.serves()
	m.waitForGPUs(5)
	kubelet.Await(t, pluginpath.GPUResource, 2)
	for _, name := range m.published() {
		if slices.Contains([]string{gpu0, "gpu-0000-43-00-0", "gpu-0000-52-00-0"}, name) {
			t.Errorf("%s is in a slice, too", name)
		}
	}
	var offered []string
	for _, device := range kubelet.Lists(pluginpath.GPUResource)[0].Devices {
		offered = append(offered, device.GetID())
	}
	if diff := cmp.Diff(uuids[:2], offered); diff != "" {
		t.Errorf("offered to the kubelet (-want +got):\n%s", diff)
	}

	// Two pods, of which one has both a claim's GPU on its mind.
	response, err := kubelet.Allocate(t.Context(), pluginpath.GPUResource, uuids[0], uuids[1])
	must(t, err)
	if len(names(response)) != 2 {
		t.Fatalf("CDI devices %v", names(response))
	}
	must(t, m.resolve(names(response)...))
	for i, gpu := range []string{gpu0, "gpu-0000-43-00-0"} {
		if entry := m.holder(uuids[i]); entry == nil || entry.State != ledger.PrepareCompleted || !slices.Equal(entry.HeldGPUs(), []string{gpu}) {
			t.Errorf("record of %s: %+v", uuids[i], entry)
		}
	}
	// Its pods have no claim to look for.
	if left, err := os.ReadDir(m.path("state", "metadata")); err == nil && len(left) > 0 {
		t.Errorf("device metadata of no claim: %v", left)
	}
	plugin := m.plugin()
	for claim, want := range map[*drapb.Claim]string{
		m.allocate("late", gpu0):                "device " + gpu0 + " is not offered by claims on this node any more: --advertise has device-plugin",
		m.allocate("none", "gpu-0000-52-00-0"):  "--advertise has none for GPU gpu-0000-52-00-0",
		m.allocate("right", "gpu-0000-61-00-0"): "",
	} {
		prepared, err := plugin.NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
		must(t, err)
		if got := prepared.GetClaims()[claim.GetUid()].GetError(); want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("claim %s: %q, want %q", claim.GetName(), got, want)
		}
	}
	if _, err := kubelet.Allocate(t.Context(), pluginpath.GPUResource, uuids[3]); err == nil {
		t.Error("the kubelet was given a GPU that is offered by claims")
	}
}

// TestPodsOfTheDevicePluginFollowOneAnother: the kubelet says neither that a pod has ended nor whose the devices are.
func TestPodsOfTheDevicePluginFollowOneAnother(t *testing.T) {
	m := newMachine(t)
	uuids := m.uuids()
	m.advertise = "device-plugin"
	kubelet := m.plugins()
	stop := m.serves()
	kubelet.Await(t, pluginpath.GPUResource, 8)
	wantPods := func(when string, want ...types.UID) {
		t.Helper()
		if entry := m.holder(uuids[0]); entry == nil || !slices.Equal(entry.Pods, want) {
			t.Errorf("%s: the record is %+v, want the pods %v", when, entry, want)
		}
	}
	processes := func() (pids []uint32) {
		for _, process := range m.gpus.State().GPUs[0].Processes {
			pids = append(pids, process.PID)
		}
		return pids
	}
	start := func(pid uint32, pod types.UID) {
		t.Helper()
		_, err := m.gpus.Do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: pid, Kind: nvmlsim.ProcessCompute, MemoryMiB: 100, Pod: string(pod)}})
		must(t, err)
	}

	first, err := kubelet.Allocate(t.Context(), pluginpath.GPUResource, uuids[0])
	must(t, err)
	wantPods("before the kubelet has written down whose it is")
	m.writeCheckpoint(map[string]types.UID{uuids[0]: "pod-1"})
	must(t, kubelet.PreStart(t.Context(), pluginpath.GPUResource, uuids[0]))
	wantPods("when its container starts", "pod-1")
	start(41, "pod-1")

	// The same pod's app container after its init container, and a container that starts again: what runs stays.
	again, err := kubelet.Allocate(t.Context(), pluginpath.GPUResource, uuids[0])
	must(t, err)
	must(t, kubelet.PreStart(t.Context(), pluginpath.GPUResource, uuids[0]))
	if diff := cmp.Diff(names(first), names(again)); diff != "" {
		t.Errorf("asked again (-first +again):\n%s", diff)
	}
	if diff := cmp.Diff([]uint32{41}, processes()); diff != "" {
		t.Errorf("processes of the pod that runs (-want +got):\n%s", diff)
	}

	// The agent and the kubelet start anew. The kubelet does not ask for what it has written down, and the file must be there.
	must(t, stop())
	removeAll(t, m.path("cdi"))
	kubelet.Stop()
	m.serves()
	kubelet = kubelettest.Start(t, m.path("device-plugins"))
	kubelet.Await(t, pluginpath.GPUResource, 8)
	must(t, m.resolve(names(first)...))
	must(t, kubelet.PreStart(t.Context(), pluginpath.GPUResource, uuids[0]))
	wantPods("after a restart", "pod-1")

	// The next pod gets it while something of the first one is still there.
	_, err = kubelet.Allocate(t.Context(), pluginpath.GPUResource, uuids[0])
	must(t, err)
	m.writeCheckpoint(map[string]types.UID{uuids[0]: "pod-2", uuids[1]: "pod-1"})
	must(t, kubelet.PreStart(t.Context(), pluginpath.GPUResource, uuids[0]))
	wantPods("when the next pod starts", "pod-2")
	if got := processes(); len(got) > 0 {
		t.Errorf("processes %v of the pod before are still there when the next one starts", got)
	}
	must(t, m.resolve(names(first)...))
}

// TestWhatKeepsAContainerOfTheDevicePluginFromStarting passes, so that Allocate does not fail the pod for it.
func TestWhatKeepsAContainerOfTheDevicePluginFromStarting(t *testing.T) {
	m := newMachine(t)
	uuids := m.uuids()
	m.advertise = "device-plugin"
	kubelet := m.plugins()
	m.serves()
	kubelet.Await(t, pluginpath.GPUResource, 8)
	_, err := m.gpus.Do(&nvmlsim.AddProcess{GPU: "0", Process: nvmlsim.Process{PID: 41, Kind: nvmlsim.ProcessCompute, Pod: "stranger"}})
	must(t, err)
	response, err := kubelet.Allocate(t.Context(), pluginpath.GPUResource, uuids[0], uuids[1])
	must(t, err)
	m.writeCheckpoint(map[string]types.UID{uuids[0]: "pod-1", uuids[1]: "pod-1"})
	if err := kubelet.PreStart(t.Context(), pluginpath.GPUResource, uuids[0], uuids[1]); err == nil || !strings.Contains(err.Error(), gpu0) {
		t.Errorf("a container starts beside another pod's process: %v", err)
	}
	_, err = m.gpus.Do(&nvmlsim.RemoveProcess{GPU: "0", PID: 41})
	must(t, err)
	must(t, kubelet.PreStart(t.Context(), pluginpath.GPUResource, uuids[0], uuids[1]))
	must(t, m.resolve(names(response)...))
}

// TestAGPUThatIsMovedToClaimsWaitsForItsPod: it is in no slice while a pod has it, and back when it is released.
func TestAGPUThatIsMovedToClaimsWaitsForItsPod(t *testing.T) {
	m := newMachine(t)
	uuids := m.uuids()
	m.advertise = "device-plugin"
	kubelet := m.plugins()
	stop := m.serves()
	kubelet.Await(t, pluginpath.GPUResource, 8)
	_, err := kubelet.Allocate(t.Context(), pluginpath.GPUResource, uuids[0])
	must(t, err)
	must(t, stop())
	m.advertise = "dra"
	stop = m.serves()
	m.waitForGPUs(7)
	if slices.Contains(m.published(), gpu0) {
		t.Errorf("published are %v, and a pod has %s", m.published(), gpu0)
	}
	// A claim that has it all the same waits, and does not learn whose it is.
	ctx, cancel := context.WithTimeout(t.Context(), 9*time.Second) // the wait leaves 8 s for the work
	defer cancel()
	prepared, err := m.plugin().NodePrepareResources(ctx, &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{m.allocate("next", gpu0)}})
	must(t, err)
	if message := prepared.GetClaims()["next-uid"].GetError(); !strings.Contains(message, "device "+gpu0+" waits for a pod that has it by the device plugin, which is being released") {
		t.Errorf("a claim that waits is told %q", message)
	}
	must(t, stop())
	must(t, ledger.At(durable.OS{}, prepare.LedgerDir(m.path("state"))).Remove(hold.UID(ledger.PluginDevice{Resource: pluginpath.GPUResource, ID: uuids[0]})))
	m.serves()
	m.waitForGPUs(8)
}

// TestAGPUThatIsMovedToTheDevicePluginLeavesTheSlicesFirst. One that a claim has stays in them, and is offered when the claim has ended.
func TestAGPUThatIsMovedToTheDevicePluginLeavesTheSlicesFirst(t *testing.T) {
	m := newMachine(t)
	stop := m.serves()
	m.waitForGPUs(8)
	claim := m.allocate("train", gpu0)
	prepare := func() error {
		prepared, err := m.plugin().NodePrepareResources(t.Context(), &drapb.NodePrepareResourcesRequest{Claims: []*drapb.Claim{claim}})
		return errors.Join(err, errorOf(prepared.GetClaims()["train-uid"]))
	}
	must(t, prepare())
	must(t, stop())
	m.advertise = "dra,0000:1b:00.0=device-plugin,0000:43:00.0=device-plugin"
	kubelet := m.plugins()
	m.serves()
	kubelet.Await(t, pluginpath.GPUResource, 1)
	// Each leaves by itself: the other one may still be in its slice.
	uuids, lists := m.uuids(), kubelet.Lists(pluginpath.GPUResource)
	for _, device := range lists[len(lists)-1].Devices {
		name := []string{gpu0, "gpu-0000-43-00-0"}[slices.Index(uuids, device.GetID())]
		if slices.Contains(m.published(), name) {
			t.Errorf("published are %v when the kubelet has been told of %s", m.published(), name)
		}
	}
	if lists := kubelet.Lists(pluginpath.GPUResource); len(lists[len(lists)-1].Devices) != 1 || !slices.Contains(m.published(), gpu0) {
		t.Errorf("published are %v, and the kubelet was told of %v, while a claim has %s", m.published(), lists[len(lists)-1].Devices, gpu0)
	}
	// The kubelet, which has started anew, asks again for the claim: its pod runs.
	must(t, prepare())
	released, err := m.plugin().NodeUnprepareResources(t.Context(), &drapb.NodeUnprepareResourcesRequest{Claims: []*drapb.Claim{claim}})
	must(t, err)
	if message := released.GetClaims()["train-uid"].GetError(); message != "" {
		t.Fatal(message)
	}
	kubelet.Await(t, pluginpath.GPUResource, 2)
	if err := prepare(); err == nil {
		t.Error("the claim gets a GPU that is the device plugin's by now")
	}
}
