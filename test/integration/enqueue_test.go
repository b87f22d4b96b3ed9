// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/pkg/plugins/deviceclaims"
)

// PreEnqueue: a pod whose claim does not exist must not cost a scheduling attempt.
func TestPodIsNotTriedBeforeItsClaimExists(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", gpus(h100, 2)...)

	w.addPod("early", withClaim("late"))
	// The queue is first in, first out: when the second pod is bound, the first one's turn would have been.
	w.addClaim("ready", spec(w.exactly("gpu", 1)))
	w.addPod("second", withClaim("ready"))
	w.awaitBound("second")
	if n := s.probe.of("early").attempts; n != 0 {
		t.Errorf("the pod was tried %d times without its claim", n)
	}

	w.addClaim("late", spec(w.exactly("gpu", 1)))
	w.awaitBound("early")
}

// The condition of a pod that PreEnqueue keeps back names the claim that is missing, follows what changes, and goes when the pod is let in.
func TestTheConditionOfAGatedPodStaysTrue(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", gpus(h100, 4)...)
	waitsFor := func(claim string) func(*v1.Pod) bool {
		return func(p *v1.Pod) bool {
			c := scheduledCondition(p)
			return c != nil && c.Status == v1.ConditionFalse && c.Reason == deviceclaims.ReasonWaitingForClaim &&
				c.Message == "claim "+w.name+"/"+claim+" does not exist"
		}
	}
	w.addPod("first", withClaim("one"), withClaim("two"))
	w.addPod("second", withClaim("three"))
	w.awaitPod("first", "waiting for its first claim", waitsFor("one"))
	second := w.awaitPod("second", "waiting for its claim", waitsFor("three"))

	// A claim comes, goes, and comes again.
	w.addClaim("one", spec(w.exactly("gpu", 1)))
	w.awaitPod("first", "waiting for its second claim", waitsFor("two"))
	w.must(w.client.ResourceV1().ResourceClaims(w.name).Delete(w.ctx, "one", metav1.DeleteOptions{}), "deleting a claim")
	w.awaitPod("first", "waiting for its first claim again", waitsFor("one"))
	w.addClaim("one", spec(w.exactly("gpu", 1)))
	w.addClaim("two", spec(w.exactly("gpu", 1)))
	letIn := func(p *v1.Pod) bool {
		c := scheduledCondition(p)
		return p.Spec.NodeName != "" && c.Status == v1.ConditionTrue && c.Reason == "" && c.Message == ""
	}
	w.awaitPod("first", "bound, and its condition true", letIn)

	// Who still waits was not written meanwhile.
	now := w.awaitPod("second", "still waiting", waitsFor("three"))
	if now.ResourceVersion != second.ResourceVersion {
		t.Errorf("the second pod was written: %+v, before %+v", now.Status, second.Status)
	}
	w.addClaim("three", spec(w.exactly("gpu", 1)))
	w.awaitPod("second", "bound, and its condition true", letIn)
}

// PreEnqueue knows a claim by its owner, not by its name alone.
func TestPodDoesNotGetTheClaimOfAnotherPod(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", gpus(h100, 2)...)

	// A claim with the name that the second pod's status tells, but generated for the first.
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	w.addPod("owner", withTemplate("one"))
	theirs := claimName(w.awaitBound("owner"), "one")

	thief := w.newPod("thief", withTemplate("missing"))
	thief, err := w.client.CoreV1().Pods(w.name).Create(w.ctx, thief, metav1.CreateOptions{})
	w.must(err, "creating the second pod")
	thief.Status.ResourceClaimStatuses = []v1.PodResourceClaimStatus{{Name: "missing", ResourceClaimName: &theirs}}
	thief, err = w.client.CoreV1().Pods(w.name).UpdateStatus(w.ctx, thief, metav1.UpdateOptions{})
	w.must(err, "naming the wrong claim in the second pod's status")

	w.awaitEvent(thief, theirs, "was not created for")
	if reserved := w.claim(theirs).Status.ReservedFor; len(reserved) != 1 || reserved[0].Name != "owner" {
		t.Errorf("claim %s is reserved for %v, want only for its owner", theirs, reserved)
	}
}

