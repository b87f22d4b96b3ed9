// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
)

// Preemption for a group takes pods off the snapshot and tries the group; then it puts them back one by one, and tries to do without.
func TestGroupIsTriedWithoutVictims(t *testing.T) {
	withGroups(t)
	p, q := pending("p", 5, "a"), pending("q", 5, "b")
	for name, tc := range map[string]struct {
		pods []*v1.Pod
		// victims are those that the pods cannot do without, if each is put back in order.
		victims []string
	}{
		"as many as there are": {pods: []*v1.Pod{p, q}, victims: []string{"low-0", "low-1"}},
		"fewer":                {pods: []*v1.Pod{p}, victims: []string{"low-1"}},
		"one claim for both":   {pods: []*v1.Pod{p, pending("q", 5, "a")}, victims: []string{"low-1"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := oneNode()
			w.pods = []*v1.Pod{running("low-0", "node-b", 1, "c-0"), running("low-1", "node-b", 1, "c-1")}
			w.claims = []*resourceapi.ResourceClaim{
				claim("c-0", allocated("node-b", "gpu-0"), reservedFor("low-0")), claim("c-1", allocated("node-b", "gpu-1"), reservedFor("low-1")),
				claim("a"), claim("b"),
			}
			h := newHarness(t, w)
			nowhere := make([]string, len(tc.pods))
			g := h.tryGroup(tc.pods...)
			g.wantNodes(nowhere...)
			if _, status := g.postFilter(g.fitsAll); status.Code() != fwk.Unschedulable {
				t.Fatal(status)
			}
			if diff := cmp.Diff(tc.victims, h.preemptFor(tc.pods, w.pods)); diff != "" {
				t.Errorf("victims (-want +got):\n%s", diff)
			}
			// The cluster is as it was, also for the next attempt.
			h.tryGroup(tc.pods...).wantNodes(nowhere...)
			if held := h.plugin.shared.account.Tracker.Snapshot().Usage.Len(); held != 2 {
				t.Errorf("%d devices are in use, want 2", held)
			}
		})
	}
}

