// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/fence"
	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/auditing"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/passage"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// message is what the scheduler writes into the pod's condition and event after the attempt.
func (a *attempt) message() string {
	d := framework.Diagnosis{NodeToStatus: a.statuses}
	switch {
	case !a.preFilter.IsSuccess():
		d.PreFilterMsg = a.preFilter.Message()
	case !a.limit.AllNodes():
		a.statuses.SetAbsentNodesStatus(fwk.NewStatus(fwk.UnschedulableAndUnresolvable, fmt.Sprintf("node(s) didn't satisfy plugin(s) [%s]", Name)))
	}
	d.PostFilterMsg = a.postFilter().Message()
	return (&framework.FitError{Pod: a.pod, NumAllNodes: len(a.h.nodes), Diagnosis: d}).Error()
}

// What a pod that waits is told, situation by situation. The texts are in docs/troubleshooting.md, too.
func TestWhatAWaitingPodIsTold(t *testing.T) {
	eightOf := func(name string) []resourceapi.Device {
		var devices []resourceapi.Device
		for i := range 8 {
			devices = append(devices, device(fmt.Sprintf("%s-%d", name, i)))
		}
		return devices
	}
	eight := func() world {
		return world{
			nodes:    []*v1.Node{node("node-a"), node("node-b")},
			objects:  []runtime.Object{class(testClass), slice("node-a", eightOf("gpu")...), slice("node-b", eightOf("gpu")...)},
			resolver: map[v1.ResourceName]string{gpuResource: testClass},
		}
	}
	inNamespace := func(namespace string) func(*resourceapi.ResourceClaim) {
		return func(c *resourceapi.ResourceClaim) { c.Namespace = namespace }
	}
	memory := func(quantity string) func(*resourceapi.Device) {
		return func(d *resourceapi.Device) {
			d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse(quantity)}}
		}
	}
	asksForMemory := func(quantity string) func(*resourceapi.ResourceClaim) {
		return func(c *resourceapi.ResourceClaim) {
			c.Spec.Devices.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{
				Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(quantity)},
			}
		}
	}
	shared := func(d *resourceapi.Device) { d.AllowMultipleAllocations = ptr.To(true) }
	share := func(c *resourceapi.ResourceClaim) {
		result := &c.Status.Allocation.Devices.Results[0]
		result.ShareID = ptr.To(types.UID("share"))
		result.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("80Gi")}
	}
	tainted := func(d *resourceapi.Device) {
		d.Taints = []resourceapi.DeviceTaint{{Key: "gpu.example.com/lost", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	}
	rule := &resourceapi.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "drain-rack-7"}, Spec: resourceapi.DeviceTaintRuleSpec{
		DeviceSelector: &resourceapi.DeviceTaintSelector{Pool: ptr.To("node-b")},
		Taint:          resourceapi.DeviceTaint{Key: "maintenance", Effect: resourceapi.DeviceTaintEffectNoSchedule},
	}}
	late := func(c *resourceapi.ResourceClaim) {
		c.Status.Allocation.AllocationTimestamp = &metav1.Time{}
		c.Status.Allocation.Devices.Results[0].BindingConditions = []string{"Attached"}
		c.Status.Allocation.Devices.Results[0].BindingFailureConditions = []string{"Broken"}
	}
	for situation, tc := range map[string]struct {
		world      world // of node-a with one device and node-b with two, if it has no nodes
		claims     []*resourceapi.ResourceClaim
		objects    []runtime.Object
		pod        *v1.Pod
		others     []*v1.Pod
		flying     types.UID // the pod that claim wanted is being allocated for
		disclosure config.ClaimDisclosure
		want       string
	}{
		"claims of the pod's namespace hold the devices": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("on-a", allocated("node-a", "gpu-0")), claim("on-b", allocated("node-b", "gpu-0", "gpu-1"))},
			pod:    pod("p", "wanted"),
			want: `0/2 nodes are available: 2 node(s) whose matching devices are held by other claims. ` +
				`request "gpu" of claim wanted: 3 of 3 gpu devices held; would fit on node node-a if claim team-a/on-a were released`,
		},
		"claims of other namespaces hold the devices": {
			claims: []*resourceapi.ResourceClaim{
				claim("wanted", counted(2)), claim("on-b-0", inNamespace("team-b"), allocated("node-b", "gpu-0")), claim("on-b-1", inNamespace("team-c"), allocated("node-b", "gpu-1")),
			},
			pod: pod("p", "wanted"),
			want: `0/2 nodes are available: 1 node(s) whose matching devices are held by other claims, 1 node(s) with too few devices that match the claim. ` +
				`request "gpu" of claim wanted: 2 of 3 gpu devices held, 1 free (2 wanted on one node); would fit on node node-b if 2 claims of other namespaces were released`,
		},
		"claims of several namespaces hold the devices": {
			claims: []*resourceapi.ResourceClaim{
				claim("wanted", counted(2)), claim("on-b-0", allocated("node-b", "gpu-0")), claim("on-b-1", inNamespace("team-c"), allocated("node-b", "gpu-1")),
			},
			pod: pod("p", "wanted"),
			want: `0/2 nodes are available: 1 node(s) whose matching devices are held by other claims, 1 node(s) with too few devices that match the claim. ` +
				`request "gpu" of claim wanted: 2 of 3 gpu devices held, 1 free (2 wanted on one node); ` +
				`would fit on node node-b if claim team-a/on-b-0 and 1 claim of other namespaces were released`,
		},
		"claims of other namespaces hold the devices, and may be named": {
			claims: []*resourceapi.ResourceClaim{
				claim("wanted", counted(2)), claim("on-b-0", inNamespace("team-b"), allocated("node-b", "gpu-0")), claim("on-b-1", inNamespace("team-c"), allocated("node-b", "gpu-1")),
			},
			pod: pod("p", "wanted"), disclosure: config.NameClaims,
			want: `0/2 nodes are available: 1 node(s) whose matching devices are held by other claims, 1 node(s) with too few devices that match the claim. ` +
				`request "gpu" of claim wanted: 2 of 3 gpu devices held, 1 free (2 wanted on one node); ` +
				`would fit on node node-b if claims team-b/on-b-0, team-c/on-b-1 were released`,
		},
		"the pod asks for more devices than any node has": {
			world: eight(), claims: []*resourceapi.ResourceClaim{claim("wanted", counted(9)), claim("other", allocated("node-a", "gpu-0"))}, pod: pod("p", "wanted"),
			want: `0/2 nodes are available: 2 node(s) with too few devices that match the claim. ` +
				`request "gpu" of claim wanted: asks for 9 gpu devices of one node, the largest has 8`,
		},
		"a container asks for more devices than any node has": {
			world: eight(), claims: []*resourceapi.ResourceClaim{claim("other", allocated("node-a", "gpu-0"))}, pod: containersPod("train=9"),
			want: `0/2 nodes are available: 2 node(s) with too few devices that match the claim. ` +
				`container "train", example.com/gpu: asks for 9 gpu devices of one node, the largest has 8`,
		},
		"containers ask for more devices together than any node has": {
			world: eight(), pod: containersPod("train=5", "eval=5"),
			want: `0/2 nodes are available: 2 node(s) whose free devices do not satisfy all requests and constraints together. ` +
				`container "train", example.com/gpu: with 1 more request of the pod asks for 10 gpu devices of one node, the largest has 8; ` +
				`container "eval", example.com/gpu: 16 of 16 gpu devices free (5 wanted on one node); 2 node(s) have free devices for each request, but not for all together`,
		},
		"a container waits for devices that others hold": {
			world:  eight(),
			claims: []*resourceapi.ResourceClaim{claim("on-a", allocated("node-a", "gpu-0")), claim("on-b", allocated("node-b", "gpu-0", "gpu-1"))}, pod: containersPod("train=8"),
			want: `0/2 nodes are available: 2 node(s) whose matching devices are held by other claims. ` +
				`container "train", example.com/gpu: 3 of 16 gpu devices held, 13 free (8 wanted on one node); would fit on node node-a if claim team-a/on-a were released`,
		},
		"the class of a container's resource does not exist": {
			world: func() world {
				w := eight()
				w.resolver[gpuResource] = "gone"
				return w
			}(), pod: containersPod("train=1"),
			want: `0/2 nodes are available: 2 node(s) refused: container "train", example.com/gpu: device class "gone" does not exist.`,
		},
		"the class matches no device": {
			claims: []*resourceapi.ResourceClaim{claim("wanted", withClass("cls.example.com"))}, pod: pod("p", "wanted"),
			objects: []runtime.Object{&resourceapi.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "cls.example.com"}, Spec: resourceapi.DeviceClassSpec{
				Selectors: []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: `device.driver == "cls.example.com"`}}},
			}}},
			want: `0/2 nodes are available: 2 node(s) with too few devices that match the claim. ` +
				`request "gpu" of claim wanted: 0 of 3 devices match class cls.example.com's selectors`,
		},
		"the pod asks for more memory than any device has": {
			world: world{
				nodes:   []*v1.Node{node("node-a"), node("node-b")},
				objects: []runtime.Object{class(testClass), slice("node-a", device("gpu-0", memory("40Gi"))), slice("node-b", device("gpu-0", memory("80Gi")))},
			},
			claims: []*resourceapi.ResourceClaim{claim("wanted", asksForMemory("200Gi"))}, pod: pod("p", "wanted"),
			want: `0/2 nodes are available: 2 node(s) with too few devices that match the claim. ` +
				`request "gpu" of claim wanted: asks for 200Gi memory, the largest gpu device has 80Gi`,
		},
		"the only device is shared and full": {
			world:  world{nodes: []*v1.Node{node("node-a")}, objects: []runtime.Object{class(testClass), slice("node-a", device("gpu-0", memory("80Gi"), shared))}},
			claims: []*resourceapi.ResourceClaim{claim("wanted", asksForMemory("10Gi")), claim("on-a", allocated("node-a", "gpu-0"), share)}, pod: pod("p", "wanted"),
			want: `0/1 nodes are available: 1 node(s) whose matching devices are held by other claims. ` +
				`request "gpu" of claim wanted: 1 of 1 gpu devices shared by others, with too little capacity left; would fit on node node-a if claim team-a/on-a were released`,
		},
		"a driver and a DeviceTaintRule taint the devices": {
			world: world{
				nodes:   []*v1.Node{node("node-a"), node("node-b")},
				objects: []runtime.Object{class(testClass), slice("node-a", device("gpu-0", tainted)), slice("node-b", device("gpu-0"), device("gpu-1")), rule},
			},
			claims: []*resourceapi.ResourceClaim{claim("wanted")}, pod: pod("p", "wanted"),
			want: `0/2 nodes are available: 2 node(s) whose matching devices have taints that the claim does not tolerate. ` +
				`request "gpu" of claim wanted: 1 of 3 gpu devices tainted gpu.example.com/lost, 2 tainted maintenance by DeviceTaintRule drain-rack-7`,
		},
		"devices are tainted, and some of them held, too": {
			world: world{
				nodes:   []*v1.Node{node("node-a"), node("node-b")},
				objects: []runtime.Object{class(testClass), slice("node-a", device("gpu-0", tainted)), slice("node-b", device("gpu-0", tainted), device("gpu-1"))},
			},
			claims: []*resourceapi.ResourceClaim{
				claim("wanted"), claim("on-a", allocated("node-a", "gpu-0")), claim("on-b", allocated("node-b", "gpu-0", "gpu-1")),
			},
			pod: pod("p", "wanted"),
			want: `0/2 nodes are available: 1 node(s) whose matching devices are held by other claims, 1 node(s) whose matching devices have taints that the claim does not tolerate. ` +
				`request "gpu" of claim wanted: 1 of 3 gpu devices held, 2 tainted gpu.example.com/lost; would fit on node node-b if claim team-a/on-b were released`,
		},
		"a selector fails on every device": {
			claims: []*resourceapi.ResourceClaim{claim("wanted", withSelector(`device.attributes["gpu.example.com"].uuid == "x"`))}, pod: pod("p", "wanted"),
			want: `0/2 nodes are available: 2 node(s) with devices on which a CEL selector failed. ` +
				`request "gpu" of claim wanted: 3 of 3 gpu devices failing a selector; claim team-a/wanted, request "gpu": ` +
				`selector 'device.attributes["gpu.example.com"].uuid == "x"' failed, for example on device gpu.example.com/node-a/gpu-0: ` +
				`no such key: uuid. consider using CEL optional chaining (.? followed by orValue()) or guarding the check with has() for optional fields`,
		},
		"a claim that others use is allocated on a node that lacks devices for another one": {
			claims: []*resourceapi.ResourceClaim{
				claim("shared", allocated("node-a", "gpu-0"), reservedFor("other")), claim("wanted"),
			},
			pod: pod("p", "shared", "wanted"),
			want: `0/2 nodes are available: 1 node(s) didn't satisfy plugin(s) [DeviceClaims], 1 node(s) whose matching devices are held by other claims. ` +
				`claim team-a/shared is allocated on node node-a: the pod can run nowhere else; request "gpu" of claim wanted: 1 of 1 gpu devices held`,
		},
		"a claim that others use is allocated on a node that is gone": {
			claims: []*resourceapi.ResourceClaim{claim("shared", allocated("node-x", "gpu-0"), reservedFor("other"))}, pod: pod("p", "shared"),
			want: `0/2 nodes are available: 2 node(s) didn't satisfy plugin(s) [DeviceClaims]. ` +
				`claim team-a/shared is allocated on node node-x (which does not exist): the pod can run nowhere else`,
		},
		"two claims are allocated on different nodes": {
			claims: []*resourceapi.ResourceClaim{
				claim("first", allocated("node-a", "gpu-0"), reservedFor("other")), claim("second", allocated("node-b", "gpu-0"), reservedFor("other")),
			},
			pod: pod("p", "first", "second"),
			want: `0/2 nodes are available: claim team-a/first is allocated on node node-a, claim team-a/second is allocated on node node-b: ` +
				`no node can use all of them.`,
		},
		"a shared claim is being allocated for another pod": {
			claims: []*resourceapi.ResourceClaim{claim("wanted")}, pod: pod("p", "wanted"), flying: "pilot-uid",
			want: `0/2 nodes are available: claim team-a/wanted, which the pod uses, is being allocated: the pod is tried again with it.`,
		},
		"victims are gone, and their claim is not": {
			claims: []*resourceapi.ResourceClaim{claim("wanted", counted(2)), claim("on-b", allocated("node-b", "gpu-0"), reservedFor("victim"))},
			pod: func() *v1.Pod {
				p := pending("p", 5, "wanted")
				p.Status.NominatedNodeName = "node-b"
				return p
			}(),
			want: `0/2 nodes are available: 1 node(s) whose matching devices are held by other claims, 1 node(s) with too few devices that match the claim. ` +
				`node node-b: claim team-a/on-b released, waiting for its deallocation`,
		},
		"a device did not become ready in time": {
			claims: []*resourceapi.ResourceClaim{claim("wanted", allocated("node-b", "gpu-0"), late, reservedFor("p"))}, pod: pod("p", "wanted"),
			want: `0/2 nodes are available: 1 node(s) didn't satisfy plugin(s) [DeviceClaims], ` +
				`1 node(s) refused because an allocated claim of the pod has devices that could not be made ready. ` +
				`gave up the allocation of claim team-a/wanted, which could not be made ready: ` +
				`device gpu.example.com/node-b/gpu-0 not ready within the bindingTimeout of 10m0s after the allocation`,
		},
	} {
		t.Run(situation, func(t *testing.T) {
			w := tc.world
			if w.nodes == nil {
				w = twoNodes()
			}
			w.claims, w.objects = tc.claims, append(w.objects, tc.objects...)
			w.pods = append(tc.others, tc.pod)
			h := newHarness(t, w)
			if tc.disclosure != "" {
				h.plugin.rivals.NameAll = tc.disclosure == config.NameClaims
			}
			if tc.flying != "" {
				c := h.api.get("wanted")
				h.reserveFor(tc.flying, tracker.Reservation{Claim: c, Allocation: allocation("node-a", "gpu-0")})
			}
			if diff := cmp.Diff(tc.want, h.filterAll(tc.pod).message()); diff != "" {
				t.Errorf("message (-want +got):\n%s", diff)
			}
		})
	}
}

