// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/events"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/gate"
)

// leads has the plugin tell pods at once why they are kept back.
func (h *harness) leads() *harness {
	h.plugin.shared.gated.Grace = 0
	h.plugin.shared.Lead()
	return h
}

// condition is what a pod's condition PodScheduled says, "" if it has none.
func (h *harness) condition(name string) string {
	h.t.Helper()
	p, err := h.client.CoreV1().Pods(testNamespace).Get(h.ctx, name, metav1.GetOptions{})
	if err != nil {
		h.t.Fatal(err)
	}
	if c := gate.ScheduledCondition(p); c != nil {
		return string(c.Status) + " " + c.Reason + ": " + c.Message
	}
	return ""
}

// letIn is the condition of a pod that was kept back before.
const letIn = "False WaitingToBeScheduled: the pod's claims can be used now, it waits to be scheduled"

func (h *harness) awaitCondition(name, want string) {
	h.t.Helper()
	h.eventually("the condition of pod "+name+" is "+want, func() bool { return h.condition(name) == want })
}

// settled waits until all that is to be told has been told.
func (h *harness) settled() {
	h.t.Helper()
	h.eventually("nothing is left to be told", func() bool { return h.plugin.shared.gated.Queue.Len() == 0 })
	h.plugin.shared.gated.Queue.ShutDownWithDrain()
}

func withCondition(p *v1.Pod, reason, message string) *v1.Pod {
	p.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: reason, Message: message}}
	return p
}

func TestPodsThatAreKeptOutOfTheQueueAreToldWhy(t *testing.T) {
	tests := map[string]struct {
		pod                      *v1.Pod
		wantCondition, wantEvent string
	}{
		"a claim that somebody has to make": {
			pod("p", "missing"),
			"False WaitingForResourceClaim: claim team-a/missing does not exist",
			"Warning ClaimMissing claim team-a/missing does not exist",
		},
		"a claim that is being deleted": {
			pod("p", "leaving"),
			"False WaitingForResourceClaim: claim team-a/leaving is being deleted",
			"Warning ClaimBeingDeleted claim team-a/leaving is being deleted",
		},
		"a claim that was made for another pod": {
			templatePod("p", "others"),
			"False WaitingForResourceClaim: ResourceClaim team-a/others was not created for Pod team-a/p (Pod is not owner)",
			"Warning ClaimOfAnotherPod ResourceClaim team-a/others was not created for Pod team-a/p (Pod is not owner)",
		},
		"a claim that was made for the pod and is not there": {
			templatePod("p", "coming"),
			"False WaitingForResourceClaim: claim team-a/coming does not exist",
			"Warning ClaimMissing claim team-a/coming does not exist",
		},
		"a claim that is still to be made": {
			templatePod("p", ""), `False WaitingForResourceClaim: spec.resourceClaims[0] "gpu": no claim has been made yet from template "one-gpu"`,
			`Warning ClaimNotMade spec.resourceClaims[0] "gpu": no claim has been made yet from template "one-gpu"`,
		},
		"what an attempt has said before is not true any more": {
			withCondition(pod("p", "missing"), v1.PodReasonUnschedulable, "0/3 nodes are available"),
			"False WaitingForResourceClaim: claim team-a/missing does not exist",
			"Warning ClaimMissing claim team-a/missing does not exist",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, world{
				claims: []*resourceapi.ResourceClaim{claim("leaving", deleting), claim("others", ownedBy(pod("other")))},
				pods:   []*v1.Pod{tc.pod},
			}).leads()
			for range 2 { // told once
				if status := h.plugin.PreEnqueue(h.ctx, tc.pod); status.IsSuccess() {
					t.Fatal("the pod was let in")
				}
			}
			h.awaitCondition("p", tc.wantCondition)
			if got := <-h.recorder.Events; got != tc.wantEvent {
				t.Errorf("event %q, want %q", got, tc.wantEvent)
			}
			h.plugin.PreEnqueue(h.ctx, tc.pod)
			h.settled()
			if len(h.recorder.Events) > 0 {
				t.Errorf("another event: %q", <-h.recorder.Events)
			}
		})
	}
}

// The condition follows the claims: to the next reason, and away when there is none.
func TestTheConditionOfAPodThatIsKeptOutStaysTrue(t *testing.T) {
	p := pod("p", "first", "second")
	w := twoNodes()
	w.pods = []*v1.Pod{p}
	h := newHarness(t, w).leads()
	h.plugin.PreEnqueue(h.ctx, p)
	h.awaitCondition("p", "False WaitingForResourceClaim: claim team-a/first does not exist")

	// Nobody wakes the pod for that, as it would be kept back again.
	h.api.create(claim("first"))
	h.awaitCondition("p", "False WaitingForResourceClaim: claim team-a/second does not exist")
	if woken := h.activator.taken(); len(woken) > 0 {
		t.Errorf("woken: %q", woken)
	}

	h.api.create(claim("second"))
	h.eventually("the pod is woken", func() bool { return len(h.activator.taken()) > 0 })
	if status := h.plugin.PreEnqueue(h.ctx, p); !status.IsSuccess() {
		t.Fatalf("PreEnqueue: %v", status)
	}
	h.awaitCondition("p", letIn)
}

