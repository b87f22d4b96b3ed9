// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
)

func TestWaitingForClaimsThatLeave(t *testing.T) {
	nominatedTo := func(p *v1.Pod, node string) *v1.Pod {
		p.Status.NominatedNodeName = node
		return p
	}
	// node-a is held by a pod that could be evicted.
	onA := claim("on-a", allocated("node-a", "gpu-0"), reservedFor("low-a"))
	lowA := running("low-a", "node-a", 1, "on-a")
	terminating := func(priority int32) *v1.Pod {
		p := running("low-b", "node-b", priority, "on-b")
		p.DeletionTimestamp = &metav1.Time{Time: metav1.Now().Time}
		p.Finalizers = []string{"example.com/slow"}
		return p
	}
	done := running("low-b", "node-b", 1, "on-b")
	done.Status.Phase = v1.PodSucceeded
	onB := func(change ...func(*resourceapi.ResourceClaim)) *resourceapi.ResourceClaim {
		return claim("on-b", append(change, allocated("node-b", "gpu-0", "gpu-1"), reservedFor("low-b"))...)
	}
	tests := map[string]struct {
		claims []*resourceapi.ResourceClaim
		pods   []*v1.Pod
		pod    *v1.Pod
		waits  bool
	}{
		"the pod of the claim is gone": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB()}, pods: []*v1.Pod{lowA},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-b"), waits: true,
		},
		"a pod that may not preempt has somebody else to thank": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB()}, pods: []*v1.Pod{lowA},
			pod: func() *v1.Pod {
				p := nominatedTo(pending("p", 5, "wanted"), "node-b")
				p.Spec.PreemptionPolicy = ptr.To(v1.PreemptNever)
				return p
			}(), waits: true,
		},
		"the pod of the claim has been preempted and is going": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB()}, pods: []*v1.Pod{lowA, preempted(terminating(1), v1.PodReasonPreemptionByScheduler)},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-b"), waits: true,
		},
		// As the scheduler's own preemption does: how long such a pod takes is not known, and it need not be its turn.
		"the pod of the claim is going for another reason": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB()}, pods: []*v1.Pod{lowA, terminating(1)},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-b"),
		},
		"the pod of the claim is going and has a higher priority": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB()}, pods: []*v1.Pod{lowA, terminating(9)},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-b"),
		},
		"the pod of the claim has been preempted by one of yet higher priority": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB()}, pods: []*v1.Pod{lowA, preempted(terminating(9), v1.PodReasonPreemptionByScheduler)},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-b"),
		},
		"the pod of the claim has been preempted and has the same priority": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB()}, pods: []*v1.Pod{lowA, preempted(terminating(5), v1.PodReasonPreemptionByScheduler)},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-b"),
		},
		"one of two users of the claim has a higher priority and is going": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB(reservedFor("gone"))}, pods: []*v1.Pod{lowA, terminating(9)},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-b"),
		},
		"the pod of the claim has ended": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB()}, pods: []*v1.Pod{lowA, done},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-b"), waits: true,
		},
		"another pod has the name of the one that is gone": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB()},
			pods: []*v1.Pod{lowA, func() *v1.Pod {
				p := running("low-b", "node-b", 1)
				p.UID = "another"
				return p
			}()},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-b"), waits: true,
		},
		"the claim is in use": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB()}, pods: []*v1.Pod{lowA, running("low-b", "node-b", 1, "on-b")},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-b"),
		},
		"one of two users of the claim is gone": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB(reservedFor("low-c"))}, pods: []*v1.Pod{lowA, running("low-c", "node-b", 1, "on-b")},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-b"),
		},
		"what leaves is not enough": {
			claims: []*resourceapi.ResourceClaim{claim("wanted", counted(3)), onA, onB()}, pods: []*v1.Pod{lowA},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-b"),
		},
		"the pod is nominated to another node": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB()}, pods: []*v1.Pod{lowA},
			pod: nominatedTo(pending("p", 5, "wanted"), "node-a"),
		},
		"the pod is not nominated": {
			claims: []*resourceapi.ResourceClaim{claim("wanted"), onA, onB()}, pods: []*v1.Pod{lowA},
			pod: pending("p", 5, "wanted"),
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims, w.pods = tc.claims, append(tc.pods, tc.pod)
			h := newHarness(t, w)
			a := h.filterAll(tc.pod)
			status := a.postFilter()
			wantCode := fwk.Unschedulable // on to preemption
			if tc.waits {
				wantCode = fwk.UnschedulableAndUnresolvable
				if want := "node node-b: claim team-a/on-b released, waiting for its deallocation"; status.Message() != want {
					t.Errorf("message %q, want %q", status.Message(), want)
				}
				fit := &framework.FitError{NumAllNodes: 2, Diagnosis: framework.Diagnosis{NodeToStatus: a.statuses, PostFilterMsg: status.Message()}}
				if event, _ := told(fwk.NewStatus(fwk.Unschedulable).WithError(fit)); event != "Normal WaitingForDeallocation "+status.Message() {
					t.Errorf("event %q, want one that is no warning", event)
				}
				result, _ := h.plugin.PostFilter(h.ctx, a.state, a.pod, nil)
				if result == nil || result.NominatingInfo == nil || result.NominatingMode != fwk.ModeOverride || result.NominatedNodeName != "node-b" {
					t.Errorf("nominated by %+v, want node-b again", result)
				}
				if code := h.plugin.Filter(h.ctx, a.state, a.pod, h.nodeOf("node-b")).Code(); code != fwk.Unschedulable {
					t.Errorf("Filter of the nominated node: %v, want Unschedulable, or the pod preempts again", code)
				}
			}
			if status.Code() != wantCode {
				t.Errorf("PostFilter: %v, want code %v", status, wantCode)
			}
			h.activator.taken()
			if tc.waits {
				h.api.change("on-b", func(c *resourceapi.ResourceClaim) { c.Labels = map[string]string{"any": "change"} })
				h.wakes("p")
			}
		})
	}
}

