// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/plugins/config"
)

// fenced has claims "mine" and "other", pods that use the first one, and a fence.
func fenced() world {
	w := twoNodes()
	w.fence = &config.FenceArgs{Timeout: &metav1.Duration{Duration: patience}, Jitter: &metav1.Duration{}}
	w.claims = []*resourceapi.ResourceClaim{claim("mine"), claim("other")}
	w.pods = []*v1.Pod{pod("p", "mine"), pod("q", "mine")}
	return w
}

// state is what is left of a claim: its devices and its users.
type state struct{ Devices, Users []string }

func (h *harness) wantState(name string, want state) {
	h.t.Helper()
	c := h.api.get(name)
	got := state{devicesOf(c), usersOf(c)}
	if len(got.Users) == 0 {
		got.Users = nil
	}
	if diff := cmp.Diff(want, got); diff != "" {
		h.t.Errorf("claim %s differs (-want +got):\n%s", name, diff)
	}
}

// othersTake allocates the claim "other" as another scheduler would.
func (h *harness) othersTake(devices ...string) {
	h.api.change("other", allocated("node-a", devices...))
	h.api.change("other", reservedFor("somebody"))
}

// preBindAsync runs PreBind where it waits for the test.
func (a *attempt) preBindAsync() <-chan *fwk.Status {
	done := make(chan *fwk.Status, 1)
	go func() { done <- a.preBind("node-a") }()
	return done
}

func TestFenceLetsTheFirstOnePass(t *testing.T) {
	tests := map[string]func(h *harness){
		"nobody else is there":            func(*harness) {},
		"another scheduler comes later":   func(h *harness) { h.othersTake("gpu-0") },
		"another scheduler has come, too": func(h *harness) { h.othersTake("gpu-1") },
		"somebody touches the claim": func(h *harness) {
			h.api.change("mine", func(c *resourceapi.ResourceClaim) { c.Labels = map[string]string{"a": "b"} })
		},
	}
	for name, then := range tests {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, fenced())
			a := h.filterAll(pod("p", "mine")).reserve("node-a")
			h.api.hold()
			done := a.preBindAsync()
			h.eventually("the claim is written", func() bool { return h.api.get("mine").Status.Allocation != nil })
			then(h)
			select {
			case status := <-done:
				t.Fatalf("PreBind ended before the watch brought the claim: %v", status)
			default:
			}
			h.api.release()
			if status := <-done; !status.IsSuccess() {
				t.Errorf("PreBind: %v", status)
			}
			h.wantState("mine", state{[]string{"gpu-0"}, []string{"p"}})
		})
	}
}

// Another scheduler was first, and our watch did not bring it in time.
func TestFenceTakesBackWhatCameSecond(t *testing.T) {
	h := newHarness(t, fenced())
	h.api.hold()
	h.othersTake("gpu-0")
	a := h.filterAll(pod("p", "mine")).reserve("node-a")
	done := a.preBindAsync()
	h.eventually("the claim is written", func() bool { return h.api.get("mine").Status.Allocation != nil })
	h.api.release()
	status := <-done
	want := "claim team-a/other (UID other-uid) was allocated earlier: device gpu.example.com/node-a/gpu-0"
	if !isQuiet(status) || !strings.Contains(status.Message(), want) {
		t.Errorf("PreBind: %v, want one with %q", status, want)
	}
	h.wantState("mine", state{})
	h.wantState("other", state{[]string{"gpu-0"}, []string{"somebody"}})
	h.api.written()
	a.unreserve("node-a")
	h.wantState("mine", state{})
	if again := h.api.written(); len(again) > 0 {
		t.Errorf("Unreserve writes what PreBind has withdrawn: %v", again)
	}

	// The next attempt does not want the device any more.
	if diff := cmp.Diff([]string{"node-b"}, h.filterAll(pod("p", "mine")).fits()); diff != "" {
		t.Errorf("nodes of the next attempt differ (-want +got):\n%s", diff)
	}
}

