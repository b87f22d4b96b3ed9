// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
)

// filterNominated runs Filter as the framework does for a node that others are nominated to: with them, and if the pod
// fits then, without them.
func (a *attempt) filterNominated(node string) *fwk.Status {
	a.h.t.Helper()
	state := a.state.Clone()
	for _, info := range a.h.nominator.NominatedPodsForNode(node) {
		if status := a.h.plugin.AddPod(a.h.ctx, state, a.pod, info, a.h.nodeOf(node)); !status.IsSuccess() {
			a.h.t.Fatalf("AddPod failed, which ends the whole attempt: %v", status)
		}
	}
	if status := a.h.plugin.Filter(a.h.ctx, state, a.pod, a.h.nodeOf(node)); !status.IsSuccess() {
		return status
	}
	return a.h.plugin.Filter(a.h.ctx, a.state, a.pod, a.h.nodeOf(node))
}

func TestNominatedPodsKeepTheirDevices(t *testing.T) {
	gone := func(c *resourceapi.ResourceClaim) { reservedFor("gone")(c) } // there is no such pod
	tests := map[string]struct {
		claims  []*resourceapi.ResourceClaim
		nominee *v1.Pod
		second  *v1.Pod // nominated, too
		others  []*v1.Pod
		fits    bool // on node-b
	}{
		"what a nominee needs is taken": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two", counted(2))},
			nominee: pending("nominee", 5, "two"),
		},
		"what it leaves is free": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two")},
			nominee: pending("nominee", 5, "two"), fits: true,
		},
		"it may count on what is about to become free": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two", counted(2)), claim("leaving", allocated("node-b", "gpu-1"), gone)},
			nominee: pending("nominee", 5, "two"),
		},
		"it prefers what is free already": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two"), claim("leaving", allocated("node-b", "gpu-0"), gone)},
			nominee: pending("nominee", 5, "two"),
		},
		"it may count on pods of lower priority, which have not been seen to go yet": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two", counted(2)), claim("held", allocated("node-b", "gpu-1"), reservedFor("victim"))},
			nominee: pending("nominee", 5, "two"), others: []*v1.Pod{running("victim", "node-b", 4, "held")},
		},
		"it cannot count on pods of its own priority": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two", counted(2)), claim("held", allocated("node-b", "gpu-1"), reservedFor("victim", "equal"))},
			nominee: pending("nominee", 5, "two"), others: []*v1.Pod{running("victim", "node-b", 4, "held"), running("equal", "node-b", 5, "held")}, fits: true,
		},
		"it cannot count on what nobody uses and stays": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two", counted(2)), claim("held", allocated("node-b", "gpu-1"))},
			nominee: pending("nominee", 5, "two"), fits: true,
		},
		"it keeps nobody from what it cannot use": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two", counted(3))},
			nominee: pending("nominee", 5, "two"), fits: true,
		},
		"what it has already is not taken twice": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two", allocated("node-b", "gpu-0"))},
			nominee: pending("nominee", 5, "two"), fits: true,
		},
		"a claim that both use is not taken from the pod": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted", counted(2))},
			nominee: pending("nominee", 5, "wanted"), fits: true,
		},
		"a claim that two nominees share is given devices once": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("common")},
			nominee: pending("nominee", 5, "common"), second: pending("second", 5, "common"), fits: true,
		},
		"what the second one needs besides is taken": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("common"), claim("own")},
			nominee: pending("nominee", 5, "common"), second: pending("second", 5, "common", "own"),
		},
		"a shared claim that the first one gets no devices for is the second one's": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("common", counted(2)), claim("own", counted(2))},
			nominee: pending("nominee", 5, "common", "own"), second: pending("second", 5, "common"),
		},
		"one that cannot run beside the first keeps nobody from what that one leaves": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("one"), claim("two", counted(2))},
			nominee: pending("nominee", 5, "one"), second: pending("second", 5, "two"), fits: true,
		},
		"one with a claim that others use on another node keeps nobody from anything": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two", counted(2)), claim("common", allocated("node-a", "gpu-0"), reservedFor("other"))},
			nominee: pending("nominee", 5, "two", "common"), others: []*v1.Pod{running("other", "node-a", 4, "common")}, fits: true,
		},
		"one may give up a claim that is allocated on another node": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two", counted(2)), claim("own", allocated("node-a", "gpu-0"), reservedFor("nominee"))},
			nominee: pending("nominee", 5, "two", "own"),
		},
		"one that waits for a claim keeps nobody from anything": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two", counted(2))},
			nominee: pending("nominee", 5, "two", "missing"), fits: true,
		},
		"one of which a claim is being deleted keeps nobody from anything": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two", counted(2)), claim("ends", deleting, allocated("node-b", "gpu-9"), reservedFor("nominee"))},
			nominee: pending("nominee", 5, "two", "ends"), fits: true,
		},
		"a claim that does not exist is no obstacle": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted")},
			nominee: pending("nominee", 5, "nowhere"), fits: true,
		},
		"a claim that cannot be compiled is no obstacle": {
			claims:  []*resourceapi.ResourceClaim{claim("wanted"), claim("two", withClass("nonsense"))},
			nominee: pending("nominee", 5, "two"), fits: true,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			nominees := []*v1.Pod{tc.nominee}
			if tc.second != nil {
				nominees = append(nominees, tc.second)
			}
			w.claims, w.pods = tc.claims, append(tc.others, nominees...)
			h := newHarness(t, w)
			h.nominator.nominate("node-b", nominees...)
			a := h.filterAll(pending("p", 5, "wanted"))
			if status := a.filterNominated("node-b"); status.IsSuccess() != tc.fits {
				t.Errorf("fits %t, want %t: %v", status.IsSuccess(), tc.fits, status)
			}
		})
	}
}

