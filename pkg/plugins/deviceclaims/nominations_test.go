// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
)

// fails runs the failure handler for a pod, with the nomination that its attempt led to.
func (h *harness) fails(p *v1.Pod, nominating *fwk.NominatingInfo) {
	info := &framework.QueuedPodInfo{PodInfo: &framework.PodInfo{Pod: p}}
	next := func(context.Context, framework.Framework, *framework.QueuedPodInfo, *fwk.Status, *fwk.NominatingInfo, time.Time) {
		if nominating != nil && nominating.NominatedNodeName == "" {
			h.nominator.withdraw(p)
		}
	}
	profile, ok := h.plugin.handle.(framework.Framework)
	if !ok {
		h.t.Fatal("the handle is no framework")
	}
	h.plugin.shared.EndNominations(next)(h.ctx, profile, info, fwk.NewStatus(fwk.Unschedulable), nominating, time.Time{})
}

// sleeps tries a pod as the framework does, with what others are nominated to. It must be refused.
func (h *harness) sleeps(p *v1.Pod) {
	h.t.Helper()
	h.settles()
	a := &attempt{h: h, pod: p, state: framework.NewCycleState(), statuses: framework.NewDefaultNodeToStatus()}
	if _, status := h.plugin.PreFilter(h.ctx, a.state, p, h.nodes); !status.IsSuccess() {
		h.t.Fatal(status)
	}
	for _, info := range h.nodes {
		status := a.filterNominated(info.Node().Name)
		if status.IsSuccess() {
			h.t.Fatalf("pod %s fits %s", p.Name, info.Node().Name)
		}
		a.statuses.Set(info.Node().Name, status)
	}
	a.postFilter()
	if woken := h.activator.taken(); len(woken) > 0 {
		h.t.Fatalf("%v woken before anything has changed", woken)
	}
}

// The scheduling queue knows of a nomination before the API shows it. When it ends, nothing that the framework sees has changed, so it tells
// nobody. What was kept is for others all the same.
func TestTheEndOfANominationThatTheAPIDoesNotShowWakesOthers(t *testing.T) {
	for name, ends := range map[string]func(h *harness, nominee *v1.Pod){
		"the nominated pod is deleted": func(h *harness, nominee *v1.Pod) {
			if err := h.client.CoreV1().Pods(testNamespace).Delete(h.ctx, nominee.Name, metav1.DeleteOptions{}); err != nil {
				h.t.Fatal(err)
			}
		},
		"another scheduler binds it": func(h *harness, nominee *v1.Pod) {
			bound := nominee.DeepCopy()
			bound.Spec.NodeName = "node-c"
			if _, err := h.client.CoreV1().Pods(testNamespace).Update(h.ctx, bound, metav1.UpdateOptions{}); err != nil {
				h.t.Fatal(err)
			}
		},
		"it gets devices of another node": func(h *harness, nominee *v1.Pod) {
			h.nominator.withdraw(nominee)
			h.filterAll(nominee).reserve("node-c")
		},
		"its attempt ends without one": func(h *harness, nominee *v1.Pod) {
			h.fails(nominee, &fwk.NominatingInfo{NominatingMode: fwk.ModeOverride})
		},
		"its claim is deleted":                 func(h *harness, _ *v1.Pod) { h.api.delete("two") },
		"another claim of it is deleted":       func(h *harness, _ *v1.Pod) { h.api.delete("other") },
		"another claim of it is being deleted": func(h *harness, _ *v1.Pod) { h.api.change("other", deleting) },
		"the class of its claim has no devices any more": func(h *harness, _ *v1.Pod) {
			broken := class("second")
			broken.Spec.Selectors = []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: "false"}}}
			if _, err := h.client.ResourceV1().DeviceClasses().Update(h.ctx, broken, metav1.UpdateOptions{}); err != nil {
				h.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.nodes = []*v1.Node{node("node-b"), node("node-c")}
			w.objects = append(w.objects, class("second"), slice("node-c", device("gpu-0", withModel("L40")), device("gpu-1", withModel("L40"))))
			nominee, p := pending("nominee", 5, "two", "other"), pending("p", 5, "wanted")
			anywhere := func(c *resourceapi.ResourceClaim) { c.Status.Allocation.NodeSelector = nil }
			w.claims = []*resourceapi.ResourceClaim{
				claim("wanted", withSelector(`device.attributes["gpu.example.com"].model == "H100"`)), claim("two", counted(2), withClass("second")),
				claim("other", allocated("fabric", "gpu-0"), anywhere),
			}
			w.pods = []*v1.Pod{nominee, p}
			h := newHarness(t, w)
			h.nominator.nominate("node-b", nominee)
			h.sleeps(p)
			ends(h, nominee)
			h.wakes("p")
		})
	}
}

