// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
)

// Of several allocations that pin the pod, the one in its way is given up.
func TestPostFilterGivesUpTheAllocationThatIsInTheWay(t *testing.T) {
	tests := map[string]struct {
		claims []*resourceapi.ResourceClaim
		limits Limits
		gone   string // none if empty
		want   []string
	}{
		// node-a has one device, node-b two, node-c three.
		"the one on the node that is too small": {
			claims: []*resourceapi.ResourceClaim{
				claim("large", allocated("node-b", "gpu-0"), reservedFor("p")), claim("small", allocated("node-a", "gpu-0"), reservedFor("p")),
			},
			gone: "small", want: []string{"kept the pod off other nodes, such as node-b"},
		},
		"not the first one by name, if it needs what only its node has": {
			claims: []*resourceapi.ResourceClaim{
				claim("a-special", withSelector(`device.attributes["gpu.example.com"].model == "H100"`), allocated("node-b", "gpu-0"), reservedFor("p")),
				claim("b-any", allocated("node-a", "gpu-0"), reservedFor("p")),
			},
			gone: "b-any", want: []string{"such as node-b"},
		},
		"one of two that must both go": {
			claims: []*resourceapi.ResourceClaim{
				claim("first", allocated("node-a", "gpu-0"), reservedFor("p")), claim("second", allocated("node-b", "gpu-0"), reservedFor("p")),
				claim("stranger", allocated("node-b", "gpu-1"), reservedFor("other")),
			},
			gone: "first", want: []string{"which with others kept the pod off other nodes, such as node-c"},
		},
		"not the first one by name, if two others must both go": {
			claims: []*resourceapi.ResourceClaim{
				claim("a-fine", allocated("node-c", "gpu-0"), reservedFor("p")),
				claim("first", allocated("node-a", "gpu-0"), reservedFor("p")), claim("second", allocated("node-b", "gpu-0"), reservedFor("p")),
				claim("stranger", allocated("node-b", "gpu-1"), reservedFor("other")),
			},
			gone: "first", want: []string{"with others"},
		},
		"the only one, if another claim finds its devices beside it elsewhere": {
			claims: []*resourceapi.ResourceClaim{claim("mine", allocated("node-a", "gpu-0"), reservedFor("p")), claim("open", counted(2))},
			gone:   "mine", want: []string{"such as node-c"},
		},
		"not the only one, if nobody has reserved it and no node has what another claim wants": {
			claims: []*resourceapi.ResourceClaim{claim("mine", allocated("node-a", "gpu-0")), claim("open", counted(3))},
			want:   []string{"claim open"},
		},
		"the one that is reserved for the pod, though no node has what another claim wants": {
			claims: []*resourceapi.ResourceClaim{
				claim("free", allocated("node-a", "gpu-0")), claim("mine", allocated("node-b", "gpu-0"), reservedFor("p")), claim("open", counted(3)),
			},
			gone: "mine", want: []string{"which others may use while the pod waits"},
		},
		"the first one if there is no time to find out": {
			claims: []*resourceapi.ResourceClaim{claim("mine", allocated("node-a", "gpu-0"), reservedFor("p")), claim("open", counted(3))},
			limits: Limits{Obstacle: over}, gone: "mine", want: []string{"which kept the pod off other nodes"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims, w.limits = tc.claims, tc.limits
			w.nodes = append(w.nodes, node("node-c"))
			w.objects = append(w.objects, slice("node-c", device("gpu-0"), device("gpu-1"), device("gpu-2")))
			h := newHarness(t, w)
			var names []string
			for _, c := range tc.claims {
				if c.Name != "stranger" {
					names = append(names, c.Name)
				}
			}
			status := h.filterAll(pod("p", names...)).postFilter()
			wantCode := fwk.Unschedulable // on to preemption
			if tc.gone != "" {
				wantCode = fwk.UnschedulableAndUnresolvable // the pod may fit now
			}
			if status.Code() != wantCode {
				t.Errorf("status %v: code %v, want %v", status, status.Code(), wantCode)
			}
			if gaveUp := strings.Contains(status.Message(), "gave up the allocation"); gaveUp != (tc.gone != "") {
				t.Errorf("status %v, an allocation was given up: %t", status, gaveUp)
			}
			for _, want := range tc.want {
				if !strings.Contains(status.Message(), want) {
					t.Errorf("message %q does not contain %q", status.Message(), want)
				}
			}
			for _, c := range tc.claims {
				if lost := c.Status.Allocation != nil && h.api.get(c.Name).Status.Allocation == nil; lost != (c.Name == tc.gone) {
					t.Errorf("claim %s: allocation given up: %t", c.Name, lost)
				}
			}
		})
	}
}

