// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/config"
)

const (
	attached     = "test.example/attached"
	attachFailed = "test.example/attach-failed"
)

// attachable makes devices of a fabric that have to be attached to a node before a pod can use them.
func attachable(names ...string) []resourceapi.Device {
	var devices []resourceapi.Device
	for _, name := range names {
		devices = append(devices, resourceapi.Device{
			Name:                     name,
			BindsToNode:              ptr.To(true),
			BindingConditions:        []string{attached},
			BindingFailureConditions: []string{attachFailed},
		})
	}
	return devices
}

// addFabric makes a pool of devices that every node of the world can reach.
func (w *world) addFabric(devices ...resourceapi.Device) {
	w.t.Helper()
	slice := w.slice("fabric", devices...)
	slice.Spec.NodeName, slice.Spec.NodeSelector = nil, labelled(worldLabel, w.name)
	w.addSlice(slice)
}

// report sets a condition of the claim's first device, as the component would that attaches it.
func (w *world) report(claim *resourceapi.ResourceClaim, condition string) {
	w.t.Helper()
	claim = claim.DeepCopy()
	r := claim.Status.Allocation.Devices.Results[0]
	claim.Status.Devices = []resourceapi.AllocatedDeviceStatus{{
		Driver: r.Driver, Pool: r.Pool, Device: r.Device,
		Conditions: []metav1.Condition{{
			Type: condition, Status: metav1.ConditionTrue, Reason: "Tested", Message: "the test says so", LastTransitionTime: metav1.Now(),
		}},
	}}
	_, err := w.client.ResourceV1().ResourceClaims(w.name).UpdateStatus(w.ctx, claim, metav1.UpdateOptions{})
	w.must(err, "reporting %s for claim %s", condition, claim.Name)
}

func (w *world) awaitAllocated(name string) *resourceapi.ResourceClaim {
	w.t.Helper()
	return w.awaitClaim(name, "allocated", func(c *resourceapi.ResourceClaim) bool { return c.Status.Allocation != nil })
}

// A pod is bound when another component says that its device is ready, not before.
func TestPodWaitsForBindingConditions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a")
	w.addNode("b")
	w.addFabric(attachable("gpu-0", "gpu-1")...)
	startScheduler(t, w.name, schedulerSetup{})

	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	pod := w.addPod("pod", withClaim("wanted"), w.onNode("b"))
	claim := w.awaitAllocated("wanted")
	if claim.Status.Allocation.AllocationTimestamp == nil {
		t.Error("the allocation has no timestamp, from which the time to get ready counts")
	}
	claim.Status.Allocation.AllocationTimestamp = nil
	want := &resourceapi.AllocationResult{
		Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{{
			Request: "gpu", Driver: w.driver, Pool: w.nodeName("fabric"), Device: "gpu-0",
			BindingConditions: []string{attached}, BindingFailureConditions: []string{attachFailed},
		}}},
		NodeSelector: onlyNode(w.nodeName("b")), // the device binds to the node, though others can reach it
	}
	if diff := cmp.Diff(want, claim.Status.Allocation); diff != "" {
		t.Errorf("allocation (-want +got):\n%s", diff)
	}
	w.awaitEvent(pod, "waiting up to", "wanted")

	// Another pod comes through meanwhile, with the other device: nothing waits for the one that waits.
	w.addClaim("other", spec(w.exactly("gpu", 1)))
	w.addPod("other", withClaim("other"), w.onNode("a"))
	w.report(w.awaitAllocated("other"), attached)
	w.awaitBoundTo("other", "a")
	if current, err := w.client.CoreV1().Pods(w.name).Get(w.ctx, "pod", metav1.GetOptions{}); err != nil || current.Spec.NodeName != "" {
		t.Errorf("the pod is on node %q before its device is ready (%v)", current.Spec.NodeName, err)
	}

	w.report(w.claim("wanted"), attached)
	w.awaitBoundTo("pod", "b")
}

// A device that cannot be made ready is given back, and the pod is tried again.
func TestBindingFailureReleasesTheDevice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a")
	w.addFabric(attachable("gpu-0")...)
	startScheduler(t, w.name, schedulerSetup{})

	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	pod := w.addPod("pod", withClaim("wanted"))
	w.report(w.awaitAllocated("wanted"), attachFailed)
	w.awaitEvent(pod, attachFailed, "the test says so")
	again := w.awaitClaim("wanted", "allocated anew, without the old report", func(c *resourceapi.ResourceClaim) bool {
		return c.Status.Allocation != nil && len(c.Status.Devices) == 0
	})
	w.report(again, attached)
	w.awaitBoundTo("pod", "a")
}