// reserveFor puts an allocation in flight for another pod.
func (h *harness) reserveFor(pod types.UID, reserved tracker.Reservation) {
	h.t.Helper()
	if err := h.plugin.shared.account.Tracker.Reserve(h.plugin.shared.account.Tracker.Snapshot().Usage, pod, []tracker.Reservation{reserved}); err != nil {
		h.t.Fatal(err)
	}
}

// Who loses a race learns nothing of the winner's namespace.
func TestALostRaceTellsNoNamesOfOtherNamespaces(t *testing.T) {
	yield := func(namespace string) *fence.YieldError {
		return &fence.YieldError{
			Claim: usage.ClaimRef{Namespace: testNamespace, Name: "mine", UID: "m"},
			Verdict: tracker.Verdict{
				Outcome: tracker.Lost, Other: usage.ClaimRef{Namespace: namespace, Name: "other", UID: "o"},
				Device: usage.DeviceID{Driver: testDriver, Pool: "node-a", Device: "gpu-0"},
			},
		}
	}
	const named = "claim team-a/mine gives way: claim team-b/other (UID o) was allocated earlier: device gpu.example.com/node-a/gpu-0"
	for name, tc := range map[string]struct {
		disclosure config.ClaimDisclosure
		namespace  string
		want       string
	}{
		"of another one": {
			config.CountClaims, "team-b",
			"claim team-a/mine gives way: a claim of another namespace was allocated earlier: device gpu.example.com/node-a/gpu-0",
		},
		"of another one, if it may be named": {config.NameClaims, "team-b", named},
		"of its own":                         {config.CountClaims, testNamespace, strings.Replace(named, "team-b", testNamespace, 1)},
	} {
		t.Run(name, func(t *testing.T) {
			lost := yield(tc.namespace)
			err := passage.Tell(tc.disclosure == config.NameClaims, pod("p"), []*fence.YieldError{lost}, lost)
			if diff := cmp.Diff(tc.want, err.Error()); diff != "" {
				t.Errorf("text (-want +got):\n%s", diff)
			}
			if !errors.Is(err, lost) {
				t.Error("the error does not wrap what happened")
			}
		})
	}
}

// Who reads the events of a claim learns nothing of other namespaces.
func TestTheAuditTellsNoNamesOfOtherNamespaces(t *testing.T) {
	of := func(namespace, name string) *resourceapi.ResourceClaim {
		return &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	}
	claims := []*resourceapi.ResourceClaim{of("team-a", "one"), of("team-a", "two"), of("team-b", "three"), of("team-c", "four")}
	descriptions := []string{"claim team-a/one", "claim team-a/two", "claim team-b/three", "claim team-c/four"}
	a := &auditing.Auditor{}
	if diff := cmp.Diff([]string{"claim team-a/two", "2 claims of other namespaces"}, a.TellOthers(claims, descriptions, 0)); diff != "" {
		t.Errorf("to team-a (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"3 claims of other namespaces"}, a.TellOthers(claims, descriptions, 3)); diff != "" {
		t.Errorf("to team-c (-want +got):\n%s", diff)
	}
	a.Disclosure = config.NameClaims
	if diff := cmp.Diff(descriptions[:3], a.TellOthers(claims, descriptions, 3)); diff != "" {
		t.Errorf("to team-c, with names (-want +got):\n%s", diff)
	}
}
