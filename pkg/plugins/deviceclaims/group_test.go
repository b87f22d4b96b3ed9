// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	compositeapi "k8s.io/api/scheduling/v1alpha3"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/component-base/featuregate"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	testingclock "k8s.io/utils/clock/testing"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podmemory"
	"stowage.dev/stowage/pkg/wakeup"
)

// podGroup is a group of pods of which none has a node yet.
type podGroup struct {
	fwk.PodGroupInfo
	pods  []*v1.Pod
	group *schedulingapi.PodGroup
}

func (g podGroup) GetUnscheduledPods() []*v1.Pod                         { return g.pods }
func (g podGroup) GetPodGroup() *schedulingapi.PodGroup                  { return g.group }
func (g podGroup) GetCompositePodGroup() *compositeapi.CompositePodGroup { return nil }

// groupAttempt is one scheduling attempt of a group.
type groupAttempt struct {
	h        *harness
	pods     []*v1.Pod
	state    *framework.CycleState
	attempts []*attempt
	// nodes has the node of each pod, empty where it found none.
	nodes []string
}

// tryGroup does what the framework does to find out whether a group fits: each pod is tried, and reserved on the first node that it
// fits; in the end all are unreserved.
func (h *harness) tryGroup(pods ...*v1.Pod) *groupAttempt {
	h.t.Helper()
	g := &groupAttempt{h: h, pods: pods, state: framework.NewCycleState()}
	for i, p := range pods {
		state := framework.NewCycleState()
		state.SetPodGroupSchedulingCycle(g.state)
		a := h.filterAllIn(state, p)
		g.attempts, g.nodes = append(g.attempts, a), append(g.nodes, "")
		if fits := a.fits(); len(fits) > 0 && h.plugin.Reserve(h.ctx, state, p, fits[0]).IsSuccess() {
			g.nodes[i] = fits[0]
		}
	}
	for i, a := range slices.Backward(g.attempts) {
		if g.nodes[i] != "" {
			a.unreserve(g.nodes[i])
		}
	}
	return g
}

func (g *groupAttempt) wantNodes(nodes ...string) {
	g.h.t.Helper()
	if diff := cmp.Diff(nodes, g.nodes); diff != "" {
		g.h.t.Errorf("nodes of the group's pods (-want +got):\n%s", diff)
	}
}

// fitsAll is what the framework does if it is asked to try the group again.
func (g *groupAttempt) fitsAll(context.Context) (*fwk.PodGroupAssignments, *fwk.Status) {
	if again := g.h.tryGroup(g.pods...); slices.Contains(again.nodes, "") {
		return nil, fwk.NewStatus(fwk.Unschedulable)
	}
	return nil, nil
}

func (g *groupAttempt) postFilter(schedule fwk.PodGroupSchedulingFunc) (*fwk.PodGroupPostFilterResult, *fwk.Status) {
	return g.h.plugin.PodGroupPostFilter(g.h.ctx, g.state, podGroup{pods: g.pods}, schedule)
}

// forGood begins what comes when the group fits: the pod is reserved once more, with the same state.
func (g *groupAttempt) forGood(i int) *attempt {
	a := g.attempts[i]
	a.state.(*framework.CycleState).SetPodGroupSchedulingCycle(nil)
	return a
}

// oneNode has node-b with gpu-0 and gpu-1.
func oneNode() world {
	return world{
		nodes:   []*v1.Node{node("node-b")},
		objects: []runtime.Object{class(testClass), slice("node-b", device("gpu-0"), device("gpu-1"))},
	}
}

// requests are those to the API besides what the informers read: they begin to watch when they like.
func (h *harness) requests() []clienttesting.Action {
	return slices.DeleteFunc(h.client.Actions(), func(a clienttesting.Action) bool { return a.GetVerb() == "list" || a.GetVerb() == "watch" })
}

// On trial the pods of a group share claims, and nobody gets what another one has. Neither the tracker nor the API hears of it.
func TestGroupIsTriedInMemory(t *testing.T) {
	tests := map[string]struct {
		claims []string
		pods   []*v1.Pod
		want   []string
	}{
		"a device each": {
			claims: []string{"a", "b"}, pods: []*v1.Pod{pod("p", "a"), pod("q", "b")}, want: []string{"node-b", "node-b"},
		},
		"a device too few": {
			claims: []string{"a", "b", "c"}, pods: []*v1.Pod{pod("p", "a"), pod("q", "b"), pod("r", "c")}, want: []string{"node-b", "node-b", ""},
		},
		"a shared claim": {
			claims: []string{"shared", "own"}, pods: []*v1.Pod{pod("p", "shared"), pod("q", "shared", "own"), pod("r", "shared")},
			want: []string{"node-b", "node-b", "node-b"},
		},
		"a shared claim takes its device from the others": {
			claims: []string{"shared", "a", "b"}, pods: []*v1.Pod{pod("p", "shared"), pod("q", "shared", "a"), pod("r", "b")},
			want: []string{"node-b", "node-b", ""},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := oneNode()
			for _, name := range tc.claims {
				w.claims = append(w.claims, claim(name))
			}
			h := newHarness(t, w)
			before, requests := h.plugin.shared.account.Tracker.Snapshot(), len(h.requests())
			for range 2 { // the second time as the first
				h.tryGroup(tc.pods...).wantNodes(tc.want...)
			}
			if after := h.plugin.shared.account.Tracker.Snapshot(); after.Revision != before.Revision {
				t.Errorf("the tracker has changed from revision %d to %d", before.Revision, after.Revision)
			}
			if made := h.requests()[requests:]; len(made) > 0 {
				t.Errorf("requests to the API: %v", made)
			}
		})
	}
}