// The claim of a pod that was kept back is there, and something else is the matter with it. An attempt finds out what.
func TestAPodThatIsKeptOutIsTriedWhenItsClaimIsThere(t *testing.T) {
	p := pod("p", "wanted")
	w := twoNodes()
	w.pods = []*v1.Pod{p}
	h := newHarness(t, w).leads()
	h.plugin.PreEnqueue(h.ctx, p)
	h.awaitCondition("p", "False WaitingForResourceClaim: claim team-a/wanted does not exist")
	h.api.create(claim("wanted", withClass("missing")))
	h.eventually("the pod is woken", func() bool { return len(h.activator.taken()) > 0 })
	if status := h.plugin.PreEnqueue(h.ctx, p); !status.IsSuccess() {
		t.Errorf("PreEnqueue: %v", status)
	}
	h.awaitCondition("p", letIn)
}

// A pod that was tried, and has a claim deleted while it sleeps, is told so, whatever its attempt had found.
func TestASleepingPodIsToldThatItsClaimIsGone(t *testing.T) {
	p := withCondition(pod("p", "wanted"), v1.PodReasonUnschedulable, "0/2 nodes are available")
	w := twoNodes()
	w.pods = []*v1.Pod{p}
	w.claims = []*resourceapi.ResourceClaim{claim("wanted", withSelector("false"))}
	h := newHarness(t, w).leads()
	h.filterAll(p).postFilter()
	h.api.delete("wanted")
	h.awaitCondition("p", "False WaitingForResourceClaim: claim team-a/wanted does not exist")
}

func TestConditionsThatAreNotAboutClaimsAreLeftAlone(t *testing.T) {
	tests := map[string]struct {
		pod    *v1.Pod
		claims []*resourceapi.ResourceClaim
		want   string
	}{
		"a pod with scheduling gates has the condition that says so": {
			func() *v1.Pod {
				p := withCondition(pod("p", "missing"), v1.PodReasonSchedulingGated, "Scheduling is blocked due to non-empty scheduling gates")
				p.Spec.SchedulingGates = []v1.PodSchedulingGate{{Name: "quota"}}
				return p
			}(), nil, "False SchedulingGated: Scheduling is blocked due to non-empty scheduling gates",
		},
		"a pod that is let in keeps what its attempt has found": {
			withCondition(pod("p", "there"), v1.PodReasonUnschedulable, "0/3 nodes are available"),
			[]*resourceapi.ResourceClaim{claim("there")},
			"False Unschedulable: 0/3 nodes are available",
		},
		"what a scheduler before us has told goes when the pod is let in": {
			withCondition(pod("p", "there"), ReasonWaitingForClaim, "claim team-a/there does not exist"),
			[]*resourceapi.ResourceClaim{claim("there")},
			letIn,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, world{pods: []*v1.Pod{tc.pod}, claims: tc.claims}).leads()
			h.plugin.PreEnqueue(h.ctx, tc.pod)
			h.settled()
			if diff := cmp.Diff(tc.want, h.condition("p")); diff != "" {
				t.Errorf("condition (-want +got):\n%s", diff)
			}
		})
	}
}

// The pod may be bound, by an earlier leader for one, when its condition is written. The API server refuses that by the resource version.
func TestTheConditionIsWrittenOnWhatWasRead(t *testing.T) {
	p := pod("p", "missing")
	p.ResourceVersion = "7"
	h := newHarness(t, world{pods: []*v1.Pod{p}}).leads()
	h.plugin.PreEnqueue(h.ctx, p)
	h.awaitCondition("p", "False WaitingForResourceClaim: claim team-a/missing does not exist")
	for _, action := range h.client.Actions() {
		patch, ok := action.(interface{ GetPatch() []byte })
		if ok && !strings.Contains(string(patch.GetPatch()), `"metadata":{"resourceVersion":"7","uid":"p-uid"}`) {
			t.Errorf("patch %s has no precondition", patch.GetPatch())
		}
	}
}

// Replicas that do not lead have the pods in their queues, too.
func TestOnlyTheLeaderTellsPods(t *testing.T) {
	p := pod("p", "missing")
	h := newHarness(t, world{pods: []*v1.Pod{p}})
	h.plugin.shared.gated.Grace = 0
	h.plugin.PreEnqueue(h.ctx, p)
	if h.plugin.shared.gated.Queue.Len() != 1 {
		t.Error("it is forgotten")
	}
	if got := h.condition("p"); got != "" {
		t.Errorf("told: %s", got)
	}
	h.leads().awaitCondition("p", "False WaitingForResourceClaim: claim team-a/missing does not exist")
}