// Two pods have been reserved two claims each when the scheduler ended, and have got a device each: neither waits for the other one's for ever.
func TestPodsThatWaitHoldNothing(t *testing.T) {
	w := twoNodes()
	w.nodes = w.nodes[1:] // with two devices
	w.claims = []*resourceapi.ResourceClaim{
		claim("p-first", allocated("node-b", "gpu-0"), reservedFor("p")), claim("p-second"),
		claim("q-first", allocated("node-b", "gpu-1"), reservedFor("q")), claim("q-second"),
	}
	p, q := pod("p", "p-first", "p-second"), pod("q", "q-first", "q-second")
	w.pods = []*v1.Pod{p, q}
	h := newHarness(t, w)
	h.filterAll(p).postFilter()
	h.wantState("p-first", state{})
	h.filterAll(q).bind("node-b")
}

// The same for devices that every node reaches: they keep nobody off a node.
func TestPodsThatWaitHoldNoDevicesOfAFabric(t *testing.T) {
	w := twoNodes()
	fabric := slice("node-a", device("gpu-0"), device("gpu-1"))
	fabric.Spec.NodeName, fabric.Spec.AllNodes, fabric.Spec.Pool.Name = nil, new(true), "fabric"
	w.objects = []runtime.Object{class(testClass), fabric}
	anywhere := func(name, device, user string) *resourceapi.ResourceClaim {
		c := claim(name, allocated("fabric", device), reservedFor(user))
		c.Status.Allocation.NodeSelector = nil
		return c
	}
	w.claims = []*resourceapi.ResourceClaim{
		anywhere("p-first", "gpu-0", "p"), claim("p-second"), anywhere("q-first", "gpu-1", "q"), claim("q-second"),
	}
	p, q := pod("p", "p-first", "p-second"), pod("q", "q-first", "q-second")
	w.pods = []*v1.Pod{p, q}
	h := newHarness(t, w)
	h.filterAll(p).postFilter()
	h.wantState("p-first", state{})
	h.filterAll(q).bind("node-b")
}

// A claim may be reserved for a pod and for its group, as by schedulers with and without the feature. The pod gives up its own reservation, and where
// nobody of the group runs with the claim, its allocation.
func TestAPodGivesUpItsOwnReservationBesideItsGroups(t *testing.T) {
	withGroups(t)
	for name, runs := range map[string]bool{"a pod of the group runs with the claim": true, "nobody of the group has a node": false} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			shared := claim("shared", allocated("node-a", "gpu-0"), forGroup, reservedFor("p"))
			shared.Status.Allocation.NodeSelector = nil
			w.claims = []*resourceapi.ResourceClaim{shared, claim("own", counted(3))}
			w.groups = []*schedulingapi.PodGroup{group("shared")}
			p, q := member(pod("p", "shared", "own")), member(running("q", "node-a", 0, "shared"))
			w.pods = []*v1.Pod{p}
			if runs {
				w.assumed = []*v1.Pod{q}
			}
			h := newHarness(t, w)
			if runs {
				if err := h.client.Tracker().Add(q); err != nil {
					t.Fatal(err)
				}
			}
			if status := h.filterAll(p).postFilter(); strings.Contains(status.Message(), "keeps its claims") {
				t.Errorf("told %q", status.Message())
			}
			left := h.api.get("shared").Status
			for _, user := range left.ReservedFor {
				if user.UID == p.UID {
					t.Error("the claim is reserved for the pod that waits")
				}
			}
			if kept := left.Allocation != nil; kept != runs || kept && len(left.ReservedFor) != 1 {
				t.Errorf("the group keeps its claim: %t, want %t: %+v", kept, runs, left)
			}
		})
	}
}

