// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	fwk "k8s.io/kube-scheduler/framework"
	testingclock "k8s.io/utils/clock/testing"

	"stowage.dev/stowage/pkg/usage"
)

func attachable(name string) resourceapi.Device {
	return device(name, func(d *resourceapi.Device) {
		d.BindingConditions, d.BindingFailureConditions = []string{"Attached"}, []string{"Broken"}
	})
}

// tooLate lets the pod's device not become ready on the node in time, and returns which one that was.
func (h *harness) tooLate(p *v1.Pod, node string) []string {
	h.t.Helper()
	clock := testingclock.NewFakeClock(time.Now())
	h.plugin.binder.Clock = clock
	a := h.filterAll(p).reserve(node)
	done := make(chan *fwk.Status)
	go func() { done <- a.preBind(node) }()
	h.eventually("PreBind waits", clock.HasWaiters)
	chosen := devicesOf(h.api.get("c"))
	h.eventually("PreBind gives up", func() bool {
		clock.Step(h.plugin.binder.Timeout) // once more if it had looked at the clock before, and began to wait after
		select {
		case status := <-done:
			if status.IsSuccess() {
				h.t.Error("PreBind succeeded")
			}
			return true
		default:
			return false
		}
	})
	a.unreserve(node)
	h.caughtUp("c")
	return chosen
}

// TestPodIsTriedElsewhereFirst lets one device after the other take too long. Each is tried once before one is tried again.
func TestPodIsTriedElsewhereFirst(t *testing.T) {
	w := twoNodes()
	w.objects = append(w.objects[:1:1], slice("node-a", attachable("gpu-0")), slice("node-b", attachable("gpu-0"), attachable("gpu-1")))
	w.claims = []*resourceapi.ResourceClaim{claim("c")}
	h := newHarness(t, w)
	p := pod("p", "c")
	refused := func(want map[string]string) {
		t.Helper()
		if diff := cmp.Diff(want, h.filterAll(p).filter); diff != "" {
			t.Errorf("reasons of Filter (-want +got):\n%s", diff)
		}
	}
	fails := func(node string, want string) {
		t.Helper()
		if diff := cmp.Diff([]string{want}, h.tooLate(p, node)); diff != "" {
			t.Errorf("devices on %s (-want +got):\n%s", node, diff)
		}
	}
	fails("node-b", "gpu-0")
	refused(map[string]string{"node-a": "", "node-b": ""})
	fails("node-b", "gpu-1")
	refused(map[string]string{"node-a": "", "node-b": reasonFailed})
	if other := h.filterAll(pod("q", "c")); len(other.fits()) != 2 {
		t.Errorf("another pod is refused: %v", other.filter)
	}
	h.activator.taken()
	fails("node-a", "gpu-0")
	a := h.filterAll(p)
	if len(a.fits()) > 0 {
		t.Errorf("after all devices failed, some are tried at once: %v", a.filter)
	}

	// There are no others: nobody is evicted, all may be tried again, and nothing else has to happen for that.
	if status := a.postFilter(); status.Code() != fwk.UnschedulableAndUnresolvable {
		t.Errorf("PostFilter: %v, want that no other plugin is asked", status)
	}
	if diff := cmp.Diff([]string{"p"}, h.activator.taken()); diff != "" {
		t.Errorf("pods woken (-want +got):\n%s", diff)
	}
	refused(map[string]string{"node-a": "", "node-b": ""})

	fails("node-b", "gpu-0")
	h.plugin.shared.memory.Failed.PodHandler().OnDelete(p)
	if failed := h.plugin.shared.memory.Failed.Of(p.UID); failed != nil {
		t.Errorf("what failed for a pod that is gone is kept: %v", failed.Devices)
	}
}

// Who gives up on a pod that waits for its devices deletes it: they fail afterwards, for a pod that is gone.
func TestWhatFailsForPodsThatAreGoneIsForgotten(t *testing.T) {
	w := twoNodes()
	w.objects = append(w.objects[:1:1], slice("node-a", attachable("gpu-0")))
	w.claims = []*resourceapi.ResourceClaim{claim("c")}
	h := newHarness(t, w)
	var all []*v1.Pod
	for i := range 3 {
		gone := pod(fmt.Sprint("gone-", i), "c")
		all = append(all, gone)
		h.plugin.shared.memory.Failed.PodHandler().OnDelete(gone)
		h.tooLate(gone, "node-a")
	}
	for _, gone := range all[:2] { // for the last one nobody has looked since
		if h.plugin.shared.memory.Failed.Of(gone.UID) != nil {
			t.Errorf("what failed is kept for pod %s, which does not exist", gone.Name)
		}
	}
}