// What was tried is then done for good, pod by pod, while the first ones are already being bound.
func TestGroupGetsWhatWasTried(t *testing.T) {
	type steps func(h *harness, p, q *attempt)
	both := []string{"p", "q"}
	tests := map[string]struct {
		steps steps
		users []string
	}{
		"in order": {steps: func(h *harness, p, q *attempt) {
			p.reserve("node-b")
			q.reserve("node-b")
			mustBind(h, p, q)
		}, users: both},
		"the second one is faster": {steps: func(h *harness, p, q *attempt) {
			p.reserve("node-b")
			q.reserve("node-b")
			mustBind(h, q, p)
		}, users: both},
		"the first one is bound before the second one is reserved": {steps: func(h *harness, p, q *attempt) {
			p.reserve("node-b")
			mustBind(h, p)
			q.reserve("node-b")
			mustBind(h, q)
		}, users: both},
		"the first one fails": {steps: func(h *harness, p, q *attempt) {
			p.reserve("node-b")
			q.reserve("node-b")
			mustBind(h, p)
			p.unreserve("node-b")
			mustBind(h, q)
		}, users: []string{"q"}},
		"the first one fails when the second one has written": {steps: func(h *harness, p, q *attempt) {
			p.reserve("node-b")
			q.reserve("node-b")
			mustBind(h, p, q)
			p.unreserve("node-b")
		}, users: []string{"q"}},
		"the first one gives up before anything is written": {steps: func(h *harness, p, q *attempt) {
			p.reserve("node-b")
			q.reserve("node-b")
			p.unreserve("node-b")
			if held := h.plugin.shared.account.Tracker.Snapshot().Usage.Len(); held != 2 {
				h.t.Errorf("%d devices are in use, want both of the second pod", held)
			}
			mustBind(h, q)
		}, users: []string{"q"}},
		"the first one is not reserved": {steps: func(h *harness, _, q *attempt) {
			if status := h.plugin.Reserve(h.ctx, q.state, q.pod, "node-b"); status.Code() != fwk.Unschedulable {
				h.t.Errorf("Reserve: %v, want it refused", status)
			}
			q.unreserve("node-b")
		}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := oneNode()
			w.claims = []*resourceapi.ResourceClaim{claim("shared"), claim("own")}
			w.pods = []*v1.Pod{pod("p", "shared"), pod("q", "own", "shared")}
			h := newHarness(t, w)
			g := h.tryGroup(w.pods...)
			g.wantNodes("node-b", "node-b")
			tc.steps(h, g.forGood(0), g.forGood(1))
			want := state{Users: tc.users}
			if tc.users != nil {
				want.Devices = []string{"gpu-0"}
			}
			h.wantState("shared", want)
			held := 0
			for _, name := range []string{"shared", "own"} {
				held += len(devicesOf(h.api.get(name)))
			}
			if got := h.plugin.shared.account.Tracker.Snapshot().Usage.Len(); got != held {
				t.Errorf("%d devices are in use, want the %d that are allocated", got, held)
			}
		})
	}
}

func mustBind(h *harness, attempts ...*attempt) {
	h.t.Helper()
	for _, a := range attempts {
		if status := a.preBind("node-b"); !status.IsSuccess() {
			h.t.Errorf("PreBind of pod %s: %v", a.pod.Name, status)
		}
	}
}

// withGroups turns on what is off by default.
func withGroups(t testing.TB) {
	t.Helper()
	featuregatetesting.SetFeatureGatesDuringTest(t, utilfeature.DefaultFeatureGate, map[featuregate.Feature]bool{
		features.GenericWorkload: true, features.DRAWorkloadResourceClaims: true,
	})
}

// group is a pod group "g" with the named claims, as pod() names them.
func group(claims ...string) *schedulingapi.PodGroup {
	g := &schedulingapi.PodGroup{ObjectMeta: meta("g")}
	for _, claim := range claims {
		g.Spec.ResourceClaims = append(g.Spec.ResourceClaims, schedulingapi.PodGroupResourceClaim{Name: "use-" + claim, ResourceClaimName: ptr.To(claim)})
	}
	return g
}

