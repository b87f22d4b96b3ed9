// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
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
	"k8s.io/utils/ptr"
)

const otherNamespace = "team-b"

// tenants is node-a with n GPUs in shares, each of one namespace's, and the given claims.
func tenants(n int, claims ...*resourceapi.ResourceClaim) world {
	own := slice("node-a")
	own.Spec.Driver = "gpu.nvidia.com"
	for i := range n {
		own.Spec.Devices = append(own.Spec.Devices, resourceapi.Device{
			Name: fmt.Sprint("gpu-", i), AllowMultipleAllocations: ptr.To(true),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"sharedByNamespace": {BoolValue: ptr.To(true)}},
			Capacity:   map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("80Gi")}},
		})
	}
	shares := class(testClass)
	shares.Spec.Selectors[0].CEL.Expression = `device.driver == "gpu.nvidia.com"`
	return world{nodes: []*v1.Node{node("node-a")}, objects: []runtime.Object{shares, own}, claims: claims}
}

// asking is a claim for a share, of testNamespace or, if its name begins with b, of otherNamespace.
func asking(name string, change ...func(*resourceapi.ResourceClaim)) *resourceapi.ResourceClaim {
	c := claim(name, change...)
	c.Namespace = namespaceOf(name)
	c.Spec.Devices.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{
		Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("10Gi")},
	}
	return c
}

// sharing gives a claim a share of a GPU of node-a, and users.
func sharing(device string, pods ...string) func(*resourceapi.ResourceClaim) {
	return func(c *resourceapi.ResourceClaim) {
		allocated("node-a", device)(c)
		r := &c.Status.Allocation.Devices.Results[0]
		r.Driver, r.ShareID = "gpu.nvidia.com", ptr.To(types.UID(c.Name+"-share"))
		r.ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("10Gi")}
		reservedFor(pods...)(c)
	}
}

func namespaceOf(name string) string {
	if name[0] == 'b' {
		return otherNamespace
	}
	return testNamespace
}

// tenant is a pod with the claim of its name.
func tenant(name string) *v1.Pod {
	p := pod(name, name)
	p.Namespace = namespaceOf(name)
	return p
}

// has returns the devices of the claim as the tracker knows it.
func (h *harness) has(name string) []string {
	h.t.Helper()
	c, err := h.plugin.shared.account.Tracker.Get(namespaceOf(name), name)
	if err != nil {
		h.t.Fatal(err)
	}
	if allocation, _ := h.plugin.shared.account.Tracker.Pending(c.UID); allocation != nil {
		c = c.DeepCopy()
		c.Status.Allocation = allocation
	}
	return devicesOf(c)
}

