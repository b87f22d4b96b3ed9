// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
)

var errUnreachable = errors.New("no route to host")

// binds has the API say that the pod is bound, which the scheduler does not hear of.
func (h *harness) binds(p *v1.Pod) {
	h.t.Helper()
	if err := h.client.Tracker().Update(v1.SchemeGroupVersion.WithResource("pods"), boundPod(p.DeepCopy(), p.UID), testNamespace); err != nil {
		h.t.Fatal(err)
	}
}

// A pod is tried again although it is bound, since the informer lags behind. Nothing is taken from it, and nobody is evicted for it.
func TestPostFilterTakesNothingFromABoundPod(t *testing.T) {
	failing := func(h *harness) {
		h.api.onRequest(func(request string) error {
			if request == "get pods" {
				return errUnreachable
			}
			return nil
		})
	}
	tests := map[string]struct {
		users    []string
		api      func(h *harness, p *v1.Pod)
		wantCode fwk.Code
		want     string
		gone     bool
	}{
		"bound":      {[]string{"p"}, func(h *harness, p *v1.Pod) { h.binds(p) }, fwk.UnschedulableAndUnresolvable, "pod team-a/p is bound to node node-a already", false},
		"not bound":  {[]string{"p"}, func(*harness, *v1.Pod) {}, fwk.UnschedulableAndUnresolvable, "gave up the allocation", true},
		"not known":  {[]string{"p"}, func(h *harness, _ *v1.Pod) { failing(h) }, fwk.Error, errUnreachable.Error(), false},
		"not in use": {nil, func(h *harness, _ *v1.Pod) { failing(h) }, fwk.UnschedulableAndUnresolvable, "gave up the allocation", true},
		"gone": {[]string{"p"}, func(h *harness, p *v1.Pod) {
			if err := h.client.Tracker().Delete(v1.SchemeGroupVersion.WithResource("pods"), p.Namespace, p.Name); err != nil {
				h.t.Fatal(err)
			}
		}, fwk.UnschedulableAndUnresolvable, "gave up the allocation", true},
		"bound is another one of its name": {[]string{"p"}, func(h *harness, p *v1.Pod) {
			other := p.DeepCopy()
			other.UID = "p2-uid"
			h.binds(other)
		}, fwk.UnschedulableAndUnresolvable, "gave up the allocation", true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), reservedFor(tc.users...))}
			p := pod("p", "c")
			w.pods = []*v1.Pod{p}
			h := newHarness(t, w)
			a := h.filterAll(p)
			tc.api(h, p)
			status := a.postFilter()
			if status.Code() != tc.wantCode || !strings.Contains(status.Message(), tc.want) {
				t.Errorf("status %v (%v), want %v with %q", status, status.Code(), tc.wantCode, tc.want)
			}
			if gone := h.api.get("c").Status.Allocation == nil; gone != tc.gone {
				t.Errorf("the allocation was given up: %t", gone)
			}
		})
	}
}

// What could not be given up is tried again, though nothing happens: its devices would be held for a pod that sleeps.
func TestWhatCouldNotBeGivenUpIsTriedAgain(t *testing.T) {
	conflict := apierrors.NewConflict(resourceapi.Resource("resourceclaims"), "c", errors.New("it has changed"))
	for name, tc := range map[string]struct {
		request string
		err     error
	}{
		"it is not known whether the pod is bound": {"get pods", errUnreachable},
		"the write has no answer":                  {"update/status", errUnreachable},
		"the write is a conflict":                  {"update/status", conflict},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), reservedFor("p"))}
			p := pod("p", "c")
			w.pods, w.room.RetryAfter = []*v1.Pod{p}, time.Millisecond
			h := newHarness(t, w)
			fails := true
			h.api.onRequest(func(request string) error {
				if fails && request == tc.request {
					return tc.err
				}
				return nil
			})
			status := h.filterAll(p).postFilter()
			if status.IsSuccess() || h.api.get("c").Status.Allocation == nil {
				t.Fatalf("given up: %v", status)
			}
			h.eventually("the pod is woken", func() bool { return len(h.activator.taken()) > 0 })
			fails = false
			h.filterAll(p).postFilter()
			if h.api.get("c").Status.Allocation != nil {
				t.Error("the allocation is kept")
			}
		})
	}
}