// member makes a pod one of the group.
func member(p *v1.Pod) *v1.Pod {
	p.Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: ptr.To("g")}
	return p
}

// forGroup reserves a claim for the group.
func forGroup(c *resourceapi.ResourceClaim) {
	c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{
		APIGroup: schedulingapi.GroupName, Resource: "podgroups", Name: "g", UID: "g-uid",
	})
}

// A claim that the group names, too, is reserved for the group, once. One that only a pod names is reserved for the pod.
func TestClaimIsReservedForTheGroup(t *testing.T) {
	withGroups(t)
	w := oneNode()
	w.claims = []*resourceapi.ResourceClaim{claim("common"), claim("own")}
	w.groups = []*schedulingapi.PodGroup{group("common")}
	w.pods = []*v1.Pod{member(pod("p", "common")), member(pod("q", "common", "own"))}
	h := newHarness(t, w)
	g := h.tryGroup(w.pods...)
	p, q := g.forGood(0).reserve("node-b"), g.forGood(1).reserve("node-b")
	mustBind(h, p, q)
	want := []resourceapi.ResourceClaimConsumerReference{{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g", UID: "g-uid"}}
	if diff := cmp.Diff(want, h.api.get("common").Status.ReservedFor); diff != "" {
		t.Errorf("the group's claim is reserved for (-want +got):\n%s", diff)
	}
	h.wantState("own", state{Devices: []string{"gpu-1"}, Users: []string{"q"}})

	// A pod that fails leaves the claim to the others.
	q.unreserve("node-b")
	h.wantState("common", state{Devices: []string{"gpu-0"}, Users: []string{"g"}})
	h.wantState("own", state{})

	// The next pod uses it as it is, and says so each time.
	for range 2 {
		before := h.api.get("common")
		h.filterAll(member(pod("r", "common"))).bind("node-b")
		after := h.api.get("common")
		if diff := cmp.Diff(before.Status, after.Status); diff != "" || after.ResourceVersion == before.ResourceVersion {
			t.Errorf("version %s after %s, status (-before +after):\n%s", after.ResourceVersion, before.ResourceVersion, diff)
		}
	}
	// A pod that does not belong to the group shares it as any other claim.
	h.filterAll(pod("s", "common")).bind("node-b")
	h.wantState("common", state{Devices: []string{"gpu-0"}, Users: []string{"g", "s"}})
}

// A claim that was made for the group is its pods', and nobody else's.
func TestClaimMadeForTheGroup(t *testing.T) {
	withGroups(t)
	w := oneNode()
	made := claim("made", func(c *resourceapi.ResourceClaim) {
		c.OwnerReferences = []metav1.OwnerReference{{APIVersion: "scheduling.k8s.io/v1beta1", Kind: "PodGroup", Name: "g", UID: "g-uid", Controller: ptr.To(true)}}
	})
	w.claims = []*resourceapi.ResourceClaim{made}
	g := group()
	g.Spec.ResourceClaims = []schedulingapi.PodGroupResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("one-gpu")}}
	w.groups = []*schedulingapi.PodGroup{g}
	w.pods = []*v1.Pod{member(templatePod("p", "made")), templatePod("stranger", "made")}
	h := newHarness(t, w)
	for _, p := range w.pods {
		if ok := h.plugin.PreEnqueue(h.ctx, p).IsSuccess(); ok != (p.Name == "p") {
			t.Errorf("pod %s may be queued: %t", p.Name, ok)
		}
	}
	h.filterAll(w.pods[0]).bind("node-b")
	h.wantState("made", state{Devices: []string{"gpu-0"}, Users: []string{"g"}})
}

// An allocation for the group that keeps it off nodes is given up as long as none of the pods that use it has a node.
func TestGroupGivesUpItsOwnAllocation(t *testing.T) {
	withGroups(t)
	for name, tc := range map[string]struct {
		assumed *v1.Pod
		givenUp bool
	}{
		"no pod has a node":                  {givenUp: true},
		"a pod has a node":                   {assumed: running("r", "node-a", 0, "common")},
		"a pod without the claim has a node": {assumed: running("r", "node-a", 0, "another"), givenUp: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{
				claim("common", allocated("node-a", "gpu-0"), forGroup), claim("own", withSelector(`device.attributes["gpu.example.com"].model == "H100"`)),
			}
			w.groups = []*schedulingapi.PodGroup{group("common")}
			if tc.assumed != nil {
				w.assumed = []*v1.Pod{member(tc.assumed)}
				w.pods = w.assumed // bound, too
			}
			h := newHarness(t, w)
			g := h.tryGroup(member(pod("p", "common")), member(pod("q", "common", "own")))
			g.wantNodes("node-a", "")
			g.postFilter(g.fitsAll)
			if given := h.api.get("common").Status.Allocation == nil; given != tc.givenUp {
				t.Errorf("the allocation was given up: %t", given)
			}
		})
	}
}

