// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
)

// running is a pod of the given priority on a node.
func running(name, node string, priority int32, claims ...string) *v1.Pod {
	p := pod(name, claims...)
	p.Spec.NodeName, p.Spec.Priority = node, &priority
	p.Status.Phase = v1.PodRunning
	return p
}

// pending is a pod of the given priority without a node.
func pending(name string, priority int32, claims ...string) *v1.Pod {
	p := running(name, "", priority, claims...)
	p.Status.Phase = v1.PodPending
	return p
}

func counted(n int64) func(*resourceapi.ResourceClaim) {
	return func(c *resourceapi.ResourceClaim) { c.Spec.Devices.Requests[0].Exactly.Count = n }
}

// nodeOf returns the node with the name.
func (h *harness) nodeOf(name string) fwk.NodeInfo {
	for _, info := range h.nodes {
		if info.Node().Name == name {
			return info
		}
	}
	h.t.Fatalf("no node %s", name)
	return nil
}

// dryRun tries a node on a clone of the attempt's state. Each step removes a pod, or adds it with "+".
func (a *attempt) dryRun(node string, pods map[string]*v1.Pod, steps ...string) *fwk.Status {
	a.h.t.Helper()
	state := a.state.Clone()
	extensions := a.h.plugin.PreFilterExtensions()
	for _, step := range steps {
		name, add := strings.CutPrefix(step, "+")
		change := extensions.RemovePod
		if add {
			change = extensions.AddPod
		}
		if status := change(a.h.ctx, state, a.pod, podInfo(pods[name]), a.h.nodeOf(node)); !status.IsSuccess() {
			a.h.t.Fatalf("step %s: %v", step, status)
		}
	}
	return a.h.plugin.Filter(a.h.ctx, state, a.pod, a.h.nodeOf(node))
}

func byName(pods ...*v1.Pod) map[string]*v1.Pod {
	out := map[string]*v1.Pod{}
	for _, p := range pods {
		out[p.Name] = p
	}
	return out
}

func TestRemovedPodsGiveUpTheirClaims(t *testing.T) {
	// node-b has two devices.
	tests := map[string]struct {
		claims []*resourceapi.ResourceClaim
		pods   []*v1.Pod
		// wants are the claims of the pod that is tried.
		wants []string
		steps []string
		fits  bool
	}{
		"as long as nobody is removed, nothing is free": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("both", counted(2), allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low"))},
			pods:   []*v1.Pod{running("low", "node-b", 1, "both")},
		},
		"the devices of a removed pod are free": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("both", counted(2), allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low"))},
			pods:   []*v1.Pod{running("low", "node-b", 1, "both")},
			steps:  []string{"low"}, fits: true,
		},
		"a pod that is put back has its devices again": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("both", counted(2), allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low"))},
			pods:   []*v1.Pod{running("low", "node-b", 1, "both")},
			steps:  []string{"low", "+low"},
		},
		"of two removed pods one is put back": {
			claims: []*resourceapi.ResourceClaim{
				claim("wanted"), claim("first", allocated("node-b", "gpu-0"), reservedFor("low")), claim("second", allocated("node-b", "gpu-1"), reservedFor("lower")),
			},
			pods:  []*v1.Pod{running("low", "node-b", 1, "first"), running("lower", "node-b", 0, "second")},
			steps: []string{"low", "lower", "+low"}, fits: true,
		},
		"a shared claim stays with those that are left": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("both", counted(2), allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low", "survivor"))},
			pods:   []*v1.Pod{running("low", "node-b", 1, "both"), running("survivor", "node-b", 9, "both")},
			steps:  []string{"low"},
		},
		"a shared claim goes with the last one": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("both", counted(2), allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low", "lower"))},
			pods:   []*v1.Pod{running("low", "node-b", 1, "both"), running("lower", "node-b", 0, "both")},
			steps:  []string{"low", "lower"}, fits: true,
		},
		"a claim for something besides pods stays": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("both", counted(2), allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low"), func(c *resourceapi.ResourceClaim) {
				c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{APIGroup: "example.com", Resource: "jobs", Name: "job", UID: "job-uid"})
			})},
			pods:  []*v1.Pod{running("low", "node-b", 1, "both")},
			steps: []string{"low"},
		},
		"a claim that the pod names and that is not for it stays": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("both", counted(2), allocated("node-b", "gpu-0", "gpu-1"))},
			pods:   []*v1.Pod{running("low", "node-b", 1, "both")},
			steps:  []string{"low"},
		},
		"both claims of a pod go": {
			claims: []*resourceapi.ResourceClaim{
				claim("wanted", counted(2)), claim("first", allocated("node-b", "gpu-0"), reservedFor("low")), claim("second", allocated("node-b", "gpu-1"), reservedFor("low")),
			},
			pods:  []*v1.Pod{running("low", "node-b", 1, "first", "second")},
			steps: []string{"low"}, fits: true,
		},
		"a claim that the pod itself is to use is never free": {
			claims: []*resourceapi.ResourceClaim{
				claim("wanted"), claim("common", allocated("node-b", "gpu-0"), reservedFor("low")), claim("other", allocated("node-b", "gpu-1"), reservedFor("survivor")),
			},
			wants: []string{"wanted", "common"},
			pods:  []*v1.Pod{running("low", "node-b", 1, "common"), running("survivor", "node-b", 9, "other")},
			steps: []string{"low"},
		},
		"a pod that was never removed takes nothing when it is added": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("one", allocated("node-b", "gpu-0"), reservedFor("low"))},
			pods:   []*v1.Pod{running("low", "node-b", 1, "one")},
			steps:  []string{"+low"}, fits: true,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims, w.pods = tc.claims, tc.pods
			h := newHarness(t, w)
			if tc.wants == nil {
				tc.wants = []string{"wanted"}
			}
			a := h.filterAll(pending("p", 5, tc.wants...))
			if !a.preFilter.IsSuccess() {
				t.Fatal(a.preFilter)
			}
			if status := a.dryRun("node-b", byName(tc.pods...), tc.steps...); status.IsSuccess() != tc.fits {
				t.Errorf("fits %t, want %t: %v", status.IsSuccess(), tc.fits, status)
			}
		})
	}
}