// The same for a claim of the pod's group, which all its pods use.
func TestGroupWithABoundPodKeepsItsClaim(t *testing.T) {
	withGroups(t)
	ended := func(p *v1.Pod) *v1.Pod { p.Status.Phase = v1.PodSucceeded; return p }
	tests := map[string]struct {
		other    *v1.Pod // in the API, besides the group's pods without a node
		fault    error
		wantCode fwk.Code
		gone     bool
	}{
		"a pod of the group is bound":                     {other: member(running("r", "node-a", 0, "common")), wantCode: fwk.UnschedulableAndUnresolvable},
		"a pod of another group is":                       {other: running("r", "node-a", 0, "common"), wantCode: fwk.UnschedulableAndUnresolvable, gone: true},
		"a pod of the group was and is done":              {other: ended(member(running("r", "node-a", 0, "common"))), wantCode: fwk.UnschedulableAndUnresolvable, gone: true},
		"a bound pod of the group does not use the claim": {other: member(running("r", "node-a", 0, "another")), wantCode: fwk.UnschedulableAndUnresolvable, gone: true},
		"it is not known":                                 {other: running("r", "node-a", 0, "common"), fault: errUnreachable, wantCode: fwk.Error},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{
				claim("common", allocated("node-a", "gpu-0"), forGroup), claim("own", withSelector(`device.attributes["gpu.example.com"].model == "H100"`)),
			}
			w.groups = []*schedulingapi.PodGroup{group("common")}
			w.pods = []*v1.Pod{member(pod("p", "common")), member(pod("q", "common", "own"))}
			h := newHarness(t, w)
			g := h.tryGroup(w.pods...)
			g.wantNodes("node-a", "")
			if err := h.client.Tracker().Add(tc.other); err != nil {
				t.Fatal(err)
			}
			h.client.PrependReactor("list", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
				// The fake API does not know these fields.
				fields := action.(clienttesting.ListAction).GetListRestrictions().Fields
				if want := "spec.nodeName!=,status.phase!=Failed,status.phase!=Succeeded"; fields.String() != want {
					t.Errorf("fields %q, want %q", fields, want)
				}
				if tc.other.Status.Phase == v1.PodSucceeded {
					return true, &v1.PodList{Items: []v1.Pod{*w.pods[0]}}, tc.fault
				}
				return tc.fault != nil, nil, tc.fault
			})
			_, status := g.postFilter(g.fitsAll)
			if gone := h.api.get("common").Status.Allocation == nil; gone != tc.gone || status.Code() != tc.wantCode {
				t.Errorf("the allocation was given up: %t, status %v", gone, status)
			}
		})
	}
}

// The same for claims that were made for extended resources, which PostFilter gives up, and PreBind where they are not what the pod needs.
func TestExtendedClaimIsNotTakenFromABoundPod(t *testing.T) {
	p := containersPod("a=2")
	w := extendedWorld(p)
	w.claims = []*resourceapi.ResourceClaim{leftover(p, allocated("node-x", "gpu-0", "gpu-1"))}
	h := newHarness(t, w)
	a := h.filterAll(p)
	h.binds(p)
	if status := a.postFilter(); status.Code() != fwk.UnschedulableAndUnresolvable || !strings.Contains(status.Message(), "bound to node node-a already") {
		t.Errorf("PostFilter: %v", status)
	}
	if claims := h.extendedClaims(); len(claims) != 1 || len(devicesOf(claims[0])) != 2 {
		t.Errorf("claims %v, want the one that the pod runs with", claims)
	}

	// Two claims, of which PreBind removes the second one.
	second := leftover(p, allocated("node-a", "gpu-0"))
	second.Name, second.UID = "p-extended-resources-zzz", "zzz-uid"
	w.claims = []*resourceapi.ResourceClaim{leftover(p), second}
	h = newHarness(t, w)
	a = h.filterAll(p).reserve("node-b")
	h.binds(p)
	if status := a.preBind("node-b"); status.IsSuccess() || !strings.Contains(status.Message(), "bound to node node-a already") {
		t.Errorf("PreBind: %v", status)
	}
	a.unreserve("node-b")
	if claims := h.extendedClaims(); len(claims) != 2 || slices.ContainsFunc(claims, func(c *resourceapi.ResourceClaim) bool { return len(devicesOf(c)) == 0 }) {
		t.Errorf("claims %v, want both as they were", claims)
	}
}

// A bound pod whose resize its kubelet has deferred is tried again. It has its devices, so nothing of it is for this plugin.
func TestDeferredResizeIsLeftToOthers(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), reservedFor("p"))}
	p := running("p", "node-a", 0, "c")
	p.Status.Conditions = []v1.PodCondition{{Type: v1.PodResizePending, Status: v1.ConditionTrue, Reason: v1.PodReasonDeferred}}
	w.pods = []*v1.Pod{p}
	h := newHarness(t, w)
	a := &attempt{h: h, pod: p, state: framework.NewCycleState()}
	if limit, status := h.plugin.PreFilter(h.ctx, a.state, p, h.nodes); limit != nil || !status.IsSkip() {
		t.Errorf("PreFilter: %v, %v, want that the plugin is skipped", limit, status)
	}
	for _, n := range h.nodes {
		if status := h.plugin.Filter(h.ctx, a.state, p, n); !status.IsSuccess() {
			t.Errorf("Filter of node %s: %v", n.Node().Name, status)
		}
	}
	if status := a.postFilter(); status.Code() != fwk.Unschedulable || status.Message() != "" {
		t.Errorf("PostFilter: %v, want that it is left to others", status)
	}
	if h.api.get("c").Status.Allocation == nil {
		t.Error("the allocation is gone")
	}
	if h.plugin.shared.waiting.IsWaiting(p.UID) {
		t.Error("a pod that has its devices waits for some")
	}
}