// A claim of the group that came second gives way when the last pod that could be using it does. A pod of the group that does not name it, and is
// bound, could not.
func TestGroupClaimGivesWayWithItsLastPod(t *testing.T) {
	withGroups(t)
	w := fenced()
	w.groups = []*schedulingapi.PodGroup{group("mine")}
	w.pods = []*v1.Pod{member(pod("p", "mine")), member(pod("q", "mine"))}
	w.assumed = []*v1.Pod{member(running("p", "node-a", 0, "mine")), member(running("q", "node-a", 0, "mine"))}
	w.pods = append(w.pods, member(running("r", "node-a", 0, "another")))
	h := newHarness(t, w)
	g := h.tryGroup(w.pods[:2]...)
	g.wantNodes("node-a", "node-a")
	p, q := g.forGood(0).reserve("node-a"), g.forGood(1).reserve("node-a")
	h.othersTake("gpu-0")
	for _, a := range []*attempt{p, q, p} {
		if status := a.preBind("node-a"); status.IsSuccess() {
			t.Fatalf("pod %s passed the fence", a.pod.Name)
		}
		a.unreserve("node-a")
		want := state{Devices: []string{"gpu-0"}, Users: []string{"g"}}
		if a == q {
			h.wantState("mine", state{})
			break
		}
		h.wantState("mine", want)
	}
	// One that tries again counts as one that could be using it.
	h.plugin.shared.memory.Attempts.Begin(h.plugin.handle, w.pods[0])
	if leaves, err := h.plugin.passage.GroupLeaves(h.ctx, w.pods[1], h.api.get("mine")); leaves || err != nil {
		t.Errorf("the group leaves although one of its pods tries again: %t, %v", leaves, err)
	}
}

// A claim of the group came second and is withdrawn, which takes more than one attempt. Meanwhile another pod of the group comes, finds that
// nobody else has the device any more, and uses the claim: it keeps it, be it bound already or about to be, by this scheduler or by the next one.
func TestALateMemberKeepsItsGroupsClaim(t *testing.T) {
	withGroups(t)
	for name, tc := range map[string]struct {
		err            error // the answer to the withdrawal
		restart, bound bool
	}{
		"it is being bound": {err: errServer},
		"it is bound":       {err: errServer, bound: true},
		"it is being bound by the next scheduler":                 {err: errServer, restart: true},
		"it is bound by the next scheduler":                       {err: errServer, restart: true, bound: true},
		"the withdrawal is late":                                  {err: errLate},
		"the withdrawal is late, and the next scheduler is there": {err: errLate, restart: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := fenced()
			w.groups = []*schedulingapi.PodGroup{group("mine")}
			w.pods = []*v1.Pod{member(pod("p", "mine")), member(pod("q", "mine"))}
			w.assumed = []*v1.Pod{member(running("p", "node-a", 0, "mine")), member(running("q", "node-a", 0, "mine"))}
			h := newHarness(t, w)
			h.plugin.binder.UndoPauses = wait.Backoff{Duration: time.Millisecond, Steps: 1}
			g := h.tryGroup(w.pods...)
			p, q := g.forGood(0).reserve("node-a"), g.forGood(1).reserve("node-a")
			h.othersTake("gpu-0")
			if status := q.preBind("node-a"); status.IsSuccess() {
				t.Fatal("the pod passed the fence")
			}
			q.unreserve("node-a")

			withdrawn := make(chan struct{})
			tried := sync.OnceFunc(func() { close(withdrawn) })
			h.api.onRequest(func(request string) error {
				if request == "update/status" {
					tried()
					return tc.err
				}
				return nil
			})
			done := p.preBindAsync()
			<-withdrawn
			h.api.change("other", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
			late := h
			if tc.restart {
				late = startHarness(t, w, h.client, h.api)
			}
			late.caughtUp("other")
			late.filterAll(member(pod("q", "mine"))).bind("node-a")
			if tc.bound {
				late.binds(member(pod("q", "mine")))
			}
			h.api.onRequest(nil)
			h.api.land()
			if status := <-done; status.IsSuccess() {
				t.Error("the pod passed the fence that it had not passed")
			}
			p.unreserve("node-a")
			h.wantState("mine", state{Devices: []string{"gpu-0"}, Users: []string{"g"}})
		})
	}
}