// All claims of the pod are given back, not only the one that came second.
func TestFenceTakesBackAllClaims(t *testing.T) {
	w := fenced()
	w.objects[1] = slice("node-a", device("gpu-0"), device("gpu-1"))
	w.claims = append(w.claims, claim("more"))
	w.pods = []*v1.Pod{pod("p", "mine", "more")}
	h := newHarness(t, w)
	h.api.hold()
	h.othersTake("gpu-1")
	a := h.filterAll(w.pods[0]).reserve("node-a")
	done := a.preBindAsync()
	h.eventually("the claims are written", func() bool { return h.api.get("more").Status.Allocation != nil })
	h.api.release()
	if status := <-done; status.IsSuccess() {
		t.Errorf("PreBind: %v", status)
	}
	h.wantState("mine", state{[]string{"gpu-0"}, []string{"p"}}) // it need not give way, and the framework calls Unreserve
	a.unreserve("node-a")
	h.wantState("mine", state{})
	h.wantState("more", state{})
}

// Whoever came second makes a pause after its devices are free, in Unreserve, and nobody else does. One that is preempted makes way at once.
func TestWhoLostPausesWithEmptyHands(t *testing.T) {
	for name, tc := range map[string]struct {
		alone, preempted bool
		pauses           bool
	}{
		"another scheduler was first":                         {pauses: true},
		"another scheduler was first, and it is preempted":    {preempted: true},
		"nobody was, and another plugin keeps it from a node": {alone: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := fenced()
			w.objects[1] = slice("node-a", device("gpu-0"), device("gpu-1"))
			w.fence.Jitter.Duration = 1000 * time.Hour // of which a random part is waited
			w.claims = append(w.claims, claim("more"))
			w.pods = []*v1.Pod{pod("p", "mine", "more")}
			h := newHarness(t, w)
			if !tc.alone {
				h.api.hold()
				h.othersTake("gpu-1")
			}
			a := h.filterAll(w.pods[0]).reserve("node-a")
			ctx, preempt := context.WithCancelCause(h.ctx)
			done := make(chan *fwk.Status, 1)
			go func() { done <- h.plugin.PreBind(ctx, a.state, a.pod, "node-a") }()
			h.eventually("the claims are written", func() bool { return h.api.get("more").Status.Allocation != nil })
			if tc.preempted {
				preempt(errors.New("preempted"))
			}
			h.api.release()
			if status := <-done; status.IsSuccess() != tc.alone {
				t.Errorf("PreBind: %v", status)
			}
			preempt(errors.New("RunPreBindPlugins has completed")) // as the framework does
			ctx, end := context.WithCancel(h.ctx)
			unreserved := make(chan struct{})
			go func() {
				defer close(unreserved)
				h.plugin.Unreserve(ctx, a.state, a.pod, "node-a")
			}()
			if tc.pauses {
				h.eventually("the devices are free", func() bool {
					return h.api.get("mine").Status.Allocation == nil && h.api.get("more").Status.Allocation == nil && h.plugin.shared.memory.Attempts.Of(a.pod.UID) == nil
				})
				select {
				case <-unreserved:
					t.Error("it makes no pause")
				default:
				}
				end()
			}
			select {
			case <-unreserved:
			case <-time.After(patience):
				t.Error("Unreserve does not end")
			}
			end()
			h.wantState("mine", state{})
			h.wantState("more", state{})
		})
	}
}

// A claim that two pods share loses. The first to notice leaves it, the last one takes the allocation back, although
// it was not the one that wrote it.
func TestFenceClaimSharedByTwoPodsWhoseAllocatorLoses(t *testing.T) {
	w := fenced()
	h := newHarness(t, w)
	h.api.hold()
	h.othersTake("gpu-0")
	allocator := h.filterAll(w.pods[0]).reserve("node-a")
	first := allocator.preBindAsync()
	h.eventually("the first pod has written the claim", func() bool { return len(usersOf(h.api.get("mine"))) == 1 })
	h.eventually("that is known", func() bool {
		c, err := h.plugin.shared.account.Tracker.Get(testNamespace, "mine")
		return err == nil && c.Status.Allocation != nil
	})
	sharer := h.filterAll(w.pods[1]).reserve("node-a")
	second := sharer.preBindAsync()
	h.eventually("the second pod has reserved the claim", func() bool { return len(usersOf(h.api.get("mine"))) == 2 })
	h.api.release()
	for a, done := range map[*attempt]<-chan *fwk.Status{allocator: first, sharer: second} {
		if status := <-done; status.IsSuccess() || !strings.Contains(status.Message(), "was allocated earlier") {
			t.Errorf("PreBind: %v", status)
		}
		a.unreserve("node-a")
	}
	h.wantState("mine", state{})
}

