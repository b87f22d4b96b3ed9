// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// result is what matters of one allocated device.
type result struct {
	Request, Device string
	Admin           bool
}

func results(claim *resourceapi.ResourceClaim) []result {
	if claim.Status.Allocation == nil {
		return nil
	}
	var all []result
	for _, r := range claim.Status.Allocation.Devices.Results {
		all = append(all, result{r.Request, r.Device, ptr.Deref(r.AdminAccess, false)})
	}
	return all
}

// What can be asked for, one kind of request at a time: where the pod goes, and which devices it gets.
func TestRequests(t *testing.T) {
	t.Parallel()
	s := startScheduler(t, "requests", schedulerSetup{})
	broken := resourceapi.DeviceTaint{Key: "test.example/broken", Effect: resourceapi.DeviceTaintEffectNoSchedule}

	tests := map[string]struct {
		nodes map[string][]resourceapi.Device
		// prepare, if set, runs before the pod is created.
		prepare func(w *world)
		claim   func(w *world) resourceapi.ResourceClaimSpec
		node    string
		want    []result
		// message is why the pod cannot be scheduled, instead of node and want.
		message []string
	}{
		"exact count": {
			nodes: map[string][]resourceapi.Device{"few": gpus(h100, 2), "many": gpus(h100, 4)},
			claim: func(w *world) resourceapi.ResourceClaimSpec { return spec(w.exactly("gpus", 3)) },
			node:  "many",
			want:  []result{{Request: "gpus", Device: "gpu-0"}, {Request: "gpus", Device: "gpu-1"}, {Request: "gpus", Device: "gpu-2"}},
		},
		"more than any node has": {
			nodes:   map[string][]resourceapi.Device{"a": gpus(h100, 4), "b": gpus(h100, 4)},
			claim:   func(w *world) resourceapi.ResourceClaimSpec { return spec(w.exactly("gpus", 5)) },
			message: []string{"gpus"},
		},
		"several requests": {
			nodes: map[string][]resourceapi.Device{"a": gpus(h100, 3)},
			claim: func(w *world) resourceapi.ResourceClaimSpec {
				return spec(w.exactly("train", 2), w.exactly("render", 1))
			},
			node: "a",
			want: []result{{Request: "train", Device: "gpu-0"}, {Request: "train", Device: "gpu-1"}, {Request: "render", Device: "gpu-2"}},
		},
		"all matching devices of a node": {
			nodes: map[string][]resourceapi.Device{"a": gpus(h100, 3)},
			claim: func(w *world) resourceapi.ResourceClaimSpec { return spec(w.all("gpus")) },
			node:  "a",
			want:  []result{{Request: "gpus", Device: "gpu-0"}, {Request: "gpus", Device: "gpu-1"}, {Request: "gpus", Device: "gpu-2"}},
		},
		"all devices, where one is held": {
			nodes: map[string][]resourceapi.Device{"held": gpus(h100, 2), "free": gpus(h100, 2)},
			prepare: func(w *world) {
				w.allocate(w.addClaim("holder", spec(w.exactly("gpu", 1))), "held", "gpu-1")
			},
			claim: func(w *world) resourceapi.ResourceClaimSpec { return spec(w.all("gpus")) },
			node:  "free",
			want:  []result{{Request: "gpus", Device: "gpu-0"}, {Request: "gpus", Device: "gpu-1"}},
		},
		"selector on an attribute": {
			nodes: map[string][]resourceapi.Device{"ampere": gpus(a100, 2), "hopper": gpus(h100, 2)},
			claim: func(w *world) resourceapi.ResourceClaimSpec { return spec(w.exactly("gpu", 1, byProduct(a100))) },
			node:  "ampere",
			want:  []result{{Request: "gpu", Device: "gpu-0"}},
		},
		"selector on a capacity": {
			nodes: map[string][]resourceapi.Device{"small": gpus(a100, 2), "big": gpus(h100, 2)},
			claim: func(w *world) resourceapi.ResourceClaimSpec {
				return spec(w.exactly("gpu", 1, `device.capacity["$DRIVER"].memory.compareTo(quantity("79Gi")) >= 0`))
			},
			node: "big",
			want: []result{{Request: "gpu", Device: "gpu-0"}},
		},
		"selectors of class and request together": {
			nodes: map[string][]resourceapi.Device{"ampere": gpus(a100, 2), "hopper": gpus(h100, 2)},
			prepare: func(w *world) {
				w.addClass(w.name+"-hopper", `device.driver == "$DRIVER"`, byProduct(h100))
			},
			claim: func(w *world) resourceapi.ResourceClaimSpec {
				request := w.exactly("gpu", 1, `device.attributes["resource.kubernetes.io"].pciBusID == "0000:11:00.0"`)
				request.Exactly.DeviceClassName = w.name + "-hopper"
				return spec(request)
			},
			node: "hopper",
			want: []result{{Request: "gpu", Device: "gpu-1"}},
		},
		"no device passes the selector": {
			nodes: map[string][]resourceapi.Device{"a": gpus(a100, 2)},
			claim: func(w *world) resourceapi.ResourceClaimSpec {
				return spec(w.exactly("gpu", 1, `device.capacity["$DRIVER"].memory.compareTo(quantity("1Ti")) >= 0`))
			},
			message: []string{"gpu", "selector"},
		},
		"one PCIe root for two": {
			nodes: map[string][]resourceapi.Device{"one-each": gpus(h100, 4), "pairs": gpus(a100, 4)},
			prepare: func(w *world) { // the first pair is not whole any more
				w.allocate(w.addClaim("holder", spec(w.exactly("gpu", 1))), "pairs", "gpu-0")
			},
			claim: func(w *world) resourceapi.ResourceClaimSpec { return onePCIeRoot(w.exactly("gpus", 2)) },
			node:  "pairs",
			want:  []result{{Request: "gpus", Device: "gpu-2"}, {Request: "gpus", Device: "gpu-3"}},
		},
		"one PCIe root for four": {
			nodes: map[string][]resourceapi.Device{"one-each": gpus(h100, 8), "pairs": gpus(a100, 8), "fours": gpus(l40s, 8)},
			claim: func(w *world) resourceapi.ResourceClaimSpec { return onePCIeRoot(w.exactly("gpus", 4)) },
			node:  "fours",
			want: []result{
				{Request: "gpus", Device: "gpu-0"},
				{Request: "gpus", Device: "gpu-1"},
				{Request: "gpus", Device: "gpu-2"},
				{Request: "gpus", Device: "gpu-3"},
			},
		},
		"one PCIe root that no node has": {
			nodes:   map[string][]resourceapi.Device{"one-each": gpus(h100, 8), "pairs": gpus(a100, 8)},
			claim:   func(w *world) resourceapi.ResourceClaimSpec { return onePCIeRoot(w.exactly("gpus", 4)) },
			message: []string{"gpus", "resource.kubernetes.io/pcieRoot"},
		},
		"first available, the first": {
			nodes: map[string][]resourceapi.Device{"a": append(gpus(a100, 2), rename(gpus(h100, 1), "hopper")...)},
			claim: func(w *world) resourceapi.ResourceClaimSpec { return spec(w.oneOf("gpu", h100, a100)) },
			node:  "a",
			want:  []result{{Request: "gpu/hopper", Device: "hopper-0"}},
		},
		"first available, the second": {
			nodes: map[string][]resourceapi.Device{"a": gpus(a100, 2)},
			claim: func(w *world) resourceapi.ResourceClaimSpec { return spec(w.oneOf("gpu", h100, a100)) },
			node:  "a",
			want:  []result{{Request: "gpu/ampere", Device: "gpu-0"}},
		},
		"first available, none": {
			nodes:   map[string][]resourceapi.Device{"a": gpus(l40s, 2)},
			claim:   func(w *world) resourceapi.ResourceClaimSpec { return spec(w.oneOf("gpu", h100, a100)) },
			message: []string{"gpu"},
		},
		"admin access to a device in use": {
			nodes: map[string][]resourceapi.Device{"a": gpus(h100, 1)},
			prepare: func(w *world) {
				w.allowAdminAccess()
				w.allocate(w.addClaim("holder", spec(w.exactly("gpu", 1))), "a", "gpu-0")
			},
			claim: func(w *world) resourceapi.ResourceClaimSpec {
				request := w.all("monitor")
				request.Exactly.AdminAccess = ptr.To(true)
				return spec(request)
			},
			node: "a",
			want: []result{{Request: "monitor", Device: "gpu-0", Admin: true}},
		},
		"admin access does not take a device": {
			nodes: map[string][]resourceapi.Device{"a": gpus(h100, 1)},
			prepare: func(w *world) {
				w.allowAdminAccess()
				request := w.exactly("monitor", 1)
				request.Exactly.AdminAccess = ptr.To(true)
				w.addClaim("monitor", spec(request))
				w.addPod("monitor", withClaim("monitor"))
				w.awaitBound("monitor")
			},
			claim: func(w *world) resourceapi.ResourceClaimSpec { return spec(w.exactly("gpu", 1)) },
			node:  "a",
			want:  []result{{Request: "gpu", Device: "gpu-0"}},
		},
		"tainted devices are passed over": {
			nodes: map[string][]resourceapi.Device{"a": gpus(h100, 3, tainted(2, broken))},
			claim: func(w *world) resourceapi.ResourceClaimSpec { return spec(w.exactly("gpu", 1)) },
			node:  "a",
			want:  []result{{Request: "gpu", Device: "gpu-2"}},
		},
		"only tainted devices": {
			nodes:   map[string][]resourceapi.Device{"a": gpus(h100, 2, tainted(2, broken))},
			claim:   func(w *world) resourceapi.ResourceClaimSpec { return spec(w.exactly("gpu", 1)) },
			message: []string{"taint", "test.example/broken"},
		},
		"tainted device, tolerated": {
			nodes: map[string][]resourceapi.Device{"a": gpus(h100, 1, tainted(1, broken))},
			claim: func(w *world) resourceapi.ResourceClaimSpec {
				request := w.exactly("gpu", 1)
				request.Exactly.Tolerations = []resourceapi.DeviceToleration{{
					Key: broken.Key, Operator: resourceapi.DeviceTolerationOpExists, Effect: broken.Effect,
				}}
				return spec(request)
			},
			node: "a",
			want: []result{{Request: "gpu", Device: "gpu-0"}},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, s)
			for suffix, devices := range test.nodes {
				w.addNode(suffix, devices...)
			}
			if test.prepare != nil {
				test.prepare(w)
			}
			w.awaitSlices(s)
			// The scheduler sees this claim after the holders above: claims come to it in order.
			w.addClaim("wanted", test.claim(w))
			w.addPod("pod", withClaim("wanted"))
			if test.message != nil {
				w.awaitUnschedulable("pod", test.message...)
				if got := results(w.claim("wanted")); got != nil {
					t.Errorf("the claim has %v although the pod cannot be scheduled", got)
				}
				return
			}
			w.awaitBoundTo("pod", test.node)
			if diff := cmp.Diff(test.want, results(w.claim("wanted"))); diff != "" {
				t.Errorf("allocated devices (-want +got):\n%s", diff)
			}
		})
	}
}