// What is in flight for the group does not end with its pods, any more than what is written.
func TestAGroupsClaimInFlightCannotBeEvicted(t *testing.T) {
	withGroups(t)
	for name, tc := range map[string]struct {
		ofGroup bool
		want    fwk.Code
	}{
		"reserved for the group": {ofGroup: true, want: fwk.UnschedulableAndUnresolvable},
		"reserved for its pods":  {want: fwk.Unschedulable},
	} {
		t.Run(name, func(t *testing.T) {
			for _, written := range []bool{false, true} {
				w := oneNode()
				w.claims = []*resourceapi.ResourceClaim{claim("a"), claim("b"), claim("wanted")}
				w.groups = []*schedulingapi.PodGroup{group()}
				if tc.ofGroup {
					w.groups = []*schedulingapi.PodGroup{group("a", "b")}
				}
				w.pods = []*v1.Pod{member(pod("p", "a")), member(pod("q", "b"))}
				w.assumed = []*v1.Pod{member(running("p", "node-b", 0, "a")), member(running("q", "node-b", 0, "b"))}
				h := newHarness(t, w)
				for _, p := range w.pods {
					if a := h.filterAll(p).reserve("node-b"); written {
						mustBind(h, a)
					}
				}
				a := h.filterAll(pending("high", 5, "wanted"))
				if got := a.statuses.Get("node-b").Code(); got != tc.want {
					t.Errorf("written: %t: the node is refused with %v, want %v", written, got, tc.want)
				}
			}
		})
	}
}

// While a group is tried the scheduling queue does not know what those of its pods need that are nominated, and as soon as they have failed it
// does. The others get what was tried; they would be tried again at once, for ever. What is kept for pods that were known stays kept.
func TestAMemberGetsWhatWasTriedBesideNominatedOnes(t *testing.T) {
	withGroups(t)
	const any0, any1 = "any-0", "any-1"
	picky := func(model string) func(*resourceapi.ResourceClaim) {
		return withSelector(`device.attributes["gpu.example.com"].model == "` + model + `"`)
	}
	for name, tc := range map[string]struct {
		others []string // pods without a group, by claim, that are nominated all the time
		want   []string // devices
	}{
		"nobody else is nominated":         {want: []string{"gpu-0", "gpu-1"}},
		"two pods of others are nominated": {others: []string{"h100", "a100"}, want: []string{"gpu-2", "gpu-3"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := oneNode()
			w.objects = []runtime.Object{class(testClass), slice("node-b", device("gpu-0", withModel("H100")), device("gpu-1", withModel("A100")),
				device("gpu-2", withModel("L40")), device("gpu-3", withModel("L40")), device("gpu-4", withModel("L40")))}
			w.claims = []*resourceapi.ResourceClaim{
				claim("all-0", counted(5)), claim("all-1", counted(5)), claim(any0), claim(any1), claim("h100", picky("H100")), claim("a100", picky("A100")),
				claim("held", allocated("node-b", "gpu-4"), reservedFor("gone")),
			}
			w.groups = []*schedulingapi.PodGroup{group()}
			q0, q1 := member(pending("q0", 5, "all-0")), member(pending("q1", 5, "all-1"))
			r0, r1 := member(pending("r0", 5, any0)), member(pending("r1", 5, any1))
			w.pods = []*v1.Pod{q0, q1, r0, r1}
			known := []*v1.Pod{}
			for _, claim := range tc.others {
				known = append(known, pending("with-"+claim, 5, claim))
			}
			w.pods = append(w.pods, known...)
			h := newHarness(t, w)
			h.nominator.nominate("node-b", append(slices.Clip(known), pod("q0"), pod("q1"))...)
			g := h.tryGroup(q0, q1, r0, r1)
			g.wantNodes("", "", "node-b", "node-b")
			h.nominator.nominate("node-b", append(slices.Clip(known), q0, q1)...)
			var got []string
			for i, claim := range []string{any0, any1} {
				if status := h.plugin.Reserve(h.ctx, g.forGood(2+i).state, g.pods[2+i], "node-b"); !status.IsSuccess() {
					t.Errorf("pod %s fitted when its group was tried, and now: %v", g.pods[2+i].Name, status)
					continue
				}
				pending, _ := h.plugin.shared.account.Tracker.Pending(types.UID(claim + "-uid"))
				got = append(got, pending.Devices.Results[0].Device)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("devices (-want +got):\n%s", diff)
			}
		})
	}
}