// queueHears asks about a pod what the scheduling queue asks when a pod, this one or another, is updated. The waiting room is to decide.
func (h *harness) queueHears(p, before, after *v1.Pod) {
	h.t.Helper()
	registered, err := h.plugin.EventsToRegister(h.ctx)
	if err != nil {
		h.t.Fatal(err)
	}
	for _, event := range framework.PodSchedulingPropertiesChange(after, before, true) {
		for _, r := range registered {
			if !framework.MatchClusterEvents(r.Event, event) {
				continue
			}
			if hint, err := r.QueueingHintFn(klog.FromContext(h.ctx), p, before, after); err != nil || hint != fwk.QueueSkip {
				h.t.Errorf("hint %v, error %v: the room is to look at it", hint, err)
			}
		}
	}
}

// Of two that are nominated to a node and have the same priority, the older one goes first, but not before the API shows that
// it is nominated at all. It is tried again when the scheduling queue has heard that, and not before: the attempt would have the
// pod as the queue has it.
func TestANominationThatTheAPIShowsAfterTheAttemptWakesItsPod(t *testing.T) {
	nominated := func(p *v1.Pod) { p.Status.NominatedNodeName = "node-b" }
	labeled := func(p *v1.Pod) { nominated(p); p.Labels = map[string]string{"changed": "true"} }
	for name, tc := range map[string]struct {
		pod    string // that is updated
		update func(p *v1.Pod)
		wakes  bool
	}{
		"it is nominated":              {pod: "p", update: nominated, wakes: true},
		"nothing else has changed":     {pod: "p", update: func(p *v1.Pod) { p.Status.Conditions = []v1.PodCondition{{Type: v1.PodScheduled}} }},
		"it has another label as well": {pod: "p", update: labeled, wakes: true},
		"another one is nominated":     {pod: "another", update: nominated},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.nodes = []*v1.Node{node("node-b")}
			p, younger, another := pending("p", 5, "first"), pending("younger", 5, "second"), pending("another", 5, "third")
			younger.CreationTimestamp = metav1.NewTime(p.CreationTimestamp.Add(time.Second))
			younger.Status.NominatedNodeName = "node-b"
			w.claims = []*resourceapi.ResourceClaim{
				claim("first"), claim("second"), claim("third"), claim("held", allocated("node-b", "gpu-0"), reservedFor("high")),
			}
			w.pods = []*v1.Pod{p, younger, another, running("high", "node-b", 9, "held")}
			h := newHarness(t, w)
			h.nominator.nominate("node-b", p, younger)
			h.sleeps(p)
			before := map[string]*v1.Pod{"p": p, "another": another}[tc.pod]
			after := before.DeepCopy()
			tc.update(after)
			if _, err := h.client.CoreV1().Pods(testNamespace).UpdateStatus(h.ctx, after, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			h.eventually("the informer tells of it", func() bool {
				now, err := h.plugin.shared.common.Pods.Pods(testNamespace).Get(tc.pod)
				return err == nil && apiequality.Semantic.DeepEqual(now.Status, after.Status)
			})
			if woken := h.lookedAt(); len(woken) > 0 {
				t.Fatalf("%v woken before the scheduling queue has heard of it", woken)
			}
			h.queueHears(p, before, after)
			h.wakesIf(tc.wakes, "nothing that matters has changed")
			if tc.wakes {
				h.filterAll(after).reserve("node-b")
			}
		})
	}
}