// A taint that an administrator puts on a device counts like one that the driver published. Taking it away
// wakes the pods that wait.
func TestDeviceTaintRule(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.addNode("a", gpus(h100, 2)...)
	rule := w.addTaintRule("a", "gpu-0", resourceapi.DeviceTaint{Key: "test.example/broken", Effect: resourceapi.DeviceTaintEffectNoSchedule})
	// Slices and rules come to the scheduler by different watches: it starts when both are there.
	startScheduler(t, w.name, schedulerSetup{})

	w.addClaim("one", spec(w.exactly("gpu", 1)))
	w.addPod("first", withClaim("one"))
	w.awaitBound("first")
	if diff := cmp.Diff([]string{"gpu-1"}, devices(w.claim("one"))); diff != "" {
		t.Errorf("allocated devices (-want +got):\n%s", diff)
	}
	w.addClaim("another", spec(w.exactly("gpu", 1)))
	w.addPod("second", withClaim("another"))
	w.awaitUnschedulable("second", "taint")
	w.must(w.client.ResourceV1().DeviceTaintRules().Delete(w.ctx, rule, metav1.DeleteOptions{}), "deleting the taint rule")
	w.awaitBound("second")
}

// all is a request for all devices of the world's class on a node.
func (w *world) all(name string) resourceapi.DeviceRequest {
	return resourceapi.DeviceRequest{Name: name, Exactly: &resourceapi.ExactDeviceRequest{
		DeviceClassName: w.class, AllocationMode: resourceapi.DeviceAllocationModeAll,
	}}
}