// A scheduler that has ended leaves its note. What the note is about stays until it is old, but the pod may have others evicted.
func TestANoteKeepsNobodyFromPreempting(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("first", allocated("node-b", "gpu-0"), reservedFor("p"), func(c *resourceapi.ResourceClaim) {
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, binding.AdoptionKey("p-uid"), binding.Adoption{By: "another", At: time.Now()}.String())
	}), claim("second"), claim("of-low", allocated("node-b", "gpu-1"), reservedFor("low"))}
	p := pod("p", "first", "second")
	w.pods = []*v1.Pod{p, running("low", "node-b", -1, "of-low")}
	h := newHarness(t, w)
	if status := h.filterAll(p).postFilter(); status.Code() != fwk.Unschedulable {
		t.Errorf("preemption is not asked: %v", status)
	}
	h.wantState("first", state{[]string{"gpu-0"}, []string{"p"}})
}

// A pod waits for one of its claims, or for a class, perhaps for ever. What a scheduler that has ended has reserved for it of the others goes to those
// who can use it.
func TestAPodThatWaitsForAClaimHoldsNoOther(t *testing.T) {
	adopted := func(c *resourceapi.ResourceClaim) {
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, binding.AdoptionKey("p-uid"), binding.Adoption{By: "another", At: time.Now()}.String())
	}
	p := extendedPod("p", gpuResource)
	p.Spec.ResourceClaims = pod("p", "first", "second").Spec.ResourceClaims
	// The scheduler ended before it wrote the claim's name into the pod's status.
	ofExtended := leftover(p, allocated("node-b", "gpu-1"))
	first := claim("first", allocated("node-b", "gpu-0"), reservedFor("p"))
	var crowd []string
	for i := range resourceapi.ResourceClaimReservedForMaxSize {
		crowd = append(crowd, fmt.Sprint("user-", i))
	}
	broken := class("broken")
	broken.Spec.Selectors[0].CEL.Expression = "device."
	for name, tc := range map[string]struct {
		claims []*resourceapi.ResourceClaim
		class  string // of the extended resource, if it is not the usual one
		after  map[string]state
	}{
		"too many devices are asked for": {
			claims: []*resourceapi.ResourceClaim{first, claim("second", counted(resourceapi.AllocationResultsMaxSize+1))}, after: map[string]state{"first": {}},
		},
		"the selector of a claim is broken": {
			claims: []*resourceapi.ResourceClaim{first, claim("second", withSelector("device."))}, after: map[string]state{"first": {}},
		},
		"the selector of a class is broken": {
			claims: []*resourceapi.ResourceClaim{first, claim("second", withClass("broken"))}, after: map[string]state{"first": {}},
		},
		"the selector of the extended resource's class is broken": {
			claims: []*resourceapi.ResourceClaim{first, claim("second")}, class: "broken", after: map[string]state{"first": {}},
		},
		"a claim has no place left": {
			claims: []*resourceapi.ResourceClaim{first, claim("second", allocated("node-b", "gpu-1"), reservedFor(crowd...))}, after: map[string]state{"first": {}},
		},
		"its claims are allocated on two nodes": {
			claims: []*resourceapi.ResourceClaim{first, claim("second", allocated("node-a", "gpu-0"), reservedFor("p"))},
			after:  map[string]state{"first": {}, "second": {}},
		},
		"the class is not there": {
			claims: []*resourceapi.ResourceClaim{
				claim("first", allocated("node-b", "gpu-0"), reservedFor("p")), claim("second", withClass("missing")),
			},
			after: map[string]state{"first": {}, "second": {}},
		},
		"the class is not there, and a claim for extended resources is": {
			claims: []*resourceapi.ResourceClaim{claim("first"), claim("second", withClass("missing")), ofExtended},
			after:  map[string]state{ofExtended.Name: {}},
		},
		"a claim does not exist": {
			claims: []*resourceapi.ResourceClaim{claim("first", allocated("node-b", "gpu-0"), reservedFor("p"))},
			after:  map[string]state{"first": {}},
		},
		"a claim does not exist, and one for extended resources does": {
			claims: []*resourceapi.ResourceClaim{claim("first", allocated("node-b", "gpu-0"), reservedFor("p")), ofExtended},
			after:  map[string]state{"first": {}, ofExtended.Name: {}},
		},
		"a claim is being deleted": {
			claims: []*resourceapi.ResourceClaim{
				claim("first", allocated("node-b", "gpu-0"), reservedFor("p")), claim("second", deleting, allocated("node-b", "gpu-1"), reservedFor("p")),
			},
			after: map[string]state{"first": {}, "second": {}},
		},
		"others use it, too": {
			claims: []*resourceapi.ResourceClaim{claim("first", allocated("node-b", "gpu-0"), reservedFor("p", "q"))},
			after:  map[string]state{"first": {Devices: []string{"gpu-0"}, Users: []string{"q"}}},
		},
		"another scheduler may be binding the pod": {
			claims: []*resourceapi.ResourceClaim{claim("first", allocated("node-b", "gpu-0"), reservedFor("p"), adopted)},
			after:  map[string]state{"first": {Devices: []string{"gpu-0"}, Users: []string{"p"}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = tc.claims
			w.objects = append(w.objects, broken)
			w.pods, w.resolver = []*v1.Pod{p}, map[v1.ResourceName]string{gpuResource: cmp.Or(tc.class, testClass)}
			h := newHarness(t, w).leads()
			for range tc.claims { // one at a time
				if h.plugin.PreEnqueue(h.ctx, p).IsSuccess() {
					h.filterAll(p).postFilter()
				}
			}
			h.settled()
			for name, want := range tc.after {
				h.wantState(name, want)
			}
		})
	}
}