// Who is nominated gets what becomes free instead of what is free, as soon as it is known who goes.
func TestAPodThatBeginsToEndWhereOthersAreNominatedWakesThoseThatMakeWay(t *testing.T) {
	for name, ends := range map[string]func(second *v1.Pod){
		"it is deleted":     func(second *v1.Pod) { second.DeletionTimestamp = &metav1.Time{Time: metav1.Now().Time} },
		"it ends by itself": func(second *v1.Pod) { second.Status.Phase = v1.PodSucceeded },
		"it fails":          func(second *v1.Pod) { second.Status.Phase = v1.PodFailed },
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.nodes = []*v1.Node{node("node-b")}
			w.objects = []runtime.Object{class(testClass), slice("node-b", device("gpu-0"), device("gpu-1"), device("gpu-2"))}
			nominee, p := pending("nominee", 5, "two"), pending("p", 5, "wanted")
			second := running("second", "node-b", 1, "b")
			w.claims = []*resourceapi.ResourceClaim{
				claim("two", counted(2)), claim("wanted"), claim("a", allocated("node-b", "gpu-0"), reservedFor("gone")), claim("b", allocated("node-b", "gpu-1"), reservedFor("second")),
			}
			w.pods = []*v1.Pod{nominee, p, second}
			h := newHarness(t, w)
			h.nominator.nominate("node-b", nominee)
			h.sleeps(p)
			ending := second.DeepCopy()
			ends(ending)
			if err := h.client.Tracker().Update(v1.SchemeGroupVersion.WithResource("pods"), ending, testNamespace); err != nil {
				t.Fatal(err)
			}
			h.wakes("p")
			h.filterAll(p).reserve("node-b")
		})
	}
}

// A pod can end at any time, and what its attempt notes in its end is forgotten in any order.
func TestNothingIsKeptOfAPodThatIsGone(t *testing.T) {
	withGroups(t)
	p := member(pod("p", "a"))
	notes := map[string]struct {
		note func(h *harness)
		kept func(s *Shared) bool
	}{
		"that it waits for claims to leave": {
			note: func(h *harness) {
				next := func(context.Context, framework.Framework, *framework.QueuedPodInfo, *fwk.Status, *fwk.NominatingInfo, time.Time) {
				}
				info := &framework.QueuedPodInfo{PodInfo: &framework.PodInfo{Pod: p}}
				waits := refusedWith("node node-b: claim team-a/c released, waiting for its deallocation")
				h.plugin.shared.HandleFailures(next)(h.ctx, nil, info, waits, nil, time.Time{})
			},
			kept: func(s *Shared) bool {
				return !s.common.Nominations.BeginWait(p)
			},
		},
		"that it has given way at the fence": {
			note: func(h *harness) {
				a := h.filterAll(p).reserve("node-b")
				h.plugin.shared.memory.Attempts.GiveWay(p)
				a.unreserve("node-b")
			},
			kept: func(s *Shared) bool {
				return len(s.memory.Attempts.HaveGivenWay(p)) > 0
			},
		},
	}
	pods := v1.SchemeGroupVersion.WithResource("pods")
	orders := map[string]struct {
		before bool // its end was told before
		ends   func(h *harness) error
	}{
		"told of before": {before: true},
		"told of after":  {ends: func(h *harness) error { return h.client.Tracker().Delete(pods, p.Namespace, p.Name) }},
		"not told of, as another pod has its name": {ends: func(h *harness) error {
			another := p.DeepCopy()
			another.UID = "another"
			return h.client.Tracker().Update(pods, another, p.Namespace)
		}},
	}
	for what, n := range notes {
		for when, order := range orders {
			t.Run(what+"/"+when, func(t *testing.T) {
				w := oneNode()
				w.claims, w.groups = []*resourceapi.ResourceClaim{claim("a")}, []*schedulingapi.PodGroup{group()}
				if !order.before {
					w.pods = []*v1.Pod{p}
				}
				h := newHarness(t, w)
				n.note(h)
				if order.before {
					if n.kept(h.plugin.shared) {
						t.Error("it is kept of a pod that was gone")
					}
					return
				}
				if !n.kept(h.plugin.shared) {
					t.Error("it is not kept of a pod that is there")
				}
				if err := order.ends(h); err != nil {
					t.Fatal(err)
				}
				h.eventually("it is forgotten", func() bool { return !n.kept(h.plugin.shared) })
			})
		}
	}
}

// A nomination that goes on keeps what it kept.
func TestANominationThatGoesOnWakesNobody(t *testing.T) {
	w := twoNodes()
	w.nodes = w.nodes[1:]
	nominee, p := pending("nominee", 5, "two"), pending("p", 5, "wanted")
	w.claims = []*resourceapi.ResourceClaim{claim("wanted"), claim("two", counted(2))}
	w.pods = []*v1.Pod{nominee, p}
	h := newHarness(t, w)
	var ended []string
	nominations := contention.NewNominations(h.plugin.shared.common.Pods, func(node string) { ended = append(ended, node) }, nil)
	h.plugin.shared.common.Nominations = nominations
	h.nominator.nominate("node-b", nominee)
	h.sleeps(p)
	h.fails(nominee, nil)
	if len(ended) > 0 {
		t.Errorf("nominations to %v count as ended", ended)
	}
	h.fails(nominee, &fwk.NominatingInfo{NominatingMode: fwk.ModeOverride})
	nominations.End(nominee.UID, func(string) bool { return true })
	if !slices.Equal(ended, []string{"node-b"}) {
		t.Errorf("ended are the nominations to %v, want that to node-b, once", ended)
	}
}