// Found after a restart: a claim that was allocated and reserved for a pod that was never bound.
func TestFenceRestartBetweenWriteAndBind(t *testing.T) {
	tests := map[string]struct {
		mine, other func(*resourceapi.ResourceClaim)
		podOnNode   string
		want        string
		wantState   state
	}{
		"nobody else has the device": {
			mine: allocated("node-a", "gpu-0"), other: allocated("node-b", "gpu-1"),
			wantState: state{[]string{"gpu-0"}, []string{"p"}},
		},
		"somebody else has it, too": {
			mine: allocated("node-a", "gpu-0"), other: allocated("node-a", "gpu-0"),
			want: "claim team-a/other (UID other-uid) may have been allocated earlier",
		},
		"somebody else has it, too, and another pod uses the claim": {
			mine: func(c *resourceapi.ResourceClaim) {
				allocated("node-a", "gpu-0")(c)
				reservedFor("user")(c)
			},
			other: allocated("node-a", "gpu-0"),
			want:  "may have been allocated earlier", wantState: state{[]string{"gpu-0"}, []string{"user"}},
		},
		"somebody else has it, too, but the pod has been bound by the scheduler before us": {
			mine: allocated("node-a", "gpu-0"), other: allocated("node-a", "gpu-0"), podOnNode: "node-a",
			want: "may have been allocated earlier", wantState: state{[]string{"gpu-0"}, []string{"p"}},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := fenced()
			w.claims = []*resourceapi.ResourceClaim{claim("mine", tc.mine, reservedFor("p")), claim("other", tc.other, reservedFor("somebody"))}
			w.pods = []*v1.Pod{pod("p", "mine")}
			w.pods[0].Spec.NodeName = tc.podOnNode
			h := newHarness(t, w)
			a := h.filterAll(pod("p", "mine")).reserve("node-a")
			status := a.preBind("node-a")
			if status.IsSuccess() != (tc.want == "") || !strings.Contains(status.Message(), tc.want) {
				t.Errorf("PreBind: %v, want %q", status, tc.want)
			}
			if !status.IsSuccess() {
				a.unreserve("node-a")
			}
			h.wantState("mine", tc.wantState)
		})
	}
}

// A claim that somebody else has allocated, and a pod of ours uses.
func TestFenceClaimAllocatedByAnotherScheduler(t *testing.T) {
	h := newHarness(t, fenced())
	h.othersTake("gpu-0")
	h.api.change("mine", allocated("node-a", "gpu-0"))
	h.caughtUp("mine")
	a := h.filterAll(pod("p", "mine")).reserve("node-a")
	status := a.preBind("node-a")
	if want := "claim team-a/other (UID other-uid) was allocated earlier"; !strings.Contains(status.Message(), want) {
		t.Errorf("PreBind: %v, want %q", status, want)
	}
	a.unreserve("node-a")
	h.wantState("mine", state{})
}

// The watch is silent: nobody knows who was first.
func TestFenceTimesOut(t *testing.T) {
	w := fenced()
	w.fence.Timeout.Duration = time.Second
	h := newHarness(t, w)
	h.api.hold()
	a := h.filterAll(pod("p", "mine")).reserve("node-a")
	status := a.preBind("node-a")
	if !isQuiet(status) || !strings.Contains(status.Message(), "timed out after 1s") {
		t.Errorf("PreBind: %v", status)
	}
	a.unreserve("node-a")
	h.wantState("mine", state{})
	const want = "Warning FenceTimeout devices taken back, the pod will be tried again: not bound to node node-a, because it cannot be told whether " +
		"other schedulers use its devices: "
	if event, _ := told(status); !strings.HasPrefix(event, want) {
		t.Errorf("event %q, want one that begins with %q", event, want)
	}
	if len(h.recorder.Events) > 0 {
		t.Errorf("another event: %q", <-h.recorder.Events)
	}
}