// Filter says that there is a device for both; Reserve must not choose the one that only the nominated pod can use.
func TestReserveLeavesNominatedPodsTheirDevices(t *testing.T) {
	w := twoNodes()
	w.objects = []runtime.Object{class(testClass), slice("node-b", device("gpu-0", withModel("H100")), device("gpu-1", withModel("A100")))}
	w.claims = []*resourceapi.ResourceClaim{
		claim("any"), claim("late"),
		claim("picky", withSelector(`device.attributes["gpu.example.com"].model == "H100"`)),
	}
	nominee := pending("nominee", 5, "picky")
	w.pods = []*v1.Pod{nominee}
	h := newHarness(t, w)
	h.nominator.nominate("node-b", nominee)
	a := h.filterAll(pending("p", 5, "any"))
	late := h.filterAll(pending("late", 5, "late"))
	a.reserve("node-b")
	pendingAllocation, _ := h.plugin.shared.account.Tracker.Pending("any-uid")
	if got := pendingAllocation.Devices.Results[0].Device; got != "gpu-1" {
		t.Errorf("the pod got %s, which the nominated pod needs", got)
	}
	if status := h.plugin.Reserve(h.ctx, late.state, late.pod, "node-b"); status.Code() != fwk.Unschedulable {
		t.Errorf("a pod got the nominated pod's device, or an error: %v", status)
	}
	higher := h.filterAll(pending("higher", 6, "late"))
	higher.reserve("node-b") // a nominated pod of lower priority makes way
}

// Where others are nominated to a node, the framework asks a copy of the state first. What is in the way there is in the way.
func TestObstaclesOnNodesWithNomineesAreGivenUp(t *testing.T) {
	w := twoNodes()
	racked := claim("mine", allocated("node-b", "gpu-0"), func(c *resourceapi.ResourceClaim) {
		// Only nodes with a label of their own may use it.
		c.Status.Allocation.NodeSelector.NodeSelectorTerms[0] = v1.NodeSelectorTerm{
			MatchExpressions: []v1.NodeSelectorRequirement{{Key: "rack", Operator: v1.NodeSelectorOpExists}},
		}
	})
	w.claims = []*resourceapi.ResourceClaim{racked, claim("other")}
	nominee := pending("nominee", 5, "other")
	w.pods = []*v1.Pod{nominee}
	w.nodes = w.nodes[1:]
	h := newHarness(t, w)
	h.nominator.nominate("node-b", nominee)
	p := pending("p", 5, "mine")
	a := &attempt{h: h, pod: p, state: framework.NewCycleState()}
	if _, status := h.plugin.PreFilter(h.ctx, a.state, p, h.nodes); !status.IsSuccess() {
		t.Fatal(status)
	}
	if status := a.filterNominated("node-b"); status.IsSuccess() {
		t.Fatal("the allocation is not in the way: the test proves nothing")
	}
	if status := a.postFilter(); status.Code() != fwk.UnschedulableAndUnresolvable || h.api.get("mine").Status.Allocation != nil {
		t.Errorf("the allocation was not given up: %v", status)
	}
}