// While a pod gives up what is reserved for it no other one is scheduled: all its claims together have the time of one.
func TestGivingUpManyClaimsIsBounded(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{
		claim("first", allocated("node-b", "gpu-0"), reservedFor("p")), claim("second", allocated("node-b", "gpu-1"), reservedFor("p")),
		claim("third", withClass("missing")),
	}
	p := pod("p", "first", "second", "third")
	w.pods = []*v1.Pod{p}
	h := newHarness(t, w)
	silent := silentPods{Interface: h.client}
	h.plugin.binder.Client = &silent
	if status := h.filterAll(p).postFilter(); status.Code() != fwk.Error {
		t.Errorf("PostFilter: %v", status)
	}
	if len(silent.deadlines) != 2 || !silent.deadlines[0].Equal(silent.deadlines[1]) {
		t.Errorf("deadlines of the requests: %v", silent.deadlines)
	}
}

// silentPods is a client that gets no answer about pods. It notes until when it was waited for.
type silentPods struct {
	kubernetes.Interface
	typedcorev1.CoreV1Interface
	typedcorev1.PodInterface
	deadlines []time.Time
}

func (s *silentPods) CoreV1() typedcorev1.CoreV1Interface  { return s }
func (s *silentPods) Pods(string) typedcorev1.PodInterface { return s }
func (s *silentPods) Get(ctx context.Context, _ string, _ metav1.GetOptions) (*v1.Pod, error) {
	deadline, _ := ctx.Deadline()
	s.deadlines = append(s.deadlines, deadline)
	return nil, context.DeadlineExceeded
}

// A pod that has a node is tried for a resize, and needs what is reserved for it.
func TestAPodWithANodeKeepsItsClaims(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("c", allocated("node-b", "gpu-0"), reservedFor("p"))}
	p := running("p", "node-b", 0, "c")
	w.pods = []*v1.Pod{p}
	h := newHarness(t, w)
	if status := h.filterAll(p).postFilter(); status.Code() != fwk.Unschedulable {
		t.Errorf("preemption is not asked: %v", status)
	}
	h.wantState("c", state{[]string{"gpu-0"}, []string{"p"}})
}