// What happens to the claim while the pod waits is not passed over. It is heard of at once with the pod's own write: were that
// known first, the pod might go on before.
func TestFenceClaimChangesMeanwhile(t *testing.T) {
	tests := map[string]struct {
		then func(h *harness)
		want string
	}{
		"deleted": {func(h *harness) { h.api.delete("mine") }, "claim does not exist any more"},
		"deallocated": {func(h *harness) {
			h.api.change("mine", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
		}, "lost its allocation"},
		"allocated anew": {
			func(h *harness) {
				h.api.change("mine", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
				h.api.change("mine", allocated("node-b", "gpu-1"))
			}, "lost its allocation, or has another one",
		},
		"no longer reserved": {
			func(h *harness) {
				h.api.change("mine", func(c *resourceapi.ResourceClaim) { c.Status.ReservedFor = nil })
			}, "the reservation was lost",
		},
		"deleted and created again": {
			func(h *harness) {
				h.api.delete("mine")
				h.api.create(claim("mine", func(c *resourceapi.ResourceClaim) { c.UID = "again" }))
			}, "claim does not exist any more",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			h := newHarness(t, fenced())
			a := h.filterAll(pod("p", "mine")).reserve("node-a")
			h.api.hold()
			done := a.preBindAsync()
			h.eventually("the claim is written", func() bool { return h.api.get("mine").Status.Allocation != nil })
			tc.then(h)
			h.api.releaseAsList()
			if status := <-done; !isQuiet(status) || !strings.Contains(status.Message(), tc.want) {
				t.Errorf("PreBind: %v, want one with %q", status, tc.want)
			}
		})
	}
}

// Withdrawing has a precondition: what changed is looked at again.
func TestFenceWithdrawsFromTheClaimAsItIs(t *testing.T) {
	h := newHarness(t, fenced())
	h.api.hold()
	h.othersTake("gpu-0")
	a := h.filterAll(pod("p", "mine")).reserve("node-a")
	done := a.preBindAsync()
	h.eventually("the claim is written", func() bool { return h.api.get("mine").Status.Allocation != nil })
	conflicts := 0
	h.api.onRequest(func(request string) error {
		if request == "update/status" && conflicts < 2 {
			conflicts++
			return apierrors.NewConflict(resourceapi.Resource("resourceclaims"), "mine", fmt.Errorf("changed"))
		}
		return nil
	})
	h.api.release()
	if status := <-done; status.IsSuccess() {
		t.Errorf("PreBind: %v", status)
	}
	if conflicts != 2 {
		t.Errorf("%d conflicts", conflicts)
	}
	a.unreserve("node-a")
	h.wantState("mine", state{})
}

func TestFenceCanBeDisabled(t *testing.T) {
	w := fenced()
	w.fence = nil
	h := newHarness(t, w)
	h.api.hold()
	h.othersTake("gpu-0")
	if status := h.filterAll(pod("p", "mine")).reserve("node-a").preBind("node-a"); !status.IsSuccess() {
		t.Errorf("PreBind: %v", status)
	}
	h.wantState("mine", state{[]string{"gpu-0"}, []string{"p"}})
}

// Nothing but an answer tells whether a claim that must give way still stands in others' way, so no single failure leaves it there.
func TestFenceWithdrawalOutlivesFailures(t *testing.T) {
	tests := map[string]struct {
		request string
		// after says that the request takes effect, and only its answer is lost.
		after bool
		want  state
	}{
		"the pod cannot be read":      {request: "get pods"},
		"the claim cannot be read":    {request: "get/"},
		"the claim cannot be written": {request: "update/status"},
		"the answer is lost":          {request: "update/status", after: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := fenced()
			w.pods = []*v1.Pod{pod("p", "mine")}
			h := newHarness(t, w)
			h.plugin.binder.UndoPauses = wait.Backoff{Duration: time.Microsecond, Steps: 1}
			// Found allocated, so that only the withdrawal takes it back.
			h.othersTake("gpu-0")
			h.api.change("mine", allocated("node-a", "gpu-0"))
			h.caughtUp("mine")
			a := h.filterAll(pod("p", "mine")).reserve("node-a")
			h.api.hold()
			done := a.preBindAsync()
			h.eventually("the claim is reserved", func() bool { return len(h.api.get("mine").Status.ReservedFor) == 1 })
			failures := 0
			fail := func(request string) error {
				if request == tc.request && failures < 3 {
					failures++
					return errServer
				}
				return nil
			}
			if tc.after {
				h.api.afterWrite(fail)
			} else {
				h.api.onRequest(fail)
			}
			h.api.release()
			if status := <-done; !strings.Contains(status.Message(), "was allocated earlier") {
				t.Errorf("PreBind: %v", status)
			}
			if failures == 0 {
				t.Error("nothing has failed")
			}
			a.unreserve("node-a")
			h.wantState("mine", tc.want)
		})
	}
}

