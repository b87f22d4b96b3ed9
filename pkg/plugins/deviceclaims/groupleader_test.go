// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	clienttesting "k8s.io/client-go/testing"
	testingclock "k8s.io/utils/clock/testing"

	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
)

// A leader allocated the group's claim for one member, which leaves no note, and ended or was frozen behind the fence. The next one must give
// the claim up: another member came second, or the group does not fit with it. If the first leader's binding takes effect before the question who
// is bound, the claim stays. It is lost only between that question and the write, as long as the API server takes to answer one request.
func TestABindingOfTheLeaderBeforeKeepsTheGroupsClaim(t *testing.T) {
	withGroups(t)
	atFence := func(h *harness) {
		a := h.filterAll(member(pod("q", "mine"))).reserve("node-a")
		if status := a.preBind("node-a"); status.IsSuccess() {
			h.t.Error("the pod passed the fence")
		}
		a.unreserve("node-a")
	}
	inTheWay := func(h *harness) {
		g := h.tryGroup(member(pod("p", "mine")), member(pod("q", "mine", "own")))
		g.postFilter(g.fitsAll)
	}
	for name, tc := range map[string]struct {
		gives   func(*harness)
		request string // of the next leader, before which the pod is bound
		lost    bool
	}{
		"at the fence, before the pod is read":     {gives: atFence, request: "get pods"},
		"at the fence, before the claim is read":   {gives: atFence, request: "get/"},
		"at the fence, before the question":        {gives: atFence, request: "list pods"},
		"at the fence, after the question":         {gives: atFence, request: "update/status", lost: true},
		"in the way, before the question":          {gives: inTheWay, request: "list pods"},
		"in the way, after the question":           {gives: inTheWay, request: "update/status", lost: true},
		"at the fence, and the pod is never bound": {gives: atFence, lost: true},
		"in the way, and the pod is never bound":   {gives: inTheWay, lost: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := fenced()
			w.claims = append(w.claims, claim("own", withSelector(`device.attributes["gpu.example.com"].model == "H100"`)))
			w.groups = []*schedulingapi.PodGroup{group("mine")}
			w.pods = []*v1.Pod{member(pod("p", "mine")), member(pod("q", "mine"))}
			before := newHarness(t, w)
			before.tryGroup(w.pods...).forGood(0).bind("node-a")
			if len(before.api.get("mine").Annotations) > 0 {
				t.Fatal("the first write leaves a note: adapt docs/design/groups.md")
			}
			before.othersTake("gpu-0") // of a list it cannot be told which was first

			next := startHarness(t, w, before.client, before.api)
			bound := false
			binds := func(request string) error {
				if request == tc.request && !bound {
					bound = true
					next.binds(w.pods[0])
				}
				return nil
			}
			next.client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
				return false, nil, binds("list pods")
			})
			next.api.onRequest(binds)
			tc.gives(next)
			if bound != (tc.request != "") {
				t.Fatalf("bound: %t", bound)
			}
			want := state{Devices: []string{"gpu-0"}, Users: []string{"g"}}
			if tc.lost {
				want = state{}
			}
			next.wantState("mine", want)
		})
	}
}

// What another process has noted of the group's claim holds for PodGroupPostFilter, too, until a binding may not be under way any more.
func TestAGroupsClaimThatAnotherSchedulerUsesIsNotGivenUp(t *testing.T) {
	withGroups(t)
	w := fenced()
	w.fence = nil
	w.claims = append(w.claims, claim("own", withSelector(`device.attributes["gpu.example.com"].model == "H100"`)))
	w.groups = []*schedulingapi.PodGroup{group("mine")}
	w.pods = []*v1.Pod{member(pod("p", "mine")), member(pod("q", "mine"))}
	before := newHarness(t, w)
	g := before.tryGroup(w.pods...)
	g.forGood(0).bind("node-a")
	g.forGood(1).bind("node-a")
	used := state{Devices: []string{"gpu-0"}, Users: []string{"g"}}
	before.wantState("mine", used)

	next := startHarness(t, w, before.client, before.api)
	clock := testingclock.NewFakeClock(binding.AdoptionOf(next.api.get("mine"), "g-uid").At)
	next.plugin.binder.Clock = clock
	inTheWay := func() {
		g := next.tryGroup(member(pod("p", "mine")), member(pod("q", "mine", "own")))
		g.postFilter(g.fitsAll)
	}
	clock.Step(config.DefaultBindingTimeout)
	inTheWay()
	next.wantState("mine", used)
	clock.Step(binding.AdoptionRenewal)
	inTheWay()
	next.wantState("mine", state{})
}

// The last member gives way, and between the question who uses the claim and the write another one comes, by the same process: each use moves the
// claim's version, also one at the very moment of the use before.
func TestAMemberThatComesDuringTheWithdrawalKeepsItsGroupsClaim(t *testing.T) {
	withGroups(t)
	for name, passes := range map[string]time.Duration{"at the same moment": 0, "later": time.Second} {
		t.Run(name, func(t *testing.T) {
			w := fenced()
			w.claims = []*resourceapi.ResourceClaim{ // of a list it cannot be told which was first
				claim("mine", allocated("node-a", "gpu-0"), forGroup), claim("other", allocated("node-a", "gpu-0"), reservedFor("somebody")),
			}
			w.groups = []*schedulingapi.PodGroup{group("mine")}
			w.pods = []*v1.Pod{member(pod("p", "mine")), member(pod("q", "mine"))}
			w.assumed = []*v1.Pod{member(running("p", "node-a", 0, "mine"))}
			h := newHarness(t, w)
			clock := testingclock.NewFakeClock(time.Now())
			h.plugin.binder.Clock = clock
			h.plugin.binder.Client = &afterList{Interface: h.client, then: sync.OnceFunc(func() {
				h.api.change("other", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
				h.caughtUp("other")
				clock.Step(passes)
				h.filterAll(w.pods[1]).bind("node-a")
				h.binds(w.pods[1])
			})}
			a := h.filterAll(w.pods[0]).reserve("node-a")
			if status := a.preBind("node-a"); status.IsSuccess() {
				t.Fatal("the pod passed the fence")
			}
			a.unreserve("node-a")
			h.wantState("mine", state{Devices: []string{"gpu-0"}, Users: []string{"g"}})
		})
	}
}

// afterList is a client with which something happens when pods have been listed.
type afterList struct {
	kubernetes.Interface
	typedcorev1.CoreV1Interface
	typedcorev1.PodInterface
	then func()
}

func (a *afterList) CoreV1() typedcorev1.CoreV1Interface { return a }
func (a *afterList) Pods(namespace string) typedcorev1.PodInterface {
	a.PodInterface = a.Interface.CoreV1().Pods(namespace)
	return a
}

func (a *afterList) Get(ctx context.Context, name string, options metav1.GetOptions) (*v1.Pod, error) {
	return a.PodInterface.Get(ctx, name, options)
}

func (a *afterList) List(ctx context.Context, options metav1.ListOptions) (*v1.PodList, error) {
	list, err := a.PodInterface.List(ctx, options)
	a.then()
	return list, err
}