// A device of a fabric that failed is not taken on another node either. A node on which several failed is left alone for
// as long as there are others.
func TestDevicesOfAFabricAreTriedElsewhere(t *testing.T) {
	w := twoNodes()
	fabric := slice("fabric", attachable("gpu-0"), attachable("gpu-1"), attachable("gpu-2"), attachable("gpu-3"), attachable("gpu-4"))
	fabric.Spec.NodeName, fabric.Spec.AllNodes = nil, new(true)
	w.objects = []runtime.Object{class(testClass), fabric}
	w.claims = []*resourceapi.ResourceClaim{claim("c")}
	h := newHarness(t, w)
	p := pod("p", "c")
	prefers := func() string {
		t.Helper()
		a := h.filterAll(p)
		if len(a.fits()) != 2 {
			t.Fatalf("not all nodes fit: %v", a.filter)
		}
		scores := map[string]int64{}
		for _, node := range h.nodes {
			score, status := h.plugin.Score(h.ctx, a.state, p, node)
			if !status.IsSuccess() {
				t.Fatal(status)
			}
			scores[node.Node().Name] = score
		}
		switch {
		case scores["node-a"] > scores["node-b"]:
			return "node-a"
		case scores["node-a"] < scores["node-b"]:
			return "node-b"
		}
		return ""
	}
	if got := prefers(); got != "" {
		t.Errorf("the first attempt prefers %s", got)
	}
	var chosen []string
	for i, node := range []string{"node-a", "node-b", "node-a", "node-a"} {
		if i == 1 && prefers() != "node-b" {
			t.Error("after node-a failed, node-b is not preferred")
		}
		if i == 2 && prefers() != "" {
			t.Error("after both failed, one is preferred")
		}
		chosen = append(chosen, h.tooLate(p, node)...)
	}
	if diff := cmp.Diff([]string{"gpu-0", "gpu-1", "gpu-2", "gpu-3"}, chosen); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]string{"node-a": reasonFailed, "node-b": ""}, h.filterAll(p).filter); diff != "" {
		t.Errorf("reasons of Filter after three failures on a node (-want +got):\n%s", diff)
	}
}

