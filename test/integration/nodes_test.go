// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"testing"
)

// Filter: nodes without the devices are out at once. Without it, the scheduler would find out in Reserve, one
// attempt per node.
func TestOnlyNodesWithFreeDevicesAreTried(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, suffix := range []string{"a", "b", "c", "d", "e", "f", "g"} {
		w.addNode(suffix)
	}
	w.addNode("held", gpus(h100, 1)...)
	w.allocate(w.addClaim("holder", spec(w.exactly("gpu", 1))), "held", "gpu-0")
	w.addNode("free", gpus(h100, 1)...)
	s := startScheduler(t, w.name, schedulerSetup{}) // when all is there, so that the first attempt finds it

	w.addClaim("wanted", spec(w.exactly("gpu", 1)))
	w.addPod("pod", withClaim("wanted"))
	w.awaitBoundTo("pod", "free")
	if c := s.probe.of("pod"); c.attempts != 1 || c.reserved != 1 {
		t.Errorf("scheduling took %+v, want one attempt and one reservation", c)
	}
}

// PreFilter: what is wrong with the claims themselves is found once, not once per node.
func TestBadRequestIsRefusedBeforeAnyNodeIsLookedAt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", gpus(h100, 1)...)
	request := w.exactly("gpu", 1)
	request.Exactly.DeviceClassName = w.name + "-missing"
	w.addClaim("bad", spec(request))
	w.addPod("pod", withClaim("bad"))

	pod := w.awaitUnschedulable("pod", "bad", "gpu", w.name+"-missing")
	if n := s.probe.of("pod").filtered; n != 0 {
		t.Errorf("%d nodes were looked at", n)
	}
	w.awaitEvent(pod, w.name+"-missing")
}

// Score: a node with an earlier alternative of a prioritized list wins over nodes with a later one, also where its CPUs
// are in use, for which the other plugins prefer idle nodes.
func TestEarlierAlternativeWinsAcrossNodes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, suffix := range []string{"a", "b", "c", "d"} {
		w.addNode(suffix, gpus(a100, 4)...)
	}
	w.addNode("hopper", gpus(h100, 3)...)
	w.addPod("busy", w.onNode("hopper"), withCPUs("64"))
	startScheduler(t, w.name, schedulerSetup{}) // when all is there, so that the first pod has the choice
	w.awaitBound("busy")
	w.addTemplate("h100-else-a100", spec(w.oneOf("gpu", h100, a100)))

	// One pod could be lucky; three are not, as other plugins' scores are against a node that has pods already.
	for i := range 3 {
		name := fmt.Sprintf("pod-%d", i)
		w.addPod(name, withTemplate("h100-else-a100"))
		pod := w.awaitBoundTo(name, "hopper")
		claim := w.claim(claimName(pod, "h100-else-a100"))
		if got := claim.Status.Allocation.Devices.Results[0].Request; got != "gpu/hopper" {
			t.Errorf("%s got the alternative %s, want gpu/hopper", name, got)
		}
	}
	// The next best is taken when the best is gone.
	w.addPod("last", withTemplate("h100-else-a100"))
	pod := w.awaitBound("last")
	claim := w.claim(claimName(pod, "h100-else-a100"))
	if got := claim.Status.Allocation.Devices.Results[0].Request; got != "gpu/ampere" {
		t.Errorf("the last pod got the alternative %s, want gpu/ampere", got)
	}
}

// PostFilter: an allocation that keeps its own pod from being scheduled is given back.
func TestAllocationThatBlocksItsOwnPodIsReleased(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", gpus(h100, 1)...)
	w.addNode("b", gpus(h100, 1)...)
	// Allocated on one node, for a pod that must run on the other.
	w.allocate(w.addClaim("wanted", spec(w.exactly("gpu", 1))), "a", "gpu-0")

	w.addPod("pod", withClaim("wanted"), w.onNode("b"))
	w.awaitBoundTo("pod", "b")
	claim := w.claim("wanted")
	if got, want := claim.Status.Allocation.Devices.Results[0].Pool, w.nodeName("b"); got != want {
		t.Errorf("the claim has a device of %s, want of %s", got, want)
	}
}

// PostFilter: an allocation is given back only for a node that would do then.
func TestAllocationIsReleasedOnlyIfThatHelps(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", gpus(h100, 2)...)
	w.addNode("b", gpus(h100, 2)...)
	for i, name := range []string{"mine", "tied"} {
		w.allocate(w.addClaim(name, spec(w.exactly("gpu", 1))), "a", fmt.Sprintf("gpu-%d", i))
	}
	w.addClaim("three", spec(w.exactly("gpu", 3)))
	w.addClaim("one", spec(w.exactly("gpu", 1)))
	pool := func(claim string) string {
		t.Helper()
		allocation := w.claim(claim).Status.Allocation
		if allocation == nil {
			return "none"
		}
		return allocation.Devices.Results[0].Pool
	}
	// No node has four devices; and only one that the other pod cannot be on has two.
	w.addPod("large", withClaim("mine"), withClaim("three"))
	w.addPod("tied", withClaim("tied"), withClaim("one"), w.onNode("a"))
	w.awaitUnschedulable("large", "three")
	w.awaitUnschedulable("tied", "held")
	for _, claim := range []string{"mine", "tied"} {
		if got := pool(claim); got != w.nodeName("a") {
			t.Errorf("claim %s has a device of %s, want of %s", claim, got, w.nodeName("a"))
		}
	}

	w.addNode("c", gpus(h100, 4)...)
	w.awaitBoundTo("large", "c")
	w.awaitBoundTo("tied", "a")
	for claim, node := range map[string]string{"mine": "c", "tied": "a"} {
		if got := pool(claim); got != w.nodeName(node) {
			t.Errorf("claim %s has a device of %s, want of %s", claim, got, w.nodeName(node))
		}
	}
}

// PostFilter does not take from others.
func TestAllocationInUseIsNotReleased(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	startScheduler(t, w.name, schedulerSetup{})
	w.addNode("a", gpus(h100, 1)...)
	w.addNode("b", gpus(h100, 1)...)
	w.addClaim("shared", spec(w.exactly("gpu", 1)))
	w.addPod("first", withClaim("shared"), w.onNode("a"))
	w.awaitBoundTo("first", "a")

	w.addPod("second", withClaim("shared"), w.onNode("b"))
	w.awaitUnschedulable("second")
	claim := w.claim("shared")
	if got, want := claim.Status.Allocation.Devices.Results[0].Pool, w.nodeName("a"); got != want {
		t.Errorf("the claim has a device of %s, want of %s", got, want)
	}
}