// Devices that need no preparation come before those that do.
func TestReadyDevicesComeBeforeAttachableOnes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("x", gpus(h100, 1)...) // "fabric" comes before "x"
	w.addFabric(attachable("gpu-0")...)
	startScheduler(t, w.name, schedulerSetup{})
	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	w.addPod("pod", withClaim("wanted"))
	w.awaitBoundTo("pod", "x")
	if got := w.claim("wanted").Status.Allocation.Devices.Results[0].Pool; got != w.nodeName("x") {
		t.Errorf("the device is of pool %s, want the node's own", got)
	}
}

// Devices of a pool that several nodes reach: the allocation says which, and what one node's pod holds is gone for
// the others.
func TestNetworkAttachedPool(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, suffix := range []string{"a", "b", "far"} {
		w.addNode(suffix)
	}
	patch := fmt.Appendf(nil, `{"metadata":{"labels":{%q:null,"stowage.dev/far":%q}}}`, worldLabel, w.name)
	_, err := w.client.CoreV1().Nodes().Patch(w.ctx, w.nodeName("far"), types.MergePatchType, patch, metav1.PatchOptions{})
	w.must(err, "moving a node away")
	w.addFabric(resourceapi.Device{Name: "nic-0"}, resourceapi.Device{Name: "nic-1"})
	startScheduler(t, w.name, schedulerSetup{})
	w.addTemplate("one", spec(w.exactly("nic", 1)))

	fromFar := func(p *v1.Pod) { p.Spec.NodeSelector = map[string]string{"stowage.dev/far": w.name} }
	w.addPod("far", withTemplate("one"), fromFar)
	w.awaitUnschedulable("far", `request "nic" of claim`) // the reason depends on whether another test has a pool for all nodes

	for i, node := range []string{"a", "b"} {
		name := "on-" + node
		w.addPod(name, withTemplate("one"), w.onNode(node))
		claim := w.claim(claimName(w.awaitBoundTo(name, node), "one"))
		if diff := cmp.Diff([]string{[]string{"nic-0", "nic-1"}[i]}, devices(claim)); diff != "" {
			t.Errorf("devices of %s (-want +got):\n%s", name, diff)
		}
		if diff := cmp.Diff(labelled(worldLabel, w.name), claim.Status.Allocation.NodeSelector); diff != "" {
			t.Errorf("node selector of %s (-want +got):\n%s", name, diff)
		}
	}
	w.addPod("late", withTemplate("one"), w.onNode("a"))
	w.awaitUnschedulable("late", "2 of 2", "held", "if claim "+w.name+"/on-")
	w.deletePod("on-b")
	w.awaitBoundTo("late", "a")
}

// A device of the fabric that binds to a node takes its claim there: the next pod that shares the claim goes to the same node, and
// cannot go to another one.
func TestDeviceBindsItsClaimToTheNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, suffix := range []string{"a", "b", "c"} {
		w.addNode(suffix)
	}
	slice := w.slice("fabric", resourceapi.Device{Name: "gpu-0", BindsToNode: ptr.To(true)})
	slice.Spec.NodeName, slice.Spec.AllNodes = nil, ptr.To(true)
	w.addSlice(slice)
	startScheduler(t, w.name, schedulerSetup{})

	w.addClaim("shared", spec(w.exactly("gpu", 1)))
	w.addPod("first", withClaim("shared"), w.onNode("b"))
	w.awaitBoundTo("first", "b")
	if diff := cmp.Diff(onlyNode(w.nodeName("b")), w.claim("shared").Status.Allocation.NodeSelector); diff != "" {
		t.Errorf("node selector of the allocation (-want +got):\n%s", diff)
	}
	for i := range 3 { // one could be lucky
		name := fmt.Sprintf("next-%d", i)
		w.addPod(name, withClaim("shared"))
		w.awaitBoundTo(name, "b")
	}
	w.addPod("elsewhere", withClaim("shared"), w.onNode("a"))
	w.awaitUnschedulable("elsewhere")
}