// The scheduling queue tries a pod of a group at once when its binding has failed. So the attempt ends with a pause, as other pods have one.
func TestAMemberWhoseBindingFailsMakesAPause(t *testing.T) {
	withGroups(t)
	const s = time.Second
	ofGroup, alone := member(pod("p", "a")), pod("p", "a")
	for name, tc := range map[string]struct {
		pod   *v1.Pod
		binds bool // its binding begins
		gone  bool
		ends  bool // the scheduler
		want  []time.Duration
	}{
		"a member":                          {pod: ofGroup, binds: true, want: []time.Duration{s, 2 * s, 4 * s, 8 * s, 10 * s, 10 * s}},
		"a member that was not to be bound": {pod: ofGroup, want: []time.Duration{0, 0}},
		"a member that is gone":             {pod: ofGroup, binds: true, gone: true, want: []time.Duration{0, 0}},
		"a member when the scheduler ends":  {pod: ofGroup, binds: true, ends: true, want: []time.Duration{0}},
		"a pod without a group":             {pod: alone, binds: true, want: []time.Duration{0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			w := oneNode()
			w.claims, w.groups = []*resourceapi.ResourceClaim{claim("a")}, []*schedulingapi.PodGroup{group()}
			if !tc.gone {
				w.pods = []*v1.Pod{tc.pod}
			}
			h := newHarness(t, w)
			h.plugin.shared.memory.Attempts.Pauses = podmemory.MemberPauses
			clock := testingclock.NewFakeClock(time.Now())
			h.plugin.binder.Clock = clock
			fail := func() <-chan struct{} {
				a := h.filterAll(tc.pod).reserve("node-b")
				if tc.binds {
					h.statusWrites(errServer)
					if status := a.preBind("node-b"); status.IsSuccess() {
						t.Error("the pod is bound without its claim")
					}
					h.api.onRequest(nil)
				}
				if tc.ends {
					h.cancel()
				}
				done := make(chan struct{})
				go func() {
					defer close(done)
					a.unreserve("node-b")
				}()
				return done
			}
			pauses := func(want time.Duration) {
				t.Helper()
				done := fail()
				if want > 0 {
					h.eventually("the pod pauses", clock.HasWaiters)
					if held := h.plugin.shared.account.Tracker.Snapshot().Usage.Len(); held > 0 {
						t.Errorf("%d devices are held meanwhile", held)
					}
					clock.Step(want - 1)
					if !clock.HasWaiters() {
						t.Errorf("the pause is shorter than %s", want)
					}
					clock.Step(1)
				}
				select {
				case <-done:
				case <-time.After(patience):
					t.Fatalf("the pause is longer than %s", want)
				}
			}
			for _, want := range tc.want {
				pauses(want)
			}
			if tc.want[0] == 0 {
				return
			}
			h.plugin.PostBind(h.ctx, h.filterAll(tc.pod).state, tc.pod, "node-b")
			pauses(tc.want[0])
		})
	}
}

// A pod that Reserve refuses though its group fitted is tried again at once, and pauses when that goes on.
func TestAMemberThatReserveRefusesPauses(t *testing.T) {
	withGroups(t)
	w := oneNode()
	w.claims = []*resourceapi.ResourceClaim{claim("a"), claim("b"), claim("other"), claim("another")}
	w.groups = []*schedulingapi.PodGroup{group()}
	w.pods = []*v1.Pod{member(pod("p", "a")), member(pod("q", "b"))}
	h := newHarness(t, w)
	h.plugin.shared.memory.Attempts.Pauses = podmemory.MemberPauses
	clock := testingclock.NewFakeClock(time.Now())
	h.plugin.binder.Clock = clock
	held := func(n int) func() bool {
		return func() bool { return h.plugin.shared.account.Tracker.Snapshot().Usage.Len() == n }
	}
	taken := map[string][]string{"other": {"gpu-0"}, "another": {"gpu-1"}}
	refuse := func() {
		t.Helper()
		g := h.tryGroup(w.pods...)
		g.wantNodes("node-b", "node-b")
		for claim, devices := range taken {
			h.api.change(claim, allocated("node-b", devices...))
		}
		h.eventually("others have the devices", held(2))
		for i, p := range g.pods {
			a := g.forGood(i)
			if status := h.plugin.Reserve(h.ctx, a.state, p, "node-b"); status.Code() != fwk.Unschedulable {
				t.Errorf("Reserve of pod %s: %v, want it refused", p.Name, status)
			}
			a.unreserve("node-b")
		}
		for claim := range taken {
			h.api.change(claim, func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
		}
		h.eventually("the devices are free", held(0))
	}
	refuse()
	for _, pause := range []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 10 * time.Second, 10 * time.Second} {
		refuse() // and the time before has not made it pause any more
		clock.Step(pause - 1)
		h.tryGroup(w.pods...).wantNodes("", "")
		clock.Step(1)
	}
	g := h.tryGroup(w.pods...)
	g.wantNodes("node-b", "node-b")
	for i := range g.pods {
		g.forGood(i).bind("node-b")
		h.plugin.PostBind(h.ctx, g.attempts[i].state, g.pods[i], "node-b")
	}
	for _, p := range g.pods {
		if until := h.plugin.shared.memory.Attempts.PausesUntil(p.UID); !until.IsZero() || h.plugin.shared.memory.Attempts.Of(p.UID) != nil {
			t.Errorf("pod %s is bound, and pauses until %v, or its attempt is left", p.Name, until)
		}
	}
}