// Two schedulers in one cluster: each tells its own pods, and leaves alone what the other one tells.
func TestAPodOfAnotherSchedulerKeepsWhatItWasTold(t *testing.T) {
	theirs := withCondition(pod("theirs", "missing"), ReasonWaitingForClaim, "claim team-a/missing does not exist")
	theirs.Spec.SchedulerName = "another"
	ours := withCondition(pod("ours"), ReasonWaitingForClaim, "claim team-a/gone does not exist")
	h := newHarness(t, world{pods: []*v1.Pod{theirs, ours}}).leads()
	for _, p := range []*v1.Pod{theirs, ours} { // the informer tells of the first one before it tells of the second one
		changed := p.DeepCopy()
		changed.Labels = map[string]string{"changed": "yes"}
		if _, err := h.client.CoreV1().Pods(testNamespace).Update(h.ctx, changed, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	h.awaitCondition("ours", letIn)
	h.settled()
	if got, want := h.condition("theirs"), "False WaitingForResourceClaim: claim team-a/missing does not exist"; got != want {
		t.Errorf("condition %q, want %q", got, want)
	}
}

// The scheduling queue may take up a pod of whose end the plugin has heard before, see [TestAPodThatIsGoneDoesNotWait].
func TestAPodThatIsGoneIsNotKeptInMind(t *testing.T) {
	again := pod("again", "missing")
	h := newHarness(t, world{pods: []*v1.Pod{again}}).leads()
	before := again.DeepCopy()
	before.UID = "before"
	h.plugin.PreEnqueue(h.ctx, pod("gone", "missing"))
	h.plugin.PreEnqueue(h.ctx, before)
	h.eventually("both are forgotten", func() bool {
		return !h.plugin.shared.gated.Keeps(pod("gone", "missing")) && !h.plugin.shared.gated.Keeps(before)
	})
}

// The scheduling queue does not look at a group again that has lost a pod.
func TestAGroupIsTriedWhenThePodThatKeptItBackIsGone(t *testing.T) {
	withGroups(t)
	for name, tc := range map[string]struct {
		pod       *v1.Pod
		activated []string
	}{
		"a pod that was kept back":     {pod: member(pod("p", "missing")), activated: []string{"p"}},
		"a pod without a claim's name": {pod: member(templatePod("p", "")), activated: []string{"p"}},
		"a pod that was let in":        {pod: member(pod("p", "there"))},
		"a pod without a group":        {pod: pod("p", "missing")},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, world{
				pods: []*v1.Pod{tc.pod}, groups: []*schedulingapi.PodGroup{group()}, claims: []*resourceapi.ResourceClaim{claim("there")},
			})
			h.plugin.PreEnqueue(h.ctx, tc.pod)
			ended := make(chan struct{})
			informer := h.plugin.handle.SharedInformerFactory().Core().V1().Pods().Informer()
			// Handlers are told in no order among each other, but in that of what happens.
			if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{DeleteFunc: func(any) { close(ended) }}); err != nil {
				t.Fatal(err)
			}
			if err := h.client.CoreV1().Pods(testNamespace).Delete(h.ctx, "p", metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			<-ended
			var activated []string
			h.eventually("the pod is forgotten", func() bool {
				activated = append(activated, h.activator.taken()...)
				return !h.plugin.shared.gated.Keeps(tc.pod) && len(activated) >= len(tc.activated)
			})
			if diff := cmp.Diff(tc.activated, activated); diff != "" {
				t.Errorf("activated (-want +got):\n%s", diff)
			}
			if status := h.plugin.PreEnqueue(h.ctx, tc.pod); !status.IsSuccess() {
				t.Errorf("it keeps its group back for ever: %v", status)
			}
		})
	}
}

// A pod's events come from its own profile.
func TestAPodIsToldByItsOwnProfile(t *testing.T) {
	p := pod("p", "missing")
	p.Spec.SchedulerName = "second"
	h := newHarness(t, world{pods: []*v1.Pod{p}})
	second := profileHandle{Handle: h.plugin.handle, recorder: events.NewFakeRecorder(1)}
	h.plugin.shared.gated.Serve(second, h.plugin.holdings.GiveUpKeptBack)
	h.leads().plugin.PreEnqueue(h.ctx, p)
	h.awaitCondition("p", "False WaitingForResourceClaim: claim team-a/missing does not exist")
	h.eventually("it is told by an event", func() bool { return len(second.recorder.Events)+len(h.recorder.Events) > 0 })
	if len(second.recorder.Events) == 0 {
		t.Fatalf("an event of the other profile: %q", <-h.recorder.Events)
	}
	if got, want := <-second.recorder.Events, "Warning ClaimMissing claim team-a/missing does not exist"; got != want {
		t.Errorf("event %q, want %q", got, want)
	}
	h.settled()
	if len(h.recorder.Events) > 0 {
		t.Errorf("an event of the other profile: %q", <-h.recorder.Events)
	}
}

// profileHandle is the handle of a profile named "second".
type profileHandle struct {
	fwk.Handle
	recorder *events.FakeRecorder
}

func (profileHandle) ProfileName() string                         { return "second" }
func (h profileHandle) EventRecorder() events.EventRecorderLogger { return h.recorder }