// Two tenants get a GPU each, the second one also where the first one's share is in flight, or was allocated by a scheduler that has ended.
func TestTwoTenantsGetAGPUEach(t *testing.T) {
	for name, between := range map[string]func(h *harness, w world, a *attempt) *harness{
		"in flight": func(h *harness, _ world, a *attempt) *harness { a.reserve("node-a"); return h },
		"bound":     func(h *harness, _ world, a *attempt) *harness { a.bind("node-a"); return h },
		"after a restart": func(h *harness, w world, a *attempt) *harness {
			a.bind("node-a")
			h.cancel()
			return startHarness(h.t, w, h.client, h.api)
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := tenants(2, asking("a"), asking("b"), asking("a-2"))
			w.pods = []*v1.Pod{tenant("a"), tenant("b"), tenant("a-2")}
			h := newHarness(t, w)
			h = between(h, w, h.filterAll(w.pods[0]))
			for _, next := range w.pods[1:] {
				h.filterAll(next).reserve("node-a")
			}
			got := [][]string{h.has("a"), h.has("b"), h.has("a-2")}
			if diff := cmp.Diff([][]string{{"gpu-0"}, {"gpu-1"}, {"gpu-0"}}, got); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}
}

// Both are decided before either is reserved: the second one is decided again, and refused if there is nothing else.
func TestTwoTenantsInFlightDoNotBothGetAGPU(t *testing.T) {
	for gpus, want := range map[int][]string{1: nil, 2: {"gpu-1"}} {
		w := tenants(gpus, asking("a"), asking("b"))
		w.pods = []*v1.Pod{tenant("a"), tenant("b")}
		h := newHarness(t, w)
		first, second := h.filterAll(w.pods[0]), h.filterAll(w.pods[1])
		if diff := cmp.Diff([]string{"node-a"}, second.fits()); diff != "" {
			t.Fatalf("%d GPUs: the second one fits (-want +got):\n%s", gpus, diff)
		}
		first.reserve("node-a")
		status := h.plugin.Reserve(h.ctx, second.state, second.pod, "node-a")
		if diff := cmp.Diff(want, h.has("b")); diff != "" || status.IsSuccess() != (want != nil) {
			t.Errorf("%d GPUs: Reserve says %v; devices of the second one (-want +got):\n%s", gpus, status, diff)
		}
	}
}

// A pod is woken by the last share of the other namespace, and not by one before.
func TestATenantIsWokenByTheLastShareOfAnother(t *testing.T) {
	w := tenants(1, asking("a", sharing("gpu-0", "a")), asking("a-2", sharing("gpu-0", "a-2")), asking("b"))
	w.pods = []*v1.Pod{tenant("b")}
	h := newHarness(t, w)
	a := h.filterAll(w.pods[0])
	if diff := cmp.Diff(map[string]string{"node-a": "node(s) whose matching devices are held by other claims"}, a.filter); diff != "" {
		t.Fatalf("Filter (-want +got):\n%s", diff)
	}
	a.postFilter()
	h.activator.taken()
	free := func(name string) {
		h.api.change(name, func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
		h.eventually("the share is gone", func() bool { return len(h.has(name)) == 0 })
	}
	free("a")
	if got := h.lookedAt(); len(got) > 0 {
		t.Errorf("woken: %v, while the other tenant has a share", got)
	}
	free("a-2")
	h.wakes("b")
}

// Nobody is evicted for a GPU that stays another namespace's. If all who share it can be evicted, all are.
func TestPreemptionTakesAllSharesOfAnotherNamespaceOrNone(t *testing.T) {
	const preemptor = 5
	tests := map[string]struct {
		priorities [2]int32 // of a and a-2
		code       fwk.Code
		fits       map[string]bool // without one of them, or both
	}{
		"both can be evicted": {[2]int32{1, 2}, fwk.Unschedulable, map[string]bool{"a": false, "a-2": false, "both": true}},
		"one can be evicted":  {[2]int32{1, 9}, fwk.UnschedulableAndUnresolvable, map[string]bool{"a": false}},
		"none can be evicted": {[2]int32{9, 9}, fwk.UnschedulableAndUnresolvable, nil},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := tenants(1, asking("a", sharing("gpu-0", "a")), asking("a-2", sharing("gpu-0", "a-2")), asking("b"))
			b := tenant("b")
			b.Spec.Priority = ptr.To(int32(preemptor))
			w.pods = []*v1.Pod{running("a", "node-a", tc.priorities[0], "a"), running("a-2", "node-a", tc.priorities[1], "a-2"), b}
			h := newHarness(t, w)
			a := h.filterAll(b)
			if got := a.statuses.Get("node-a").Code(); got != tc.code {
				t.Errorf("Filter says %v, want %v", got, tc.code)
			}
			for who, fits := range tc.fits {
				steps := []string{who}
				if who == "both" {
					steps = []string{"a", "a-2"}
				}
				if got := a.dryRun("node-a", byName(w.pods...), steps...); got.IsSuccess() != fits {
					t.Errorf("without %s: %v, want fits %v", who, got, fits)
				}
			}
		})
	}
}

// Another scheduler, which does not know of namespaces, has given the GPU to another tenant first: the claim gives way at the fence.
func TestATenantGivesWayAtTheFence(t *testing.T) {
	w := tenants(1, asking("a"), asking("b"))
	w.pods, w.fence = []*v1.Pod{tenant("b")}, fenced().fence
	h := newHarness(t, w)
	written := func() *resourceapi.ResourceClaim {
		c, err := h.client.ResourceV1().ResourceClaims(otherNamespace).Get(h.ctx, "b", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	h.api.hold()
	h.api.change("a", sharing("gpu-0", "a"))
	a := h.filterAll(w.pods[0]).reserve("node-a")
	done := a.preBindAsync()
	h.eventually("the claim is written", func() bool { return written().Status.Allocation != nil })
	h.api.release()
	want := "a claim of another namespace was allocated earlier: device gpu.nvidia.com/node-a/gpu-0: its shares are one namespace's"
	if status := <-done; status.IsSuccess() || !strings.Contains(status.Message(), want) {
		t.Errorf("PreBind: %v, want one with %q", status, want)
	}
	a.unreserve("node-a")
	if c := written(); c.Status.Allocation != nil || len(c.Status.ReservedFor) > 0 {
		t.Errorf("the claim has %v, for %v", devicesOf(c), usersOf(c))
	}
}

// Two namespaces have shares of one GPU from a time when the node allowed it, and the scheduler is started again. Who uses a claim that runs goes on
// using it; what has not come into use gives way.
func TestAClaimInUseDoesNotGiveWayToAnotherTenant(t *testing.T) {
	for name, node := range map[string]string{"in use": "node-a", "not in use": ""} {
		t.Run(name, func(t *testing.T) {
			w := tenants(1, asking("a", sharing("gpu-0", "a")), asking("b", sharing("gpu-0", "b")))
			user, next := tenant("b"), tenant("b")
			user.Spec.NodeName = node
			next.Name, next.UID = "b-2", "b-2-uid"
			w.pods, w.fence = []*v1.Pod{user, next}, fenced().fence
			h := newHarness(t, w)
			status := h.filterAll(next).reserve("node-a").preBind("node-a")
			if status.IsSuccess() != (node != "") {
				t.Errorf("PreBind: %v", status)
			}
		})
	}
}
