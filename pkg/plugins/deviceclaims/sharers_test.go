// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// twoSharers are pods p and q of a group that share a claim, tried and not yet reserved for good, and pod s with a claim of its own.
func twoSharers(t *testing.T, change func(*world)) (h *harness, p, q *attempt) {
	t.Helper()
	w := oneNode()
	w.claims = []*resourceapi.ResourceClaim{claim("shared"), claim("own")}
	w.pods = []*v1.Pod{pod("p", "shared"), pod("q", "shared"), pod("s", "own")}
	change(&w)
	h = newHarness(t, w)
	g := h.tryGroup(w.pods[0], w.pods[1])
	g.wantNodes("node-b", "node-b")
	return h, g.forGood(0), g.forGood(1)
}

// statusWrites has each write of a status answered with an error.
func (h *harness) statusWrites(err error) {
	h.api.onRequest(func(request string) error {
		if request == "update/status" {
			return err
		}
		return nil
	})
}

// The write of a pod times out that shares its claim with another one. If the claim is allocated, whoever has it needs the finalizer; if
// not, the allocation must not come later.
func TestUndoLeavesAnAllocatedClaimItsFinalizer(t *testing.T) {
	tests := map[string]struct {
		bound bool // p is, before q writes
		lands bool
		users []string
	}{
		"the other pod is bound":                            {bound: true, users: []string{"p"}},
		"the other pod is bound, the write has effect late": {bound: true, lands: true, users: []string{"p", "q"}},
		"the other pod is bound later":                      {lands: true, users: []string{"p"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			h, p, q := twoSharers(t, func(*world) {})
			p.reserve("node-b")
			q.reserve("node-b")
			if tc.bound {
				mustBind(h, p)
			}
			h.statusWrites(errLate)
			if status := q.preBind("node-b"); status.IsSuccess() {
				t.Fatal("PreBind succeeded")
			}
			h.api.onRequest(nil)
			q.unreserve("node-b")
			if tc.lands {
				h.api.land()
			}
			if !tc.bound {
				mustBind(h, p)
			}
			h.wantState("shared", state{[]string{"gpu-0"}, tc.users})
			if finalizers := h.api.get("shared").Finalizers; !slices.Contains(finalizers, resourceapi.Finalizer) {
				t.Errorf("finalizers %v: a deletion of the claim would free a device in use", finalizers)
			}
		})
	}
}

// A pod joins what another one of its group has written, which is then taken back. Its device is somebody else's by the time it is written.
func TestAPodThatJoinsAWrittenAllocationDoesNotWriteItAgain(t *testing.T) {
	for name, change := range map[string]func(*world){
		"with the fence":    func(w *world) { w.fence = fenced().fence },
		"without the fence": func(*world) {},
	} {
		t.Run(name, func(t *testing.T) {
			h, p, q := twoSharers(t, change)
			p.reserve("node-b")
			mustBind(h, p)
			q.reserve("node-b")
			p.unreserve("node-b")
			s := h.filterAll(pod("s", "own")).reserve("node-b")
			status := q.preBind("node-b")
			want := "claim team-a/shared: lost its allocation while the pod was scheduled"
			if !isQuiet(status) || !strings.Contains(status.Message(), want) {
				t.Errorf("PreBind: %v, want one with %q", status, want)
			}
			q.unreserve("node-b")
			mustBind(h, s)
			h.wantState("shared", state{})
			h.wantState("own", state{[]string{"gpu-0"}, []string{"s"}})
			if held := h.plugin.shared.account.Tracker.Snapshot().Usage.Len(); held != 1 {
				t.Errorf("%d devices are held, want one", held)
			}
		})
	}
}

// A pod joins what another one has in flight, and a claim of its own is decided later, when more is known. At the fence the claim that it joined
// counts as decided on what was known then, and by somebody else.
func TestAPodThatJoinsDoesNotKnowWhatWasDecidedOn(t *testing.T) {
	for name, late := range map[string]bool{"what was held before": false, "what is held since": true} {
		t.Run(name, func(t *testing.T) {
			h, p, q := twoSharers(t, func(w *world) {
				w.fence = fenced().fence
				w.pods[1] = pod("q", "shared", "own")
			})
			p.reserve("node-b")
			if late {
				h.api.create(claim("old", allocated("node-b", "gone"), reservedFor("somebody"))) // a device that the slices do not have
				h.caughtUp("old")
			}
			q.reserve("node-b")
			status, want := q.preBind("node-b"), "claim team-a/shared gives way"
			if got := strings.Contains(status.Message(), want); got != late || late == status.IsSuccess() {
				t.Errorf("PreBind: %v, gives way: %t", status, late)
			}
		})
	}
}