// A claim that is in flight for a pod goes with it, though nothing of it is in the API.
func TestRemovedPodsGiveUpWhatIsInFlight(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("wanted"), claim("flying"), claim("other", allocated("node-a", "gpu-0"))}
	low := pending("low", 1, "flying")
	w.pods = []*v1.Pod{low}
	h := newHarness(t, w)
	h.filterAll(low).reserve("node-b")
	rest := claim("rest", allocated("node-b", "gpu-1"))
	h.api.create(rest)
	h.eventually("the other device is held", func() bool { return h.plugin.shared.account.Tracker.Snapshot().Usage.Len() == 3 })
	a := h.filterAll(pending("p", 5, "wanted"))
	if fits := a.fits(); len(fits) != 0 {
		t.Fatalf("the pod fits %q before anything is removed", fits)
	}
	if status := a.dryRun("node-b", byName(low), "low"); !status.IsSuccess() {
		t.Errorf("the device in flight is not free: %v", status)
	}
}

// Preemption tries nodes in parallel, each on a clone of the state, and each clone on its own.
func TestDryRunsInParallelSeeOnlyTheirOwnChanges(t *testing.T) {
	const nodes = 32
	var w world
	w.objects = []runtime.Object{class(testClass)}
	for i := range nodes {
		n := fmt.Sprintf("node-%02d", i)
		w.nodes = append(w.nodes, node(n))
		w.objects = append(w.objects, slice(n, device("gpu-0"), device("gpu-1")))
		for j := range 2 {
			name := fmt.Sprintf("%s-%d", n, j)
			w.claims = append(w.claims, claim(name, allocated(n, fmt.Sprintf("gpu-%d", j)), reservedFor(name)))
			w.pods = append(w.pods, running(name, n, 1, name))
		}
	}
	w.claims = append(w.claims, claim("wanted"))
	h := newHarness(t, w)
	pods := byName(w.pods...)
	a := h.filterAll(pending("p", 5, "wanted"))

	var wg sync.WaitGroup
	for _, info := range h.nodes {
		n := info.Node().Name
		wg.Go(func() {
			state := a.state.Clone()
			try := func(what string, wantFit bool) {
				if status := h.plugin.Filter(h.ctx, state, a.pod, info); status.IsSuccess() != wantFit {
					t.Errorf("%s: %s: fits %t, want %t: %v", n, what, status.IsSuccess(), wantFit, status)
				}
			}
			first, second := podInfo(pods[n+"-0"]), podInfo(pods[n+"-1"])
			try("untouched", false)
			h.plugin.RemovePod(h.ctx, state, a.pod, first, info)
			before := state.Clone()
			h.plugin.RemovePod(h.ctx, state, a.pod, second, info)
			try("both removed", true)
			h.plugin.AddPod(h.ctx, state, a.pod, first, info)
			try("one put back", true)
			h.plugin.AddPod(h.ctx, state, a.pod, second, info)
			try("both put back", false)
			state = before
			try("the clone from in between", true)
		})
	}
	wg.Wait()
	c, err := cycle.Read(a.state)
	if err != nil {
		t.Fatal(err)
	}
	if c.WhatIf != nil {
		t.Error("the original state was changed")
	}
	for _, info := range h.nodes {
		if status := h.plugin.Filter(h.ctx, a.state, a.pod, info); status.Code() != fwk.Unschedulable {
			t.Errorf("%s: in the original: %v, want it to be refused as before", info.Node().Name, status)
		}
	}
}