// The room wakes a member that pauses as soon as it may be tried again, and not before.
func TestAPausingMemberIsWokenInTime(t *testing.T) {
	withGroups(t)
	w := oneNode()
	w.claims = []*resourceapi.ResourceClaim{claim("a")}
	w.groups = []*schedulingapi.PodGroup{group()}
	w.pods = []*v1.Pod{member(pod("p", "a"))}
	h := newHarness(t, w)
	clock := testingclock.NewFakeClock(time.Now()) // stands still, and the room's goes on
	h.plugin.binder.Clock = clock
	for _, pause := range []time.Duration{time.Hour, time.Millisecond} {
		h.plugin.shared.memory.Attempts.Pauses.Duration = pause
		for range 2 {
			h.plugin.shared.memory.Attempts.Refuse(w.pods[0], clock.Now())
		}
		g := h.tryGroup(w.pods...)
		g.wantNodes("")
		g.postFilter(nil)
		if pause == time.Millisecond {
			h.wakes("p")
		} else if woken := h.lookedAt(); len(woken) > 0 {
			t.Errorf("%v woken early", woken)
		}
		h.plugin.shared.memory.Attempts.End(w.pods[0].UID)
	}
}

// A group that did not fit is tried again by and by, though nothing has changed: the queue lets it sleep after it has had others evicted. And it
// is as soon as a device is free.
func TestAGroupThatDidNotFitIsTriedAgain(t *testing.T) {
	withGroups(t)
	claims := map[string][2][]string{
		"claims of their own":           {{"a"}, {"b"}},
		"one that they share, and more": {{"shared"}, {"shared", "b"}},
	}
	for name, tc := range map[string]struct {
		retryAfter time.Duration
		change     func(h *harness)
	}{
		"by time": {time.Millisecond, func(*harness) {}},
		"as a device is free": {time.Hour, func(h *harness) {
			h.api.change("held", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
		}},
	} {
		for of, claims := range claims {
			t.Run(name+"/"+of, func(t *testing.T) {
				w := oneNode()
				w.room.RetryAfter = tc.retryAfter
				w.claims = []*resourceapi.ResourceClaim{claim("a"), claim("b"), claim("shared"), claim("held", allocated("node-b", "gpu-0"))}
				w.groups = []*schedulingapi.PodGroup{group()}
				w.pods = []*v1.Pod{member(pod("p", claims[0]...)), member(pod("q", claims[1]...))}
				h := newHarness(t, w)
				g := h.tryGroup(w.pods...)
				g.wantNodes("node-b", "")
				g.postFilter(nil)
				tc.change(h)
				h.wakes("q")
			})
		}
	}
}

// The framework does not try the pods after the first one that does not fit. One of them that was woken is not woken again and again for that.
func TestAMemberThatIsNotTriedIsNotWokenForEver(t *testing.T) {
	withGroups(t)
	for name, tried := range map[string]int{"not tried": 1, "tried, and refused": 2} {
		t.Run(name, func(t *testing.T) {
			var ended atomic.Int32
			w := oneNode()
			w.room = wakeup.Options{RetryAfter: time.Millisecond, OnOutcome: func(wakeup.Cause, bool) { ended.Add(1) }}
			w.claims = []*resourceapi.ResourceClaim{claim("a"), claim("b"), claim("held", allocated("node-b", "gpu-0")), claim("other")}
			w.groups = []*schedulingapi.PodGroup{group()}
			w.pods = []*v1.Pod{member(pod("p", "a")), member(pod("q", "b"))}
			h := newHarness(t, w)
			g := h.tryGroup(w.pods...)
			g.wantNodes("node-b", "")
			g.postFilter(nil)
			h.wakes("q")
			h.api.change("other", allocated("node-b", "gpu-1"))
			h.eventually("both are held", func() bool { return h.plugin.shared.account.Tracker.Snapshot().Usage.Len() == 2 })
			g = h.tryGroup(w.pods[:tried]...)
			g.pods = w.pods
			g.postFilter(nil)
			if got := ended.Load(); got != 1 {
				t.Errorf("%d wake-ups have ended, want 1", got)
			}
		})
	}
}

// A woken pod of a group need not be tried: the group may lack others. Nothing is kept for it, so whoever else fits is woken, too.
func TestNothingIsKeptForAWokenMember(t *testing.T) {
	withGroups(t)
	w := oneNode()
	w.claims = []*resourceapi.ResourceClaim{claim("a"), claim("b"), claim("held", allocated("node-b", "gpu-0")), claim("other", allocated("node-b", "gpu-1"))}
	w.groups = []*schedulingapi.PodGroup{group()}
	w.pods = []*v1.Pod{member(pending("p", 5, "a")), pending("q", 1, "b")}
	h := newHarness(t, w)
	for _, p := range w.pods {
		if a := h.filterAll(p); a.postFilter().IsSuccess() {
			t.Errorf("pod %s fits %v", p.Name, a.fits())
		}
	}
	h.api.change("held", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
	h.wakes("p", "q")
}

// Two groups share a claim whose node is gone. Each gives up its own reservation, and the last one the allocation.
func TestTwoGroupsGiveUpAClaimTogether(t *testing.T) {
	withGroups(t)
	second := group("common")
	second.Name, second.UID = "g2", "g2-uid"
	forSecond := func(c *resourceapi.ResourceClaim) {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g2", UID: "g2-uid"})
	}
	for name, tc := range map[string]struct {
		reserved []func(*resourceapi.ResourceClaim)
		bound    bool // a pod of the first group has a node
	}{
		"one group":                   {reserved: []func(*resourceapi.ResourceClaim){forGroup}},
		"two groups":                  {reserved: []func(*resourceapi.ResourceClaim){forGroup, forSecond}},
		"two groups, one with a node": {reserved: []func(*resourceapi.ResourceClaim){forGroup, forSecond}, bound: true},
	} {
		t.Run(name, func(t *testing.T) {
			p, q := member(pod("p", "common")), pod("q", "common")
			q.Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: ptr.To("g2")}
			w := twoNodes()
			c := claim("common", allocated("node-a", "gpu-0"))
			for _, change := range tc.reserved {
				change(c)
			}
			w.claims = []*resourceapi.ResourceClaim{c}
			w.groups = []*schedulingapi.PodGroup{group("common"), second}
			w.pods = []*v1.Pod{p, q}
			if tc.bound {
				w.pods = append(w.pods, member(running("r", "node-a", 0, "common")))
			}
			h := newHarness(t, w)
			h.nodes = h.nodes[1:]
			for range 2 {
				for _, x := range []*v1.Pod{p, q} {
					if g := h.tryGroup(x); g.nodes[0] == "" {
						g.postFilter(func(context.Context) (*fwk.PodGroupAssignments, *fwk.Status) {
							return nil, fwk.NewStatus(fwk.Unschedulable)
						})
					}
					h.caughtUp("common")
				}
			}
			if got := h.api.get("common"); (got.Status.Allocation != nil) != tc.bound {
				t.Errorf("allocated: %t, for %v", got.Status.Allocation != nil, got.Status.ReservedFor)
			}
		})
	}
}

// A note that another process is binding somebody else does not keep a group from giving up its own reservation.
func TestAGroupGivesUpItsReservationBesideAnothersNote(t *testing.T) {
	withGroups(t)
	for name, tc := range map[string]struct {
		noted types.UID
		users []string
	}{
		"no note":                  {users: []string{"other"}},
		"a note about another pod": {noted: "other-uid", users: []string{"other"}},
		"a note about the group":   {noted: "g-uid", users: []string{"g", "other"}},
	} {
		t.Run(name, func(t *testing.T) {
			w := oneNode()
			note := func(c *resourceapi.ResourceClaim) {
				if tc.noted != "" {
					metav1.SetMetaDataAnnotation(&c.ObjectMeta, binding.AdoptionKey(tc.noted), binding.Adoption{By: "before", At: time.Now().Add(-5 * time.Minute)}.String())
				}
			}
			w.claims = []*resourceapi.ResourceClaim{
				claim("first", forGroup, reservedFor("other"), allocated("node-b", "gpu-0"), note), claim("large", counted(3)),
			}
			w.groups = []*schedulingapi.PodGroup{group("first")}
			p, q := member(pod("p", "first")), member(pod("q", "large"))
			w.pods = []*v1.Pod{p, q, running("other", "node-b", 1, "first")}
			h := newHarness(t, w)
			g := h.tryGroup(p, q)
			g.wantNodes("node-b", "")
			g.postFilter(nil)
			h.wantState("first", state{Devices: []string{"gpu-0"}, Users: tc.users})
		})
	}
}

// A member whose binding is cancelled by preemption: what it holds up is the preemptor.
func TestAPreemptedMemberMakesWayAtOnce(t *testing.T) {
	withGroups(t)
	w := oneNode()
	w.claims, w.groups = []*resourceapi.ResourceClaim{claim("a")}, []*schedulingapi.PodGroup{group()}
	p := member(pod("p", "a"))
	w.pods = []*v1.Pod{p}
	h := newHarness(t, w)
	h.plugin.shared.memory.Attempts.Pauses = podmemory.MemberPauses
	clock := testingclock.NewFakeClock(time.Now())
	h.plugin.binder.Clock = clock
	a := h.filterAll(p).reserve("node-b")
	binding, cancel := context.WithCancelCause(h.ctx)
	cancel(errors.New("preempted"))
	h.plugin.shared.memory.Attempts.PreBind(binding, p.UID)
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.unreserve("node-b") // with the context of the binding cycle, which preemption does not cancel
	}()
	h.eventually("the preempted pod has left its place on the node", func() bool {
		select {
		case <-done:
			return true
		default:
			return false
		}
	})
}