// A device cannot be made ready, and is not to be had any more: tainted, or gone from its slice. The pod gets another one.
func TestBindingFailureIsTriedElsewhere(t *testing.T) {
	t.Parallel()
	s := startScheduler(t, namePrefix(t.Name())+"scheduler", schedulerSetup{})
	tests := map[string]func(*resourceapi.ResourceSlice){
		"the device gets a taint": func(slice *resourceapi.ResourceSlice) {
			slice.Spec.Devices[0].Taints = []resourceapi.DeviceTaint{{Key: "test.example/attach-failed", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
		},
		"the device is removed": func(slice *resourceapi.ResourceSlice) { slice.Spec.Devices = nil },
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, s)
			w.addNode("a")
			slice := w.addSlice(w.slice("a", attachable("gpu-0")...))
			w.addClaim("wanted", spec(w.exactly("gpu", 1)))
			w.addPod("pod", withClaim("wanted"))
			claim := w.awaitAllocated("wanted")

			change(slice)
			_, err := w.client.ResourceV1().ResourceSlices().Update(w.ctx, slice, metav1.UpdateOptions{})
			w.must(err, "changing slice %s", slice.Name)
			w.addNode("b", gpus(h100, 1)...)
			w.report(claim, attachFailed)
			pod := w.awaitBoundTo("pod", "b")
			w.checkHas(pod, "wanted", "b", "gpu-0")
			if left := w.claim("wanted").Status.Devices; len(left) > 0 {
				t.Errorf("the claim still has the status of the device that failed: %v", left)
			}
		})
	}
}

// A device that does not become ready in time is given back. The pod waits for as long as there is no other one, and then gets that.
func TestBindingTimeoutIsTriedElsewhere(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", attachable("gpu-0")...)
	startScheduler(t, w.name, schedulerSetup{edit: func(c *schedulerconfig.KubeSchedulerConfiguration) {
		for _, p := range c.Profiles[len(c.Profiles)-1].PluginConfig {
			if args, ok := p.Args.(*config.DeviceClaimsArgs); ok {
				args.BindingTimeout.Duration = 2 * time.Second
			}
		}
	}})
	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	pod := w.addPod("pod", withClaim("wanted"))
	first := w.awaitAllocated("wanted")
	w.awaitUnschedulable("pod", "not ready within the bindingTimeout of 2s after the allocation")
	w.awaitEvent(pod, "not ready within the bindingTimeout of 2s after the allocation")
	w.awaitClaim("wanted", "given back, or allocated anew", func(c *resourceapi.ResourceClaim) bool {
		return c.Status.Allocation == nil || !c.Status.Allocation.AllocationTimestamp.Equal(first.Status.Allocation.AllocationTimestamp)
	})

	w.addNode("b", gpus(h100, 1)...)
	w.checkHas(w.awaitBoundTo("pod", "b"), "wanted", "b", "gpu-0")
}

// A device that is never made ready is tried once, whatever would make the scheduler choose it again, and then another one: of the same
// node, of the same fabric, or of another node.
func TestDeviceThatFailsIsNotChosenAgain(t *testing.T) {
	t.Parallel()
	s := startScheduler(t, namePrefix(t.Name())+"scheduler", schedulerSetup{edit: func(c *schedulerconfig.KubeSchedulerConfiguration) {
		for _, p := range c.Profiles[len(c.Profiles)-1].PluginConfig {
			if args, ok := p.Args.(*config.DeviceClaimsArgs); ok {
				args.BindingTimeout.Duration = 2 * time.Second
			}
		}
	}})
	// prefers makes the first node worth more than all that other plugins say.
	prefers := func(w *world) podOption {
		return func(p *v1.Pod) {
			p.Spec.Affinity = &v1.Affinity{NodeAffinity: &v1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []v1.PreferredSchedulingTerm{{
				Weight: 100, Preference: onlyNode(w.nodeName("a")).NodeSelectorTerms[0],
			}}}}
		}
	}
	tests := map[string]struct {
		devices  func(w *world)
		pool     string // and device that is made ready
		device   string
		wantNode string
	}{
		"another one of the node": {
			devices: func(w *world) { w.addNode("a", attachable("gpu-0", "gpu-1")...) },
			pool:    "a", device: "gpu-1", wantNode: "a",
		},
		"another one of the fabric": {
			devices: func(w *world) { w.addNode("a"); w.addFabric(attachable("gpu-0", "gpu-1")...) },
			pool:    "fabric", device: "gpu-1", wantNode: "a",
		},
		"another node, against the pod's preference": {
			devices: func(w *world) {
				w.addNode("a", attachable("gpu-0")...)
				w.addNode("b", attachable("gpu-0")...)
			},
			pool: "b", device: "gpu-0", wantNode: "b",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, s)
			tc.devices(w)
			w.addClaim("wanted", spec(w.exactly("gpu", 1)))
			pod := w.addPod("pod", withClaim("wanted"), prefers(w))
			w.awaitEvent(pod, "not ready within the bindingTimeout of 2s after the allocation")
			w.report(w.awaitClaim("wanted", "allocated with the other device", func(c *resourceapi.ResourceClaim) bool {
				return c.Status.Allocation != nil && c.Status.Allocation.Devices.Results[0].Pool == w.nodeName(tc.pool) && c.Status.Allocation.Devices.Results[0].Device == tc.device
			}), attached)
			w.awaitBoundTo("pod", tc.wantNode)
		})
	}
}