// A pod waits for what its group's attempt has found. What is tried in the end of the attempt changes nothing about that: on a node that
// another plugin refused, a device that becomes free is no news for the pod.
func TestWhatIsTriedForAGroupIsNoAttempt(t *testing.T) {
	withGroups(t)
	for name, nominated := range map[string]bool{"by preemption": false, "to see whether it waits for claims that leave": true} {
		t.Run(name, func(t *testing.T) {
			w := oneNode()
			w.nodes = append(w.nodes, node("node-c"))
			w.objects = append(w.objects, slice("node-c", device("gpu-0")))
			low := running("low", "node-b", 1, "c-1")
			pods := []*v1.Pod{pending("p", 5, "a"), pending("q", 5, "b")}
			w.pods = append(pods, low)
			w.claims = []*resourceapi.ResourceClaim{
				claim("a"), claim("b"), claim("c-0", allocated("node-b", "gpu-0"), reservedFor("gone")),
				claim("c-1", allocated("node-b", "gpu-1"), reservedFor("low")), claim("other", allocated("node-c", "gpu-0")),
			}
			h := newHarness(t, w)
			h.nodes = h.nodes[:1]
			if nominated {
				h.nominator.nominate("node-b", pods...)
			}
			g := h.tryGroup(pods...)
			g.wantNodes("", "")
			tried := 0
			_, status := g.postFilter(func(ctx context.Context) (*fwk.PodGroupAssignments, *fwk.Status) {
				tried++
				return g.fitsAll(ctx)
			})
			if status.Code() != fwk.Unschedulable || (tried > 0) != nominated {
				t.Fatalf("tried %d times, %v", tried, status)
			}
			if !nominated {
				h.preemptFor(pods[:1], []*v1.Pod{low})
			}
			if woken := h.lookedAt(); len(woken) > 0 {
				t.Errorf("%v woken before anything has changed", woken)
			}
			h.api.change("other", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
			h.caughtUp("other")
			if woken := h.lookedAt(); len(woken) > 0 {
				t.Errorf("%v woken for a node that another plugin refused", woken)
			}
		})
	}
}

// What a pod of the group finds without the victims follows what the others have at the moment.
func TestGroupIsTriedWithWhatTheOthersHaveNow(t *testing.T) {
	withGroups(t)
	w := oneNode()
	low := running("low", "node-b", 1, "c")
	w.pods = []*v1.Pod{low, running("stays", "node-b", 9, "d")}
	w.claims = []*resourceapi.ResourceClaim{
		claim("c", allocated("node-b", "gpu-0"), reservedFor("low")), claim("d", allocated("node-b", "gpu-1"), reservedFor("stays")),
		claim("a"), claim("b"),
	}
	h := newHarness(t, w)
	p, q := pending("p", 5, "a"), pending("q", 5, "b")
	h.tryGroup(p, q).postFilter(func(context.Context) (*fwk.PodGroupAssignments, *fwk.Status) { return nil, nil })
	snapshot := h.plugin.handle.MutableSnapshotSharedLister()
	if err := snapshot.StartMutations(); err != nil {
		t.Fatal(err)
	}
	if err := snapshot.RemovePod(klog.FromContext(h.ctx), low, "node-b"); err != nil {
		t.Fatal(err)
	}
	g := h.tryGroup(p, q)
	g.wantNodes("node-b", "")
	// The first one has given its device back by now.
	if status := h.plugin.Filter(h.ctx, g.attempts[1].state, q, h.nodeOf("node-b")); !status.IsSuccess() {
		t.Errorf("the second one alone: %v", status)
	}
	if err := snapshot.EndMutations(); err != nil {
		t.Fatal(err)
	}
}

// A claim that a victim shares with one pod of the group stays for that one, and ends with the victim for the others.
func TestClaimsOfTheGroupStayForTheirPods(t *testing.T) {
	withGroups(t)
	w := oneNode()
	low := running("low", "node-b", 1, "c")
	w.pods = []*v1.Pod{low}
	w.claims = []*resourceapi.ResourceClaim{claim("c", allocated("node-b", "gpu-0"), reservedFor("low")), claim("a"), claim("b")}
	h := newHarness(t, w)
	p, q := pending("p", 5, "a", "c"), pending("q", 5, "b")
	h.tryGroup(p, q).postFilter(func(context.Context) (*fwk.PodGroupAssignments, *fwk.Status) { return nil, nil })
	snapshot := h.plugin.handle.MutableSnapshotSharedLister()
	if err := snapshot.StartMutations(); err != nil {
		t.Fatal(err)
	}
	if err := snapshot.RemovePod(klog.FromContext(h.ctx), low, "node-b"); err != nil {
		t.Fatal(err)
	}
	for _, order := range [][]*v1.Pod{{p, q}, {q, p}} {
		for _, a := range h.tryGroup(order...).attempts {
			c, err := cycle.Read(a.state)
			if err != nil {
				t.Fatal(err)
			}
			if held := c.View(h.ctx, h.nodeOf("node-b").Node()).Len(); (held > 0) != (a.pod == p) {
				t.Errorf("%s before %s: %s finds %d devices held", order[0].Name, order[1].Name, a.pod.Name, held)
			}
		}
	}
	if err := snapshot.EndMutations(); err != nil {
		t.Fatal(err)
	}
}

// preemptFor does what preemption for a group does, and returns the pods that it would evict.
func (h *harness) preemptFor(pods, candidates []*v1.Pod) []string {
	h.t.Helper()
	check := func(err error) {
		h.t.Helper()
		if err != nil {
			h.t.Fatal(err)
		}
	}
	snapshot := h.plugin.handle.MutableSnapshotSharedLister()
	check(snapshot.StartMutations())
	defer func() { check(snapshot.EndMutations()) }()
	for _, candidate := range candidates {
		check(snapshot.RemovePod(klog.FromContext(h.ctx), candidate, candidate.Spec.NodeName))
	}
	g := h.tryGroup(pods...)
	if slices.Contains(g.nodes, "") {
		h.t.Fatalf("without the others the group is on nodes %q, want it to fit", g.nodes)
	}
	var victims []string
	for _, candidate := range candidates {
		info := podInfo(candidate)
		check(snapshot.AddPod(info, candidate.Spec.NodeName))
		for _, a := range g.attempts {
			h.plugin.AddPod(h.ctx, a.state, a.pod, info, h.nodeOf(candidate.Spec.NodeName))
		}
		if g.fitAgain() {
			continue
		}
		victims = append(victims, candidate.Name)
		check(snapshot.RemovePod(klog.FromContext(h.ctx), candidate, candidate.Spec.NodeName))
		for _, a := range g.attempts {
			h.plugin.RemovePod(h.ctx, a.state, a.pod, info, h.nodeOf(candidate.Spec.NodeName))
		}
	}
	return victims
}

// fitAgain tells whether each pod still fits its node, with the pods before it reserved on theirs.
func (g *groupAttempt) fitAgain() bool {
	for i, a := range g.attempts {
		if !g.h.plugin.Filter(g.h.ctx, a.state, a.pod, g.h.nodeOf(g.nodes[i])).IsSuccess() {
			return false
		}
		a.reserve(g.nodes[i])
		defer a.unreserve(g.nodes[i])
	}
	return true
}

// While devices are leaving that others were evicted for, the group waits for them, if with them it fits.
func TestGroupWaitsForClaimsThatLeave(t *testing.T) {
	withGroups(t)
	tests := map[string]struct {
		nominated bool
		users     []string // of the claims with the two devices
		waits     bool
	}{
		"their pods are gone":             {nominated: true, users: []string{"gone", "gone"}, waits: true},
		"nobody was evicted for it":       {users: []string{"gone", "gone"}},
		"one of them stays":               {nominated: true, users: []string{"gone", "stays"}},
		"a group has one of the claims":   {nominated: true, users: []string{"gone", ""}},
		"one was preempted and is going":  {nominated: true, users: []string{"gone", "victim"}, waits: true},
		"one was deleted and is going":    {nominated: true, users: []string{"gone", "deleted"}},
		"one of higher priority is going": {nominated: true, users: []string{"gone", "higher"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := oneNode()
			going := func(p *v1.Pod) *v1.Pod {
				p.DeletionTimestamp, p.Finalizers = &metav1.Time{Time: time.Now()}, []string{"example.com/slow"}
				return p
			}
			pods := []*v1.Pod{pending("p", 5, "a"), pending("q", 5, "b")}
			w.pods = []*v1.Pod{
				pods[0], pods[1], running("stays", "node-b", 9, "c-1"), going(running("deleted", "node-b", 1, "c-1")),
				going(preempted(running("victim", "node-b", 1, "c-1"), v1.PodReasonPreemptionByScheduler)),
				going(preempted(running("higher", "node-b", 9, "c-1"), v1.PodReasonPreemptionByScheduler)),
			}
			w.claims = []*resourceapi.ResourceClaim{claim("a"), claim("b"), claim("c-0", allocated("node-b", "gpu-0")), claim("c-1", allocated("node-b", "gpu-1"))}
			for i, user := range tc.users {
				reserve := reservedFor(user)
				if user == "" {
					reserve = forGroup
				}
				reserve(w.claims[2+i])
			}
			h := newHarness(t, w)
			if tc.nominated {
				pods[0] = pods[0].DeepCopy()
				pods[0].Status.NominatedNodeName = "node-b"
				h.nominator.nominate("node-b", pods...)
			}
			g := h.tryGroup(pods...)
			result, status := g.postFilter(g.fitsAll)
			if status.IsSuccess() != tc.waits {
				t.Fatalf("status %v, waits: want %t", status, tc.waits)
			}
			if !tc.waits {
				return
			}
			for _, p := range pods { // the second one's own status does not say so yet
				if info := result.NominatingInfos[types.NamespacedName{Namespace: p.Namespace, Name: p.Name}]; info == nil || info.NominatedNodeName != "node-b" {
					t.Errorf("pod %s is nominated by %v", p.Name, info)
				}
			}
			h.activator.taken()
			h.api.change("c-0", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
			h.eventually("the group is woken", func() bool { return slices.Equal(h.activator.taken(), []string{"p", "q"}) })
		})
	}
}