// What failed for the pod is what it needs others evicted for if nothing else can be had: then it is tried again.
func TestPreemptionLooksAtDevicesThatFailed(t *testing.T) {
	low := running("low", "node-b", 1, "held")
	p := pending("p", 5, "c")
	w := oneNode()
	w.claims = []*resourceapi.ResourceClaim{claim("c"), claim("held", counted(2), allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low"))}
	w.pods = []*v1.Pod{low, p}
	h := newHarness(t, w)
	both := []usage.DeviceID{{Driver: testDriver, Pool: "node-b", Device: "gpu-0"}, {Driver: testDriver, Pool: "node-b", Device: "gpu-1"}}
	h.plugin.shared.memory.Failed.Add(p, "node-b", both)
	a := h.filterAll(p)
	if status := a.h.plugin.Filter(h.ctx, a.state, p, h.nodes[0]); status.Code() != fwk.Unschedulable {
		t.Errorf("Filter: %v, want one that preemption may resolve", status)
	}
	if status := a.dryRun("node-b", byName(low), "low"); !status.IsSuccess() {
		t.Errorf("the node is refused without the pod that holds the devices: %v", status)
	}
	if a.postFilter().Code() == fwk.UnschedulableAndUnresolvable {
		t.Error("PostFilter ends the attempt though others hold the devices")
	}
}

// Pods of a group prefer other devices, but are not refused.
func TestGroupsAvoidDevicesThatFailed(t *testing.T) {
	for name, tc := range map[string]struct {
		failed []string
		want   string
	}{
		"another one is left": {failed: []string{"gpu-0"}, want: "gpu-1"},
		"none is left":        {failed: []string{"gpu-0", "gpu-1"}, want: "gpu-0"},
	} {
		t.Run(name, func(t *testing.T) {
			w := oneNode()
			w.claims = []*resourceapi.ResourceClaim{claim("c")}
			h := newHarness(t, w)
			p := pod("p", "c")
			for _, device := range tc.failed {
				h.plugin.shared.memory.Failed.Add(p, "node-b", []usage.DeviceID{{Driver: testDriver, Pool: "node-b", Device: device}})
			}
			g := h.tryGroup(p)
			g.wantNodes("node-b")
			g.forGood(0).bind("node-b")
			if diff := cmp.Diff([]string{tc.want}, devicesOf(h.api.get("c"))); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}
}

// A pod of a group that avoids what failed for it may take what another one needs. It forgets if the group fits then, and only then:
// a group that cannot be, or not yet, would make it forget again and again.
func TestAGroupThatDoesNotFitForgetsWhatFailed(t *testing.T) {
	h100 := withSelector(`device.attributes["gpu.example.com"].model == "H100"`)
	none := withSelector(`device.attributes["gpu.example.com"].model == "H200"`)
	for name, tc := range map[string]struct {
		// claims are those of the pods p, q, r and s, one each. p and q avoid gpu-0 and gpu-2.
		claims []*resourceapi.ResourceClaim
		// nodes are where the pods go, attempt by attempt, and forget tells whether p has forgotten after each.
		nodes  [][]string
		forget []bool
	}{
		"another pod needs what one took": {
			claims: []*resourceapi.ResourceClaim{claim("any"), claim("special", h100)},
			nodes:  [][]string{{"node-b", ""}, {"node-b", "node-b"}},
			forget: []bool{true},
		},
		"another pod can never be": {
			claims: []*resourceapi.ResourceClaim{claim("any"), claim("impossible", none)},
			nodes:  [][]string{{"node-b", ""}, {"node-b", ""}, {"node-b", ""}},
			forget: []bool{false, false},
		},
		"another pod needs what one took, and a third can never be": {
			claims: []*resourceapi.ResourceClaim{claim("any"), claim("special", h100), claim("impossible", none)},
			nodes:  [][]string{{"node-b", "", ""}, {"node-b", "", ""}},
			forget: []bool{false},
		},
		"there are too few devices": {
			claims: []*resourceapi.ResourceClaim{claim("any"), claim("special", h100), claim("third"), claim("fourth")},
			nodes:  [][]string{{"node-b", "", "node-b", "node-b"}, {"node-b", "", "node-b", "node-b"}},
			forget: []bool{false},
		},
		"something is given up first": {
			claims: []*resourceapi.ResourceClaim{
				claim("any"), claim("special", h100), claim("kept", allocated("node-b", "gpu-2"), reservedFor("r")),
			},
			nodes:  [][]string{{"node-b", "", "node-b"}, {"node-b", "", "node-b"}, {"node-b", "node-b", "node-b"}},
			forget: []bool{false, true},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := oneNode()
			a100 := withModel("A100")
			w.objects[1] = slice("node-b", device("gpu-0", a100), device("gpu-1", withModel("H100")), device("gpu-2", a100))
			w.claims = tc.claims
			for i, c := range tc.claims {
				w.pods = append(w.pods, pod([]string{"p", "q", "r", "s"}[i], c.Name))
			}
			h := newHarness(t, w)
			p, q := w.pods[0], w.pods[1]
			for _, member := range []*v1.Pod{p, q} {
				for _, device := range []string{"gpu-0", "gpu-2"} {
					h.plugin.shared.memory.Failed.Add(member, "node-b", []usage.DeviceID{{Driver: testDriver, Pool: "node-b", Device: device}})
				}
			}
			for i, nodes := range tc.nodes {
				g := h.tryGroup(w.pods...)
				g.wantNodes(nodes...)
				if i == len(tc.forget) {
					break
				}
				_, status := g.postFilter(func(ctx context.Context) (*fwk.PodGroupAssignments, *fwk.Status) {
					if whatIf, err := h.plugin.shared.common.Trial.WhatIf(h.plugin.handle); err != nil || !whatIf.IsDryRun() {
						t.Errorf("what PodGroupPostFilter tries counts as an attempt; error: %v", err)
					}
					return g.fitsAll(ctx)
				})
				if forgotten := h.plugin.shared.memory.Failed.Of(p.UID) == nil; forgotten != tc.forget[i] {
					t.Errorf("attempt %d: p has forgotten: %t, want %t", i, forgotten, tc.forget[i])
				}
				if tc.forget[i] && status.Code() != fwk.UnschedulableAndUnresolvable {
					t.Errorf("attempt %d: PodGroupPostFilter: %v, though the group may fit now", i, status)
				}
			}
			if h.plugin.shared.memory.Failed.Of(q.UID) == nil {
				t.Error("a pod forgets what failed for it though that kept nobody away: it has found no node itself")
			}
		})
	}
}