// EventsToRegister and its hints: each event that can help a waiting pod wakes it. Without the event's registration
// the pod would wait for the periodic flush, minutes after the test has given up.
func TestWaitingPodIsWokenBy(t *testing.T) {
	t.Parallel()
	s := startScheduler(t, "wake-up", schedulerSetup{})

	tests := map[string]struct {
		// before makes the world in which the pod "waiting", with claim "wanted", cannot be scheduled.
		before func(w *world)
		why    string
		// event is what then happens.
		event func(w *world)
	}{
		"a class being created": {
			before: func(w *world) {
				w.addNode("a", gpus(h100, 1)...)
				request := w.exactly("gpu", 1)
				request.Exactly.DeviceClassName = w.name + "-late"
				w.addClaim("wanted", spec(request))
			},
			why:   "-late",
			event: func(w *world) { w.addClass(w.name+"-late", `device.driver == "$DRIVER"`) },
		},
		"a class that changes": {
			before: func(w *world) {
				w.addNode("a", gpus(h100, 1)...)
				w.addClass(w.name+"-none", `false`)
				request := w.exactly("gpu", 1)
				request.Exactly.DeviceClassName = w.name + "-none"
				w.addClaim("wanted", spec(request))
			},
			event: func(w *world) {
				class, err := w.client.ResourceV1().DeviceClasses().Get(w.ctx, w.name+"-none", metav1.GetOptions{})
				w.must(err, "getting the class")
				class.Spec.Selectors = nil
				_, err = w.client.ResourceV1().DeviceClasses().Update(w.ctx, class, metav1.UpdateOptions{})
				w.must(err, "changing the class")
			},
		},
		"a slice being added": {
			before: func(w *world) {
				w.addNode("a")
				w.addClaim("wanted", spec(w.exactly("gpu", 1)))
			},
			event: func(w *world) { w.addSlice(w.slice("a", gpus(h100, 1)...)) },
		},
		"a device being added to a slice": {
			before: func(w *world) {
				w.addNode("a", gpus(h100, 1)...)
				w.addClaim("wanted", spec(w.exactly("gpu", 2)))
			},
			event: func(w *world) {
				slice, err := w.client.ResourceV1().ResourceSlices().Get(w.ctx, w.nodeName("a"), metav1.GetOptions{})
				w.must(err, "getting the slice")
				slice.Spec.Devices = gpus(h100, 2)
				slice.Spec.Pool.Generation++
				_, err = w.client.ResourceV1().ResourceSlices().Update(w.ctx, slice, metav1.UpdateOptions{})
				w.must(err, "changing the slice")
			},
		},
		"a node being added": {
			before: func(w *world) {
				w.addSlice(w.slice("a", gpus(h100, 1)...))
				w.addNode("b")
				w.addClaim("wanted", spec(w.exactly("gpu", 1)))
			},
			event: func(w *world) { w.addNode("a") },
		},
		"a claim being freed": {
			before: func(w *world) {
				w.addNode("a", gpus(h100, 1)...)
				w.addTemplate("one", spec(w.exactly("gpu", 1)))
				w.addPod("first", withTemplate("one"))
				w.awaitBound("first")
				w.addClaim("wanted", spec(w.exactly("gpu", 1)))
			},
			// The controller takes the claim of an ended pod away.
			event: func(w *world) { w.must(patchPhase(w, "first", v1.PodSucceeded), "ending the first pod") },
		},
		"a claim being deleted": {
			before: func(w *world) {
				w.addNode("a", gpus(h100, 1)...)
				w.allocate(w.addClaim("other", spec(w.exactly("gpu", 1))), "a", "gpu-0")
				w.addClaim("wanted", spec(w.exactly("gpu", 1)))
			},
			event: func(w *world) {
				w.must(w.client.ResourceV1().ResourceClaims(w.name).Delete(w.ctx, "other", metav1.DeleteOptions{}), "deleting the other claim")
			},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := worldOf(t, s)
			test.before(w)
			w.addPod("waiting", withClaim("wanted"))
			w.awaitUnschedulable("waiting", test.why)
			test.event(w)
			w.awaitBound("waiting")
		})
	}
}

// The name of a generated claim appears in the status of the pod itself.
func TestWaitingPodIsWokenByItsTemplate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", gpus(h100, 1)...)

	w.addPod("waiting", withTemplate("late"))
	w.addPod("second")
	w.awaitBound("second")
	if n := s.probe.of("waiting").attempts; n != 0 {
		t.Errorf("the pod was tried %d times without its claim", n)
	}
	w.addTemplate("late", spec(w.exactly("gpu", 1)))
	pod := w.awaitBound("waiting")
	if got := devices(w.claim(claimName(pod, "late"))); len(got) != 1 {
		t.Errorf("the pod has the devices %q, want one", got)
	}
}

// The hints also say no: an event that cannot help costs no attempt. This test is not parallel to others: their new
// slices might help, for all that the scheduler knows.
func TestWaitingPodIsNotWokenByTheClaimsOfOthers(t *testing.T) {
	w := newWorld(t)
	w.addNode("a", gpus(h100, 1)...)
	s := startScheduler(t, w.name, schedulerSetup{})
	w.addClaim("big", spec(w.exactly("gpus", 8)))
	w.addPod("waiting", withClaim("big"))
	w.awaitUnschedulable("waiting")
	before := s.probe.of("waiting").attempts

	w.addClaim("small", spec(w.exactly("gpu", 1)))
	w.addPod("second", withClaim("small"))
	w.awaitBound("second")
	w.addClaim("unused", spec(w.exactly("gpu", 1)))
	w.addPod("third")
	w.awaitBound("third")
	if n := s.probe.of("waiting").attempts - before; n != 0 {
		t.Errorf("the waiting pod was tried %d more times", n)
	}
}
