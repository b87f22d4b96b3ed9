// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/ptr"
)

// A pod for which others can be evicted after a change, and could not before, is woken: it sleeps on otherwise, and pods of lower priority
// take the devices. Nobody else is.
func TestAPodIsWokenWhenOthersCanBeEvictedForIt(t *testing.T) {
	tainted := func(d *resourceapi.Device) {
		d.Taints = []resourceapi.DeviceTaint{{Key: "sick", Effect: resourceapi.DeviceTaintEffectNoSchedule}}
	}
	end := func(name string) func(h *harness) {
		return func(h *harness) {
			h.api.change(name, func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
			h.caughtUp(name)
		}
	}
	leave := func(name, user string) func(h *harness) {
		return func(h *harness) {
			h.api.change(name, func(c *resourceapi.ResourceClaim) {
				c.Status.ReservedFor = slices.DeleteFunc(c.Status.ReservedFor, func(ref resourceapi.ResourceClaimConsumerReference) bool { return ref.Name == user })
			})
			h.caughtUp(name)
		}
	}
	one := func(name, device string, users ...string) *resourceapi.ResourceClaim {
		return claim(name, allocated("node-b", device), reservedFor(users...))
	}
	both := func(users ...string) *resourceapi.ResourceClaim {
		return claim("both", counted(2), allocated("node-b", "gpu-0", "gpu-1"), reservedFor(users...))
	}
	equal, low := running("equal", "node-b", 5), running("low", "node-b", 1)
	for name, tc := range map[string]struct {
		claims []*resourceapi.ResourceClaim
		first  resourceapi.Device // of the node
		never  bool               // the pod must not preempt
		change func(h *harness)
		wakes  bool
	}{
		"one holder ends, the other one can be evicted": {
			claims: []*resourceapi.ResourceClaim{one("of-equal", "gpu-0", "equal"), one("of-low", "gpu-1", "low")}, change: end("of-equal"), wakes: true,
		},
		"one holder ends, the other one cannot be evicted": {
			claims: []*resourceapi.ResourceClaim{one("of-equal", "gpu-0", "equal"), one("of-low", "gpu-1", "low")}, change: end("of-low"),
		},
		"the pod must not preempt": {
			claims: []*resourceapi.ResourceClaim{one("of-equal", "gpu-0", "equal"), one("of-low", "gpu-1", "low")}, change: end("of-equal"), never: true,
		},
		"the other holder is gone": {
			claims: []*resourceapi.ResourceClaim{one("of-equal", "gpu-0", "equal"), one("of-gone", "gpu-1", "gone")}, change: end("of-equal"),
		},
		"nobody uses what the other holder has": {
			claims: []*resourceapi.ResourceClaim{one("of-equal", "gpu-0", "equal"), one("of-nobody", "gpu-1")}, change: end("of-equal"),
		},
		"of two users of a claim one goes, the other one can be evicted": {
			claims: []*resourceapi.ResourceClaim{both("equal", "low")}, change: leave("both", "equal"), wakes: true,
		},
		"of two users of a claim one goes, the other one cannot be evicted": {
			claims: []*resourceapi.ResourceClaim{both("equal", "low")}, change: leave("both", "low"),
		},
		"a taint is lifted from a device that can be had by evicting": {
			claims: []*resourceapi.ResourceClaim{one("of-low", "gpu-0", "low")}, first: device("gpu-0", tainted), wakes: true,
			change: func(h *harness) {
				s := slice("node-b", device("gpu-0"), device("gpu-1"))
				if _, err := h.client.ResourceV1().ResourceSlices().Update(h.ctx, s, metav1.UpdateOptions{}); err != nil {
					h.t.Fatal(err)
				}
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			if tc.first.Name == "" {
				tc.first = device("gpu-0")
			}
			p := pending("p", 5, "wanted")
			if tc.never {
				p.Spec.PreemptionPolicy = ptr.To(v1.PreemptNever)
			}
			w := world{
				nodes: []*v1.Node{node("node-b")}, pods: []*v1.Pod{p, equal, low}, claims: append(tc.claims, claim("wanted", counted(2))),
				objects: []runtime.Object{class(testClass), slice("node-b", tc.first, device("gpu-1"))},
			}
			h := newHarness(t, w)
			h.sleeps(p)
			tc.change(h)
			h.wakesIf(tc.wakes, "nobody can be evicted")
		})
	}
}

// After a restart a pod can have its devices before it has its node. Nobody can be evicted who has none; so the room looks at the node when
// the pod is seen on it.
func TestAPodIsWokenWhenOneOfLowerPriorityGetsItsNode(t *testing.T) {
	for name, tc := range map[string]struct {
		priority int32
		wakes    bool
	}{
		"lower priority": {1, true}, "the same priority": {5, false},
	} {
		t.Run(name, func(t *testing.T) {
			p, late := pending("p", 5, "wanted"), pending("late", tc.priority, "both")
			w := twoNodes()
			w.nodes = w.nodes[1:]
			w.pods = []*v1.Pod{p, late}
			w.claims = []*resourceapi.ResourceClaim{claim("wanted"), claim("both", counted(2), allocated("node-b", "gpu-0", "gpu-1"), reservedFor("late"))}
			h := newHarness(t, w)
			h.sleeps(p)
			bound := late.DeepCopy()
			bound.Spec.NodeName = "node-b"
			registered, err := h.plugin.EventsToRegister(h.ctx)
			if err != nil {
				t.Fatal(err)
			}
			for _, event := range registered {
				if event.Event.Resource != fwk.AssignedPod || event.Event.ActionType&fwk.Add == 0 {
					continue
				}
				if hint, err := event.QueueingHintFn(klog.FromContext(h.ctx), p, nil, bound); err != nil || hint != fwk.QueueSkip {
					t.Errorf("hint %v, error %v: the room is to look at it", hint, err)
				}
			}
			h.wakesIf(tc.wakes, "nobody can be evicted")
		})
	}
}

// Whom the pod could have had evicted in its last attempt is no news.
func TestAPodIsNotWokenForThoseWhoCouldBeEvictedBefore(t *testing.T) {
	p := pending("p", 5, "wanted")
	w := twoNodes()
	w.nodes = w.nodes[1:]
	w.pods = []*v1.Pod{p, running("low", "node-b", 1, "of-low"), running("lower", "node-b", 0, "of-lower")}
	w.claims = []*resourceapi.ResourceClaim{
		claim("wanted", counted(2)), claim("of-low", allocated("node-b", "gpu-0"), reservedFor("low")), claim("of-lower", allocated("node-b", "gpu-1"), reservedFor("lower")),
	}
	h := newHarness(t, w)
	h.sleeps(p)
	h.api.change("of-low", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
	h.caughtUp("of-low")
	if woken := h.lookedAt(); len(woken) > 0 {
		t.Errorf("woken: %v, though nothing can be had that could not before", woken)
	}
}

// Who could have been evicted in the last attempt was not if the pod would have lacked something else, of which the plugins after this one are
// not asked: the node is refused already. When there may be more of that the pod is woken.
func TestAPodIsWokenWhenWhatItLackedBesidesDevicesMayBeThere(t *testing.T) {
	larger := node("node-b")
	larger.Status.Allocatable = v1.ResourceList{v1.ResourceCPU: resource.MustParse("9")}
	for name, tc := range map[string]struct {
		event          fwk.ClusterEvent
		oldObj, newObj any
		nominated      string
		wakes          bool
	}{
		"a pod that could not be evicted goes":         {framework.EventAssignedPodDelete, running("equal", "node-b", 5), nil, "", true},
		"a pod goes that could have been evicted":      {framework.EventAssignedPodDelete, running("lower", "node-b", 0), nil, "", false},
		"a pod goes that was evicted":                  {framework.EventAssignedPodDelete, running("lower", "node-b", 0), nil, "node-b", true},
		"a pod goes where nobody was evicted":          {framework.EventAssignedPodDelete, running("lower", "node-b", 0), nil, "node-a", false},
		"a pod that could not be goes on another node": {framework.EventAssignedPodDelete, running("equal", "node-a", 5), nil, "", false},
		"the node has more":                            {fwk.ClusterEvent{Resource: fwk.Node, ActionType: fwk.UpdateNodeAllocatable}, node("node-b"), larger, "", true},
	} {
		t.Run(name, func(t *testing.T) {
			p := pending("p", 5, "wanted")
			p.Status.NominatedNodeName = tc.nominated
			w := twoNodes()
			w.nodes = w.nodes[1:]
			w.pods = []*v1.Pod{p, running("low", "node-b", 1, "of-low")}
			w.claims = []*resourceapi.ResourceClaim{claim("wanted"), claim("of-low", counted(2), allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low"))}
			h := newHarness(t, w)
			h.sleeps(p)
			registered, err := h.plugin.EventsToRegister(h.ctx)
			if err != nil {
				t.Fatal(err)
			}
			for _, event := range registered {
				if event.Event.Resource != tc.event.Resource || event.Event.ActionType&tc.event.ActionType == 0 {
					continue
				}
				if hint, err := event.QueueingHintFn(klog.FromContext(h.ctx), p, tc.oldObj, tc.newObj); err != nil || hint != fwk.QueueSkip {
					t.Errorf("hint %v, error %v: the room is to look at it", hint, err)
				}
			}
			h.wakesIf(tc.wakes, "the node has no more than before")
		})
	}
}

// Preemption evicts pods from one node. Devices that several nodes reach can be held by pods of others, and for those nobody is woken: what is
// freed would wake one after the other of those who wait, all in vain.
func TestAPodIsWokenOnlyForThoseWhoCanBeEvictedFromOneNode(t *testing.T) {
	for name, tc := range map[string]struct {
		low, lower *v1.Pod
		claims     []*resourceapi.ResourceClaim
		wakes      bool
	}{
		"both others are on one node": {
			low: running("low", "node-a", 1), lower: running("lower", "node-a", 0), wakes: true,
			claims: []*resourceapi.ResourceClaim{
				claim("of-low", allocated("fabric", "gpu-0"), reservedFor("low")), claim("of-lower", allocated("fabric", "gpu-1"), reservedFor("lower")),
			},
		},
		"the others are on two nodes": {
			low: running("low", "node-a", 1), lower: running("lower", "node-b", 0),
			claims: []*resourceapi.ResourceClaim{
				claim("of-low", allocated("fabric", "gpu-0"), reservedFor("low")), claim("of-lower", allocated("fabric", "gpu-1"), reservedFor("lower")),
			},
		},
		"the others share a claim on two nodes": {
			low: running("low", "node-a", 1), lower: running("lower", "node-b", 0),
			claims: []*resourceapi.ResourceClaim{claim("both", counted(2), allocated("fabric", "gpu-0", "gpu-1"), reservedFor("low", "lower"))},
		},
	} {
		t.Run(name, func(t *testing.T) {
			fabric := slice("fabric", device("gpu-0"), device("gpu-1"), device("gpu-2"))
			fabric.Spec.NodeName, fabric.Spec.AllNodes = nil, new(true)
			p := pending("p", 5, "wanted")
			h := newHarness(t, world{
				nodes: []*v1.Node{node("node-a"), node("node-b")}, objects: []runtime.Object{class(testClass), fabric},
				pods:   []*v1.Pod{p, tc.low, tc.lower, running("equal", "node-a", 5)},
				claims: append(tc.claims, claim("wanted", counted(3)), claim("of-equal", allocated("fabric", "gpu-2"), reservedFor("equal"))),
			})
			h.sleeps(p)
			h.api.change("of-equal", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
			h.caughtUp("of-equal")
			h.wakesIf(tc.wakes, "on no node can all be evicted")
		})
	}
}