// The scheduler knows of the nomination before the pod shows it.
func TestNominationThatThePodDoesNotShow(t *testing.T) {
	w := twoNodes()
	p := pending("p", 5, "wanted")
	w.claims = []*resourceapi.ResourceClaim{claim("wanted"), claim("a", allocated("node-a", "gpu-0")), claim("b", allocated("node-b", "gpu-0", "gpu-1"), reservedFor("gone"))}
	w.pods = []*v1.Pod{p}
	h := newHarness(t, w)
	h.nominator.nominate("node-b", p)
	if status := h.filterAll(p).postFilter(); status.Code() != fwk.UnschedulableAndUnresolvable {
		t.Errorf("PostFilter: %v, want the pod to wait", status)
	}
}

// A claim that changes between the look at it and the note is not waited for.
func TestAClaimThatHasLeftMeanwhileWakesThePodAtOnce(t *testing.T) {
	w := twoNodes()
	p := pending("p", 5, "wanted")
	p.Status.NominatedNodeName = "node-b"
	w.claims = []*resourceapi.ResourceClaim{claim("wanted"), claim("a", allocated("node-a", "gpu-0")), claim("b", allocated("node-b", "gpu-0", "gpu-1"), reservedFor("gone"))}
	w.pods = []*v1.Pod{p}
	h := newHarness(t, w)
	a := h.filterAll(p)
	h.api.change("b", func(c *resourceapi.ResourceClaim) { c.Labels = map[string]string{"any": "change"} })
	h.eventually("the change is known", func() bool {
		c, err := h.plugin.shared.account.Tracker.Get(testNamespace, "b")
		return err == nil && len(c.Labels) > 0
	})
	h.activator.taken()
	a.postFilter()
	if diff := cmp.Diff([]string{"p"}, h.activator.taken()); diff != "" {
		t.Errorf("activated pods (-want +got):\n%s", diff)
	}
}

// A claim that has left between the attempt's view and the look at it is none to evict others for. Its event has passed, so
// the pod is woken at once.
func TestAClaimThatHasLeftSinceTheViewWakesThePodAtOnce(t *testing.T) {
	w := twoNodes()
	p := pending("p", 5, "wanted")
	p.Status.NominatedNodeName = "node-b"
	w.claims = []*resourceapi.ResourceClaim{
		claim("wanted"), claim("a", allocated("node-a", "gpu-0"), reservedFor("low-a")), claim("b", allocated("node-b", "gpu-0", "gpu-1"), reservedFor("gone")),
	}
	w.pods = []*v1.Pod{p, running("low-a", "node-a", 1, "a")}
	h := newHarness(t, w)
	a := &attempt{h: h, pod: p, state: framework.NewCycleState()}
	if _, status := h.plugin.PreFilter(h.ctx, a.state, p, h.nodes); !status.IsSuccess() {
		t.Fatal(status)
	}
	h.api.change("b", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
	h.eventually("the release is known", func() bool {
		c, err := h.plugin.shared.account.Tracker.Get(testNamespace, "b")
		return err == nil && c.Status.Allocation == nil
	})
	for _, node := range h.nodes {
		if status := h.plugin.Filter(h.ctx, a.state, p, node); status.Code() != fwk.Unschedulable {
			t.Errorf("Filter of %s: %v, want Unschedulable", node.Node().Name, status)
		}
	}
	h.activator.taken()
	if status := a.postFilter(); status.Code() != fwk.UnschedulableAndUnresolvable {
		t.Errorf("PostFilter: %v, want nobody to be evicted", status)
	}
	if diff := cmp.Diff([]string{"p"}, h.activator.taken()); diff != "" {
		t.Errorf("activated pods (-want +got):\n%s", diff)
	}
}

// A pod whose binding was cancelled holds its devices a moment longer. Nothing but its context tells.
func TestCancelledBindingsAreLeaving(t *testing.T) {
	tests := map[string]struct {
		cancel  error
		begun   bool
		leaving bool
	}{
		"PreBind is under way":               {begun: true},
		"PreBind was cancelled":              {begun: true, cancel: errors.New("preempted"), leaving: true},
		"the binding has ended by itself":    {begun: true, cancel: context.Canceled},
		"PreBind has passed":                 {begun: true, cancel: errors.New("RunPreBindPlugins has completed")},
		"the pod does not wait for a Permit": {leaving: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{claim("wanted"), claim("flying", counted(2)), claim("a", allocated("node-a", "gpu-0"))}
			low, p := pending("low", 1, "flying"), pending("p", 5, "wanted")
			p.Status.NominatedNodeName = "node-b"
			w.pods = []*v1.Pod{low, p}
			h := newHarness(t, w)
			h.filterAll(low).reserve("node-b")
			ctx, cancel := context.WithCancelCause(h.ctx)
			defer cancel(nil)
			if tc.begun {
				h.plugin.shared.memory.Attempts.PreBind(ctx, low.UID)
			}
			if tc.cancel != nil {
				cancel(tc.cancel)
			}
			status := h.filterAll(p).postFilter()
			if waits := strings.Contains(status.Message(), "released, waiting for its deallocation"); waits != tc.leaving {
				t.Errorf("waits %t, want %t: %v", waits, tc.leaving, status)
			}
		})
	}
}