// What a nominated pod is going to get is not what another one gives up its allocation for.
func TestAnAllocationIsKeptWhereOthersAreNominated(t *testing.T) {
	tests := map[string]struct {
		nominee *v1.Pod
		gone    bool
	}{
		"for a pod of higher priority":  {nominee: pending("nominee", 6, "two")},
		"not for one of lower priority": {nominee: pending("nominee", 4, "two"), gone: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			// Reserved for nobody: a pod that waits keeps nothing of its own, whoever is nominated.
			w.claims = []*resourceapi.ResourceClaim{claim("mine", allocated("node-a", "gpu-0")), claim("two", counted(2))}
			p := pending("p", 5, "mine")
			w.pods = []*v1.Pod{tc.nominee, p}
			h := newHarness(t, w)
			h.nominator.nominate("node-b", tc.nominee)
			status := h.filterAll(p).postFilter()
			if gone := h.api.get("mine").Status.Allocation == nil; gone != tc.gone {
				t.Errorf("the allocation was given up: %t, %v", gone, status)
			}
		})
	}
}

func TestRefusalsWithNomineesAreExplained(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("wanted"), claim("two", counted(2)), claim("a", allocated("node-a", "gpu-0"))}
	nominee := pending("nominee", 5, "two")
	w.pods = []*v1.Pod{nominee}
	h := newHarness(t, w)
	h.nominator.nominate("node-b", nominee)
	p := pending("p", 5, "wanted")
	a := &attempt{h: h, pod: p, state: h.filterAll(pod("none")).state}
	if _, status := h.plugin.PreFilter(h.ctx, a.state, p, h.nodes); !status.IsSuccess() {
		t.Fatal(status)
	}
	if status := a.filterNominated("node-b"); status.IsSuccess() {
		t.Fatal("the nominated pod's devices are free")
	}
	c, err := cycle.Read(a.state)
	if err != nil {
		t.Fatal(err)
	}
	if result, ok := c.Results.Get("node-b"); !ok || result.Failure == nil {
		t.Error("the node is not among those on which devices were missing")
	}
}

// Two pods had others evicted for two devices, and somebody else got one of them. What is left is for one of the two, whoever is tried
// first and though neither may have others evicted now.
func TestNomineesOfEqualPriorityDoNotBlockEachOther(t *testing.T) {
	refused := map[string]string{"younger": `request "gpu" of claim younger: 2 of 2 gpu devices held; would fit on node node-b if claim team-a/faster were released`}
	for name, tc := range map[string]struct {
		order  []string
		policy v1.PreemptionPolicy
		told   map[string]string
	}{
		"the older one is tried first":         {order: []string{"older", "younger"}, policy: v1.PreemptLowerPriority, told: map[string]string{}},
		"the younger one is tried first":       {order: []string{"younger", "older"}, policy: v1.PreemptLowerPriority, told: refused},
		"they must not preempt, older first":   {order: []string{"older", "younger"}, policy: v1.PreemptNever, told: map[string]string{}},
		"they must not preempt, younger first": {order: []string{"younger", "older"}, policy: v1.PreemptNever, told: refused},
	} {
		t.Run(name, func(t *testing.T) {
			nominee := func(name string, at int64) *v1.Pod {
				p := pending(name, 5, name)
				p.CreationTimestamp = metav1.Unix(at, 0)
				p.Spec.PreemptionPolicy, p.Status.NominatedNodeName = &tc.policy, "node-b"
				return p
			}
			nominees := byName(nominee("older", 1), nominee("younger", 2))
			w := twoNodes()
			w.nodes, w.objects = w.nodes[1:], []runtime.Object{w.objects[0], w.objects[2]}
			w.claims = []*resourceapi.ResourceClaim{claim("older"), claim("younger"), claim("faster", allocated("node-b", "gpu-1"), reservedFor("faster"))}
			w.pods = []*v1.Pod{nominees["older"], nominees["younger"], running("faster", "node-b", 9, "faster")}
			h := newHarness(t, w)
			h.nominator.nominate("node-b", nominees["older"], nominees["younger"])
			placed, told := "", map[string]string{}
			for _, name := range slices.Concat(tc.order, tc.order) {
				a := h.filterAll(nominees[name])
				a.statuses = framework.NewDefaultNodeToStatus()
				status := a.filterNominated("node-b")
				if status.IsSuccess() {
					a.reserve("node-b")
					placed = name
					break
				}
				a.statuses.Set("node-b", status)
				result, why := h.plugin.PostFilter(h.ctx, a.state, a.pod, a.statuses)
				told[name] = why.Message()
				if result != nil && result.NominatingInfo != nil && result.NominatedNodeName == "" {
					h.nominator.withdraw(a.pod)
				}
			}
			if placed == "" {
				t.Errorf("neither got the free device: %q", told)
			}
			if diff := cmp.Diff(tc.told, told); diff != "" {
				t.Errorf("what they are told differs (-want +got):\n%s", diff)
			}
		})
	}
}