// Of a group of pods, the one that its own allocation keeps off every node gives it up; allocations that some node could
// be used with stay.
func TestPodGroupPostFilter(t *testing.T) {
	tests := map[string]struct {
		claims   []*resourceapi.ResourceClaim
		wantCode fwk.Code
		gone     string
	}{
		"allocations on different nodes": {
			claims: []*resourceapi.ResourceClaim{
				claim("fine", allocated("node-b", "gpu-1"), reservedFor("first")),
				claim("large", allocated("node-b", "gpu-0"), reservedFor("second")), claim("small", allocated("node-a", "gpu-0"), reservedFor("second")),
			},
			wantCode: fwk.UnschedulableAndUnresolvable, gone: "small",
		},
		"an allocation on a node where the rest of the pod's devices are held": {
			claims: []*resourceapi.ResourceClaim{
				claim("fine", allocated("node-b", "gpu-1"), reservedFor("first")),
				claim("large", allocated("node-a", "gpu-0"), reservedFor("second")), claim("small"),
			},
			wantCode: fwk.UnschedulableAndUnresolvable, gone: "large",
		},
		"an allocation whose release helps nothing": {
			claims: []*resourceapi.ResourceClaim{
				claim("fine", allocated("node-b", "gpu-1"), reservedFor("first")),
				claim("large", allocated("node-a", "gpu-0"), reservedFor("second")), claim("small", counted(3)),
			},
			wantCode: fwk.UnschedulableAndUnresolvable, gone: "large",
		},
		"an allocation that nobody has reserved, on a node for the pod's devices": {
			claims: []*resourceapi.ResourceClaim{
				claim("fine", allocated("node-a", "gpu-0")), claim("large", allocated("node-b", "gpu-0")), claim("small"),
			},
			wantCode: fwk.Unschedulable,
		},
		"an allocation that somebody else uses": {
			claims: []*resourceapi.ResourceClaim{
				claim("fine", allocated("node-b", "gpu-1"), reservedFor("other")),
				claim("large", allocated("node-a", "gpu-0"), reservedFor("second", "other")), claim("small"),
			},
			wantCode: fwk.Unschedulable,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = tc.claims
			w.objects[2] = slice("node-b", device("gpu-0"), device("gpu-1"), device("gpu-2"))
			h := newHarness(t, w)
			_, status := h.tryGroup(pod("first", "fine"), pod("second", "large", "small")).postFilter(nil)
			if status.Code() != tc.wantCode {
				t.Errorf("status %v, want code %v", status, tc.wantCode)
			}
			for _, c := range tc.claims {
				if lost := c.Status.Allocation != nil && h.api.get(c.Name).Status.Allocation == nil; lost != (c.Name == tc.gone) {
					t.Errorf("claim %s: allocation given up: %t", c.Name, lost)
				}
			}
		})
	}
}