// A driver may write the status of a device again and again, and each end of a nomination has all be asked who could evict somebody there.
func TestWhatADriverSaysOfADeviceEndsNoNomination(t *testing.T) {
	w := twoNodes()
	w.nodes = w.nodes[1:]
	nominee, p := pending("nominee", 5, "two", "other"), pending("p", 5, "wanted")
	w.claims = []*resourceapi.ResourceClaim{
		claim("wanted"), claim("two", counted(2)),
		claim("other", allocated("fabric", "gpu-0"), func(c *resourceapi.ResourceClaim) { c.Status.Allocation.NodeSelector = nil }),
	}
	w.pods = []*v1.Pod{nominee, p}
	h := newHarness(t, w)
	ended := make(chan string, 10)
	h.plugin.shared.common.Nominations = contention.NewNominations(h.plugin.shared.common.Pods, func(node string) { ended <- node }, nil)
	h.plugin.shared.account.Tracker.Subscribe(h.plugin.shared.common.Nominations.OnClaimEvent)
	h.nominator.nominate("node-b", nominee)
	h.sleeps(p)
	h.api.change("other", func(c *resourceapi.ResourceClaim) {
		c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: testDriver, Pool: "fabric", Device: "gpu-0"}}
		c.Labels = map[string]string{"a": "b"}
	})
	h.lookedAt()
	if len(ended) > 0 {
		t.Errorf("the nomination to %s counts as ended", <-ended)
	}
	h.api.change("other", reservedFor("someone"))
	h.eventually("the nomination ends", func() bool { return len(ended) > 0 })
}

// Who is evicted for a pod may go, and somebody else get what it had. The pod could have had others evicted in its last attempt, but they were
// not: that is news, whether the devices are freed before the nomination is known or after.
func TestANominatedPodIsTriedAgainWhenTheEvictedAreGone(t *testing.T) {
	free := func(h *harness, _ *v1.Pod) {
		h.api.change("of-low", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
		h.caughtUp("of-low")
	}
	ends := func(nominating *fwk.NominatingInfo) func(*harness, *v1.Pod) {
		return func(h *harness, p *v1.Pod) { h.fails(p, nominating) }
	}
	to := func(node string) *fwk.NominatingInfo {
		return &fwk.NominatingInfo{NominatedNodeName: node, NominatingMode: fwk.ModeOverride}
	}
	for name, tc := range map[string]struct {
		happens []func(*harness, *v1.Pod)
		last    func(*harness, *v1.Pod)
		wakes   bool
	}{
		"nominated, then freed":                 {last: free, happens: []func(*harness, *v1.Pod){ends(to("node-b"))}, wakes: true},
		"freed, then nominated":                 {last: ends(to("node-b")), happens: []func(*harness, *v1.Pod){free}, wakes: true},
		"freed, then nominated to another node": {last: ends(to("node-a")), happens: []func(*harness, *v1.Pod){free}},
		"freed, and nobody was evicted":         {last: ends(to("")), happens: []func(*harness, *v1.Pod){free}},
		"freed, and nothing else decided":       {last: ends(nil), happens: []func(*harness, *v1.Pod){free}},
	} {
		t.Run(name, func(t *testing.T) {
			p := pending("p", 5, "wanted")
			w := twoNodes()
			w.nodes = w.nodes[1:]
			w.pods = []*v1.Pod{p, running("low", "node-b", 1, "of-low"), running("lower", "node-b", 0, "of-lower")}
			w.claims = []*resourceapi.ResourceClaim{
				claim("wanted", counted(2)), claim("of-low", allocated("node-b", "gpu-0"), reservedFor("low")), claim("of-lower", allocated("node-b", "gpu-1"), reservedFor("lower")),
			}
			h := newHarness(t, w)
			h.sleeps(p)
			for _, happens := range tc.happens {
				happens(h, p)
			}
			if woken := h.lookedAt(); len(woken) > 0 {
				t.Fatalf("%v woken before there is any news", woken)
			}
			tc.last(h, p)
			h.wakesIf(tc.wakes, "nobody was evicted for the pod from a node where something has changed")
		})
	}
}

// Somebody of higher priority is nominated to the node, too. The pod may have others evicted elsewhere.
func TestANominatedPodThatIsOvertakenIsTriedAgain(t *testing.T) {
	for name, tc := range map[string]struct {
		priority int32
		shown    bool
		node     string
		wakes    bool
	}{
		"of higher priority":                       {priority: 9, node: "node-b", wakes: true},
		"of higher priority, to another node":      {priority: 9, node: "node-a"},
		"of higher priority, and was so before":    {priority: 9, node: "node-b", shown: true},
		"of the same priority, which comes second": {priority: 5, node: "node-b"},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			p, other := pending("p", 5, "wanted"), pending("other", tc.priority, "others")
			w.claims = []*resourceapi.ResourceClaim{
				claim("wanted", counted(2)), claim("others", counted(2)), claim("held", allocated("node-b", "gpu-0"), reservedFor("victim")),
				claim("held-a", allocated("node-a", "gpu-0"), reservedFor("victim-a")),
			}
			w.pods = []*v1.Pod{p, other, running("victim", "node-b", 1, "held"), running("victim-a", "node-a", 1, "held-a")}
			h := newHarness(t, w)
			h.nominator.nominate("node-b", p)
			h.sleeps(p)
			if tc.shown {
				other.Status.NominatedNodeName = tc.node
			}
			if tc.node == "node-b" {
				h.nominator.nominate("node-b", p, other)
			}
			h.fails(other, &fwk.NominatingInfo{NominatedNodeName: tc.node, NominatingMode: fwk.ModeOverride})
			h.wakesIf(tc.wakes, "nobody has overtaken it")
		})
	}
}