// A device is held that the pool's slices do not have any more. So what was allocated elsewhere, or before a restart, gives way once; but
// not what a bound pod uses, because it would do so for ever.
func TestFenceBesideADeviceThatHasGoneFromItsSlices(t *testing.T) {
	unknown := "claim team-a/old (UID old-uid) may have been allocated earlier"
	bound, unbound := pod("user", "shared"), pod("user", "shared")
	bound.Spec.NodeName = "node-a"
	member := func(node string, claims ...string) *v1.Pod {
		p := pod("member", claims...)
		p.Spec.NodeName, p.Spec.SchedulingGroup = node, &v1.PodSchedulingGroup{PodGroupName: ptr.To("group")}
		return p
	}
	forGroup := func(c *resourceapi.ResourceClaim) {
		c.Status.ReservedFor = []resourceapi.ResourceClaimConsumerReference{{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "group", UID: "group-uid"}}
	}
	tests := map[string]struct {
		user     *v1.Pod
		reserved func(*resourceapi.ResourceClaim)
		uses     []string
		want     string
	}{
		"a bound pod uses the claim":                           {user: bound, reserved: reservedFor("user"), uses: []string{"shared"}},
		"a pod without a node uses it":                         {user: unbound, reserved: reservedFor("user"), uses: []string{"shared"}, want: unknown},
		"another pod of that name is bound":                    {user: bound, reserved: reservedBy("user", "earlier-uid"), uses: []string{"shared"}, want: unknown},
		"a group uses it, of which a pod is bound":             {user: member("node-a", "shared"), reserved: forGroup, uses: []string{"shared"}},
		"a group uses it, of which no pod is bound":            {user: member("", "shared"), reserved: forGroup, uses: []string{"shared"}, want: unknown},
		"a group uses it, and the bound pod does not":          {user: member("node-a", "other"), reserved: forGroup, uses: []string{"shared"}, want: unknown},
		"nobody uses it":                                       {user: unbound, reserved: reservedFor(), uses: []string{"shared"}, want: unknown},
		"nobody uses it, and another claim is decided here":    {user: unbound, reserved: reservedFor(), uses: []string{"mine", "shared"}, want: unknown},
		"a bound pod uses it, and another one is decided here": {user: bound, reserved: reservedFor("user"), uses: []string{"mine", "shared"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := fenced()
			w.objects[1] = slice("node-a", device("gpu-0"), device("gpu-1"))
			w.claims = append(w.claims, claim("old", allocated("node-a", "gone"), reservedFor("somebody")), claim("shared", allocated("node-a", "gpu-0"), tc.reserved))
			q := pod("q", tc.uses...)
			w.pods = []*v1.Pod{tc.user, q}
			h := newHarness(t, w)
			status := h.filterAll(q).reserve("node-a").preBind("node-a")
			if tc.want == "" && !status.IsSuccess() || tc.want != "" && !strings.Contains(status.Message(), tc.want) {
				t.Errorf("PreBind: %v, want %q", status, tc.want)
			}
		})
	}
}

func reservedBy(name string, uid types.UID) func(*resourceapi.ResourceClaim) {
	return func(c *resourceapi.ResourceClaim) {
		reservedFor(name)(c)
		c.Status.ReservedFor[0].UID = uid
	}
}