// A scheduler has ended before it bound the pods of a group, and the group does not fit any more. What is reserved for those that would fit, and for
// those that the framework does not try after the first one that does not, is for others.
func TestPodsOfAGroupThatWaitHoldNothing(t *testing.T) {
	withGroups(t)
	held := func(users ...string) state { return state{Devices: []string{"gpu-0"}, Users: users} }
	for name, tc := range map[string]struct {
		first, second []func(*resourceapi.ResourceClaim)
		notTried      bool
		bound         bool
		want          state // of first; second is never kept
	}{
		"one claim":              {first: []func(*resourceapi.ResourceClaim){reservedFor("p")}},
		"two claims":             {first: []func(*resourceapi.ResourceClaim){reservedFor("p")}, second: []func(*resourceapi.ResourceClaim){allocated("node-b", "gpu-1"), reservedFor("p")}},
		"a pod not tried":        {first: []func(*resourceapi.ResourceClaim){reservedFor("p")}, notTried: true},
		"another one's, too":     {first: []func(*resourceapi.ResourceClaim){reservedFor("p", "other")}, want: held("other")},
		"the group's":            {first: []func(*resourceapi.ResourceClaim){forGroup}},
		"the group's, untried":   {first: []func(*resourceapi.ResourceClaim){forGroup}, notTried: true},
		"both, a pod not tried":  {first: []func(*resourceapi.ResourceClaim){forGroup, reservedFor("p")}, notTried: true},
		"the group's, that runs": {first: []func(*resourceapi.ResourceClaim){forGroup}, bound: true, want: held("g")},
		"nobody's":               {want: held()},
		"the pod's, which runs":  {first: []func(*resourceapi.ResourceClaim){reservedFor("p")}, bound: true, want: held("p")},
	} {
		t.Run(name, func(t *testing.T) {
			w := oneNode()
			w.claims = []*resourceapi.ResourceClaim{
				claim("first", append(tc.first, allocated("node-b", "gpu-0"))...), claim("second", tc.second...), claim("large", counted(3)),
			}
			w.groups = []*schedulingapi.PodGroup{group("first")}
			p, q := member(pod("p", "first", "second")), member(pod("q", "large"))
			w.pods = []*v1.Pod{p, q}
			h := newHarness(t, w)
			if tc.bound {
				h.binds(p) // of which the scheduler has not heard
			}
			g := h.tryGroup(p, q)
			if g.wantNodes("node-b", ""); tc.notTried {
				g = h.tryGroup(q)
				g.pods = []*v1.Pod{q, p}
			}
			g.postFilter(nil)
			h.wantState("first", tc.want)
			h.wantState("second", state{})
		})
	}
}

// A pod of a group waits for one of its claims, which keeps the whole group out of the queue: nobody tries it. What is reserved for the
// pod is for others. What is reserved for the group is for the pods of it that come.
func TestAPodOfAGroupThatIsKeptBackHoldsNothing(t *testing.T) {
	withGroups(t)
	held := func(device string, users ...string) state { return state{Devices: []string{device}, Users: users} }
	ofP, runs := reservedFor("p"), map[string]state{"first": held("gpu-0", "p"), "second": held("gpu-1", "p")}
	for name, tc := range map[string]struct {
		first, second func(*resourceapi.ResourceClaim)
		bound         bool
		want          map[string]state
	}{
		"two claims":            {first: ofP, second: ofP, want: map[string]state{"first": {}, "second": {}}},
		"another one's, too":    {first: reservedFor("p", "other"), second: ofP, want: map[string]state{"first": held("gpu-0", "other"), "second": {}}},
		"the group's":           {first: forGroup, second: ofP, want: map[string]state{"first": held("gpu-0", "g"), "second": {}}},
		"the pod's, which runs": {first: ofP, second: ofP, bound: true, want: runs},
	} {
		for _, tried := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/tried %t", name, tried), func(t *testing.T) {
				w := oneNode()
				w.claims = []*resourceapi.ResourceClaim{
					claim("first", allocated("node-b", "gpu-0"), tc.first), claim("second", allocated("node-b", "gpu-1"), tc.second),
				}
				w.groups = []*schedulingapi.PodGroup{group("first")}
				p := member(pod("p", "first", "second", "missing"))
				w.pods = []*v1.Pod{p}
				h := newHarness(t, w)
				if tc.bound {
					h.binds(p) // of which the scheduler has not heard
				}
				if tried { // as PreEnqueue did not know the claims yet; PreFilter refuses it
					g := h.tryGroup()
					g.pods = []*v1.Pod{p}
					g.postFilter(nil)
				} else {
					h.leads()
					if status := h.plugin.PreEnqueue(h.ctx, p); status.IsSuccess() {
						t.Fatal("the pod is let in")
					}
					h.settled()
				}
				for name, want := range tc.want {
					h.wantState(name, want)
				}
			})
		}
	}
}