func TestRefusalCodes(t *testing.T) {
	never := pending("p", 5, "wanted")
	never.Spec.PreemptionPolicy = ptr.To(v1.PreemptNever)
	tests := map[string]struct {
		claims []*resourceapi.ResourceClaim
		pods   []*v1.Pod
		pod    *v1.Pod
		code   fwk.Code // on node-b
		// again is how often a node is decided again.
		again int
	}{
		"a pod of lower priority has what is missing": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("both", allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low"))},
			pods:   []*v1.Pod{running("low", "node-b", 4, "both")},
			code:   fwk.Unschedulable, again: 1,
		},
		"a pod of equal priority has it": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("both", allocated("node-b", "gpu-0", "gpu-1"), reservedFor("equal"))},
			pods:   []*v1.Pod{running("equal", "node-b", 5, "both")},
			code:   fwk.UnschedulableAndUnresolvable,
		},
		"the pod must not preempt": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("both", allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low"))},
			pods:   []*v1.Pod{running("low", "node-b", 4, "both")},
			pod:    never, code: fwk.UnschedulableAndUnresolvable,
		},
		"a pod of lower priority has too little": {
			claims: []*resourceapi.ResourceClaim{
				claim("wanted", counted(2)),
				claim("first", allocated("node-b", "gpu-0"), reservedFor("low")), claim("second", allocated("node-b", "gpu-1"), reservedFor("high")),
			},
			pods: []*v1.Pod{running("low", "node-b", 4, "first"), running("high", "node-b", 9, "second")},
			code: fwk.UnschedulableAndUnresolvable, again: 1,
		},
		"what a pod of lower priority has is shared with one of higher priority": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), claim("both", allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low", "high"))},
			pods:   []*v1.Pod{running("low", "node-b", 4, "both"), running("high", "node-b", 9, "both")},
			code:   fwk.UnschedulableAndUnresolvable,
		},
		"no release would help": {
			claims: []*resourceapi.ResourceClaim{claim("wanted", counted(3)), claim("both", allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low"))},
			pods:   []*v1.Pod{running("low", "node-b", 4, "both")},
			code:   fwk.UnschedulableAndUnresolvable,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims, w.pods = tc.claims, tc.pods
			h := newHarness(t, w)
			if tc.pod == nil {
				tc.pod = pending("p", 5, "wanted")
			}
			before := counterValue(t, contention.NodesDecidedAgain)
			a := h.filterAll(tc.pod)
			again := counterValue(t, contention.NodesDecidedAgain) - before
			if status := h.plugin.Filter(h.ctx, a.state, a.pod, h.nodeOf("node-b")); status.Code() != tc.code {
				t.Errorf("code %v, want %v: %v", status.Code(), tc.code, status)
			}
			if int(again) != tc.again {
				t.Errorf("%v nodes were decided again, want %d", again, tc.again)
			}
		})
	}
}

func counterValue(t *testing.T, counter metrics.CounterMetric) float64 {
	t.Helper()
	value, err := testutil.GetCounterMetricValue(counter)
	if err != nil {
		t.Fatal(err)
	}
	return value
}