func onePCIeRoot(requests ...resourceapi.DeviceRequest) resourceapi.ResourceClaimSpec {
	s := spec(requests...)
	s.Devices.Constraints = []resourceapi.DeviceConstraint{{
		MatchAttribute: ptr.To(resourceapi.FullyQualifiedName("resource.kubernetes.io/pcieRoot")),
	}}
	return s
}

func rename(devices []resourceapi.Device, prefix string) []resourceapi.Device {
	for i := range devices {
		devices[i].Name = prefix + devices[i].Name[len("gpu"):]
	}
	return devices
}

// allowAdminAccess gives the world's namespace the label without which the API server refuses such claims.
func (w *world) allowAdminAccess() {
	w.t.Helper()
	patch := []byte(`{"metadata":{"labels":{"` + resourceapi.DRAAdminNamespaceLabelKey + `":"true"}}}`)
	_, err := w.client.CoreV1().Namespaces().Patch(w.ctx, w.name, types.MergePatchType, patch, metav1.PatchOptions{})
	w.must(err, "labelling the namespace for admin access")
	await(w, "admin access to be allowed", w.namespaceList(), func(ns *v1.Namespace) bool {
		return ns.Labels[resourceapi.DRAAdminNamespaceLabelKey] == "true"
	})
}

// Two pods, one claim: the second follows the first to its device.
func TestSharedClaim(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	for _, suffix := range []string{"a", "b", "c"} {
		w.addNode(suffix, gpus(h100, 1)...)
	}
	w.addClaim("shared", spec(w.exactly("gpu", 1)))
	w.addPod("first", withClaim("shared"))
	w.addPod("second", withClaim("shared"))
	first, second := w.awaitBound("first"), w.awaitBound("second")
	if first.Spec.NodeName != second.Spec.NodeName {
		t.Errorf("the pods are on %s and %s", first.Spec.NodeName, second.Spec.NodeName)
	}
	claim := w.claim("shared")
	if len(devices(claim)) != 1 || len(claim.Status.ReservedFor) != 2 {
		t.Errorf("want one device reserved for two pods: %s", describe(claim))
	}
}