// Preemption by a pod of higher priority takes the nominations of others on the node. Those could have others evicted again.
func TestAPodThatLosesItsNominationIsTriedAgain(t *testing.T) {
	for name, tc := range map[string]struct {
		to    string
		wakes bool
	}{
		"it has none any more":       {wakes: true},
		"it has another one":         {to: "node-a", wakes: true},
		"it has the one that it had": {to: "node-b"},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.nodes = w.nodes[1:]
			p := pending("p", 5, "wanted")
			p.Status.NominatedNodeName = "node-b"
			w.claims = []*resourceapi.ResourceClaim{claim("wanted", counted(2)), claim("held", allocated("node-b", "gpu-0"), reservedFor("victim"))}
			w.pods = []*v1.Pod{p, running("victim", "node-b", 1, "held")}
			h := newHarness(t, w)
			h.sleeps(p)
			after := p.DeepCopy()
			after.Status.NominatedNodeName = tc.to
			h.queueHears(p, p, after)
			h.wakesIf(tc.wakes, "its nomination is what it was")
		})
	}
}

// Somebody of higher priority takes a device that was left where a pod waits for others to end. It could have others evicted on another node.
func TestAPodWhoseNominationComesToNothingIsTriedAgain(t *testing.T) {
	for name, shown := range map[string]string{"the API shows the nomination": "node-b", "the API does not show it": ""} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.objects = []runtime.Object{class(testClass), slice("node-a", device("gpu-0"), device("gpu-1")), slice("node-b", device("gpu-0"), device("gpu-1"))}
			p, high := pending("p", 5, "wanted"), running("high", "node-b", 9, "taken")
			p.Status.NominatedNodeName = shown
			w.claims = []*resourceapi.ResourceClaim{
				claim("wanted", counted(2)), claim("on-a", allocated("node-a", "gpu-0", "gpu-1"), reservedFor("low")),
				claim("leaving", allocated("node-b", "gpu-0"), reservedFor("gone")), claim("taken"),
			}
			w.pods = []*v1.Pod{p, running("low", "node-a", 1, "on-a"), high}
			h := newHarness(t, w)
			h.nominator.nominate("node-b", p)
			h.sleeps(p)
			h.fails(p, &fwk.NominatingInfo{NominatingMode: fwk.ModeOverride, NominatedNodeName: "node-b"})
			h.api.change("taken", func(c *resourceapi.ResourceClaim) {
				allocated("node-b", "gpu-1")(c)
				reservedFor("high")(c)
			})
			h.caughtUp("taken")
			if hint, err := h.plugin.hints.AfterPodAssigned(klog.Background(), p, nil, high); hint != fwk.QueueSkip || err != nil {
				t.Errorf("hint %v, error %v", hint, err)
			}
			h.wakes("p")
			if status := h.filterAll(p).postFilter(); strings.Contains(status.Message(), contention.WaitingForDeallocation) {
				t.Errorf("it waits still: %v", status)
			}
		})
	}
}