// Between Permit and PreBind one cannot know whether a pod has been preempted, so others wait for its devices. When it begins to write, they look
// again: its claim may have another UID then, which nobody waits for.
func TestAPodThatWaitsForABindingIsWokenWhenThatWrites(t *testing.T) {
	for name, claims := range map[string][]*resourceapi.ResourceClaim{
		"a claim":                               {claim("flying", counted(2))},
		"a claim made for an extended resource": nil,
	} {
		t.Run(name, func(t *testing.T) {
			binding, p := containersPod("a=2"), pending("p", 5, "wanted")
			if claims != nil {
				binding = pending("flies", 9, "flying")
			}
			binding.Name, binding.UID, binding.Spec.Priority = "flies", "flies-uid", ptr.To[int32](9)
			p.Status.NominatedNodeName = "node-b"
			w := extendedWorld(binding, p)
			w.claims = append(claims, claim("wanted"), claim("a", allocated("node-a", "gpu-0")))
			h := newHarness(t, w)
			a := h.filterAll(binding).reserve("node-b")
			if status := h.filterAll(p).postFilter(); !strings.Contains(status.Message(), contention.WaitingForDeallocation) {
				t.Fatalf("the pod does not wait: %v", status)
			}
			h.activator.taken()
			if status := h.plugin.PreBind(h.ctx, a.state, binding, "node-b"); !status.IsSuccess() {
				t.Fatal(status)
			}
			h.wakes("p")
			if status := h.filterAll(p).postFilter(); strings.Contains(status.Message(), contention.WaitingForDeallocation) {
				t.Errorf("the pod waits for one that is being bound: %v", status)
			}
		})
	}
}

// Of the pods that are bound, or gave up, nothing is kept.
func TestAttemptsEnd(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("first"), claim("second")}
	bound, failed := pending("bound", 1, "first"), pending("failed", 1, "second")
	w.pods = []*v1.Pod{bound, failed}
	h := newHarness(t, w)
	a := h.filterAll(bound)
	a.bind("node-b")
	h.plugin.PostBind(h.ctx, a.state, bound, "node-b")
	b := h.filterAll(failed).reserve("node-b")
	if h.plugin.shared.memory.Attempts.Of(failed.UID) == nil {
		t.Error("the attempt of a pod with devices in flight is not known")
	}
	b.unreserve("node-b")
	for _, p := range w.pods {
		if h.plugin.shared.memory.Attempts.Of(p.UID) != nil {
			t.Errorf("the attempt of pod %s is left", p.Name)
		}
	}
}

// What was kept for a nominated pod is for others when that pod goes. The framework reports it as a pod without node.
func TestNominatedPodGoes(t *testing.T) {
	nominated := pending("nominated", 5, "other")
	nominated.Status.NominatedNodeName = "node-b"
	bound := running("bound", "node-b", 5, "other")
	bound.Status.NominatedNodeName = "node-b"
	cpuOnly := pending("cpu-only", 5)
	cpuOnly.Status.NominatedNodeName = "node-b"
	for name, tc := range map[string]struct {
		gone *v1.Pod
		want fwk.QueueingHint
	}{
		"a nominated pod goes":                      {nominated, fwk.Queue},
		"a nominated pod without devices goes":      {cpuOnly, fwk.QueueSkip},
		"a pod goes that was never nominated":       {pending("pending", 5, "other"), fwk.QueueSkip},
		"a pod that ran goes, its claim tells more": {bound, fwk.QueueSkip},
	} {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, twoNodes())
			hint, err := h.plugin.hints.AfterPodDeletion(klog.Background(), pending("p", 1, "wanted"), tc.gone, nil)
			if err != nil || hint != tc.want {
				t.Errorf("hint %v, error %v, want %v", hint, err, tc.want)
			}
		})
	}
}