// A claim from a template is the pod's own and goes with it; then its device is free for the next.
func TestTemplateClaimGoesWithItsPod(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", gpus(h100, 1)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))

	w.addPod("first", withTemplate("one"))
	first := w.awaitBound("first")
	name := claimName(first, "one")
	if claim := w.claim(name); !metav1.IsControlledBy(claim, first) {
		t.Errorf("claim %s is owned by %v, want by its pod", name, claim.OwnerReferences)
	}
	w.addPod("second", withTemplate("one"))
	w.awaitUnschedulable("second")
	w.deletePod("first")
	w.awaitBound("second")
	w.awaitClaimGone(name)
}

// A claim that was allocated before its pod came is used as it is.
func TestPreAllocatedClaimDecidesTheNode(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	for _, suffix := range []string{"a", "b", "c", "d"} {
		w.addNode(suffix, gpus(h100, 4)...)
	}
	w.allocate(w.addClaim("wanted", spec(w.exactly("gpu", 1))), "c", "gpu-3")
	pod := w.addPod("pod", withClaim("wanted"))
	w.awaitBoundTo("pod", "c")
	claim := w.claim("wanted")
	if diff := cmp.Diff([]string{"gpu-3"}, devices(claim)); diff != "" {
		t.Errorf("allocated devices (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: "pod", UID: pod.UID}}, claim.Status.ReservedFor); diff != "" {
		t.Errorf("reservations (-want +got):\n%s", diff)
	}
}