// After a restart several pods without a node are found that have reserved one claim, which none of them can use as it is. Each leaves
// it, and the last one takes the allocation along.
func TestSharersWithoutANodeGiveUpTheirClaim(t *testing.T) {
	conditional := func(c *resourceapi.ResourceClaim) {
		result := &c.Status.Allocation.Devices.Results[0]
		result.BindingConditions, result.BindingFailureConditions = []string{"Attached"}, []string{"Broken"}
	}
	tests := map[string]struct {
		change func(*resourceapi.ResourceClaim)
		nodes  []*v1.Node
		bound  bool // q is
		reason string
		want   state
	}{
		"the device failed": {
			change: func(c *resourceapi.ResourceClaim) {
				conditional(c)
				c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: testDriver, Pool: "node-a", Device: "gpu-0", Conditions: []metav1.Condition{
					{Type: "Broken", Status: metav1.ConditionTrue, Reason: "Fabric", Message: "lost"},
				}}}
			},
			reason: "which could not be made ready: device gpu.example.com/node-a/gpu-0: condition Broken: Fabric: lost",
		},
		"the device never became ready": {
			change: func(c *resourceapi.ResourceClaim) {
				conditional(c)
				c.Status.Allocation.AllocationTimestamp = &metav1.Time{Time: time.Now().Add(-time.Hour)}
			},
			reason: "which could not be made ready: device gpu.example.com/node-a/gpu-0 not ready within the bindingTimeout of 10m0s after the allocation",
		},
		"the node is lost": {
			change: func(*resourceapi.ResourceClaim) {}, nodes: []*v1.Node{node("node-b")},
			reason: "which kept the pod off other nodes, such as node-b",
		},
		"one of them has a node": {
			change: func(*resourceapi.ResourceClaim) {}, nodes: []*v1.Node{node("node-b")}, bound: true,
			reason: "which kept the pod off other nodes, such as node-b",
			want:   state{[]string{"gpu-0"}, []string{"q"}},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			if tc.nodes != nil {
				w.nodes = tc.nodes
			}
			w.claims = []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), tc.change, reservedFor("p", "q", "r"))}
			w.pods = []*v1.Pod{pod("p", "c"), pod("q", "c"), pod("r", "c")}
			h := newHarness(t, w)
			if tc.bound {
				h.binds(w.pods[1])
			}
			for _, i := range []int{0, 2} {
				want := "gave up the reservation of claim team-a/c, " + tc.reason + "; other pods have reserved it, too"
				status := h.filterAll(w.pods[i]).postFilter()
				if status.Message() != want {
					t.Errorf("status %v, want %q", status, want)
				}
				h.filterAll(w.pods[i]).postFilter()
				if writes := h.api.written(); len(writes) != 1 {
					t.Errorf("writes %v, want one", writes)
				}
			}
			h.wantState("c", state{[]string{"gpu-0"}, []string{"q"}})
			h.filterAll(w.pods[1]).postFilter()
			h.wantState("c", tc.want)
			if tc.want.Users == nil {
				h.filterAll(w.pods[0]).bind("node-b")
			}
		})
	}
}

// What a pod has reserved with others stays if the pod is bound, or may be.
func TestASharerThatIsBoundLeavesNothing(t *testing.T) {
	for name, api := range map[string]func(h *harness, p *v1.Pod){
		"bound": func(h *harness, p *v1.Pod) { h.binds(p) },
		"not known": func(h *harness, _ *v1.Pod) {
			h.api.onRequest(func(request string) error {
				if request == "get pods" {
					return errUnreachable
				}
				return nil
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.nodes = w.nodes[1:]
			w.claims = []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), reservedFor("p", "q"))}
			w.pods = []*v1.Pod{pod("p", "c"), pod("q", "c")}
			h := newHarness(t, w)
			a := h.filterAll(w.pods[0])
			api(h, w.pods[0])
			if status := a.postFilter(); strings.Contains(status.Message(), "gave up") {
				t.Errorf("status %v", status)
			}
			h.wantState("c", state{[]string{"gpu-0"}, []string{"p", "q"}})
		})
	}
}
