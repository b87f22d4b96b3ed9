// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/utils/ptr"
)

// The tests of this file replay what has gone wrong in other schedulers, see docs/known-bugs.md.

// Three pods are judged while nothing of a GPU is taken, and want half of it each.
func TestReserveGivesNoMoreSharesThanThereAre(t *testing.T) {
	const memory = "memory"
	half := func(c *resourceapi.ResourceClaim) {
		c.Spec.Devices.Requests[0].Exactly.Capacity = &resourceapi.CapacityRequirements{
			Requests: map[resourceapi.QualifiedName]resource.Quantity{memory: resource.MustParse("12Gi")},
		}
	}
	w := world{
		nodes: []*v1.Node{node("node-a")},
		objects: []runtime.Object{class(testClass), slice("node-a", device("gpu-0", func(d *resourceapi.Device) {
			d.AllowMultipleAllocations = ptr.To(true)
			d.Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{memory: {Value: resource.MustParse("24Gi")}}
		}))},
		claims: []*resourceapi.ResourceClaim{claim("one", half), claim("two", half), claim("three", half)},
	}
	h := newHarness(t, w)
	one, two, three := h.filterAll(pod("p1", "one")), h.filterAll(pod("p2", "two")), h.filterAll(pod("p3", "three"))
	one.reserve("node-a")
	two.reserve("node-a")
	status := h.plugin.Reserve(h.ctx, three.state, three.pod, "node-a")
	if status.Code() != fwk.Unschedulable || status.Message() == "" {
		t.Errorf("a third half: %v", status)
	}
	three.unreserve("node-a")
	one.unreserve("node-a")
	three.reserve("node-a")
}

// Two pods share a claim. The device counts once, for pods with claims of their own and for those without any.
func TestASharedClaimCountsOnce(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{
		claim("shared", allocated("node-b", "gpu-0"), reservedFor("p", "q")), claim("one"), claim("two", counted(2)),
	}
	w.pods = []*v1.Pod{running("p", "node-b", 0, "shared"), running("q", "node-b", 0, "shared")}
	h := newHarness(t, w)
	if status := h.filterAll(pod("without")).preFilter; status.Code() != fwk.Skip {
		t.Errorf("PreFilter of a pod without claims: %v", status)
	}
	if two := h.filterAll(pod("two", "two")); len(two.fits()) > 0 {
		t.Errorf("two devices fit on %q", two.fits())
	}
	one := h.filterAll(pod("one", "one"))
	if diff := cmp.Diff([]string{"node-a", "node-b"}, one.fits()); diff != "" {
		t.Errorf("nodes for one device (-want +got):\n%s", diff)
	}
	one.bind("node-b")
	h.wantState("one", state{[]string{"gpu-1"}, []string{"one"}})
}

// A device leaves its slice while a claim has it, and comes back.
func TestADeviceThatComesBackIsStillHeld(t *testing.T) {
	both, less := slice("node-a", device("gpu-0"), device("gpu-1")), slice("node-a", device("gpu-0"))
	w := world{
		nodes: []*v1.Node{node("node-a")}, objects: []runtime.Object{class(testClass), both},
		claims: []*resourceapi.ResourceClaim{claim("held", allocated("node-a", "gpu-1"), reservedFor("p")), claim("one"), claim("two", counted(2))},
		pods:   []*v1.Pod{running("p", "node-a", 0, "held")},
	}
	h := newHarness(t, w)
	for _, step := range []struct {
		slice *resourceapi.ResourceSlice
		why   string // two devices are refused
	}{{less, "too few devices"}, {both, "held by other claims"}} {
		if _, err := h.client.ResourceV1().ResourceSlices().Update(h.ctx, step.slice, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		h.eventually("two devices are refused: "+step.why, func() bool {
			return strings.Contains(h.filterAll(pod("two", "two")).filter["node-a"], step.why)
		})
	}
	h.filterAll(pod("one", "one")).bind("node-a")
	h.wantState("one", state{[]string{"gpu-0"}, []string{"one"}})
}
