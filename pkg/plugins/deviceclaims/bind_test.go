// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/component-base/metrics/testutil"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/framework"
	testingclock "k8s.io/utils/clock/testing"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/refusals"
	"stowage.dev/stowage/pkg/usage"
)

func TestReserveTakesDevicesOnce(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("one"), claim("two"), claim("three")}
	h := newHarness(t, w)
	// All three are judged on the same state, in which everything is free.
	one, two, three := h.filterAll(pod("p1", "one")), h.filterAll(pod("p2", "two")), h.filterAll(pod("p3", "three"))
	counted := allocationsByResult(t)
	one.reserve("node-b")
	two.reserve("node-b")
	status := h.plugin.Reserve(h.ctx, three.state, three.pod, "node-b")
	if status.Code() != fwk.Unschedulable || status.Message() != string(explain.ReasonHeld) {
		t.Errorf("third pod for two devices: %v", status)
	}
	if diff := cmp.Diff(map[string]float64{"chosen": 2, "refused": 1, "error": 0}, counted()); diff != "" {
		t.Errorf("counted allocations differ (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"gpu-0", "gpu-1"}, h.heldOn("node-b")); diff != "" {
		t.Errorf("held devices differ (-want +got):\n%s", diff)
	}

	one.unreserve("node-b")
	if diff := cmp.Diff([]string{"gpu-1"}, h.heldOn("node-b")); diff != "" {
		t.Errorf("held devices after Unreserve differ (-want +got):\n%s", diff)
	}
	three.reserve("node-b")
	if diff := cmp.Diff([]string{"gpu-0", "gpu-1"}, h.heldOn("node-b")); diff != "" {
		t.Errorf("held devices after the next Reserve differ (-want +got):\n%s", diff)
	}
	if writes := h.api.written(); len(writes) > 0 {
		t.Errorf("Reserve and Unreserve wrote %v", writes)
	}
}

func TestReserveRefusesAClaimThatHasChanged(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("one")}
	h := newHarness(t, w)
	a := h.filterAll(pod("p", "one"))
	h.api.delete("one")
	h.caughtUp("one")
	counted := allocationsByResult(t)
	status := h.plugin.Reserve(h.ctx, a.state, a.pod, "node-a")
	if status.Code() != fwk.Unschedulable || !strings.Contains(status.Message(), "team-a/one") {
		t.Errorf("status %v", status)
	}
	if diff := cmp.Diff(map[string]float64{"chosen": 0, "refused": 1, "error": 0}, counted()); diff != "" {
		t.Errorf("counted allocations differ (-want +got):\n%s", diff)
	}
	if held := h.heldOn("node-a"); len(held) > 0 {
		t.Errorf("held: %v", held)
	}
}

// allocationsByResult returns how many allocations are counted from now on.
func allocationsByResult(t *testing.T) func() map[string]float64 {
	read := func() map[string]float64 {
		counts := map[string]float64{}
		for _, result := range []string{"chosen", "refused", "error"} {
			n, err := testutil.GetCounterMetricValue(allocationsTotal.WithLabelValues(result))
			if err != nil {
				t.Fatal(err)
			}
			counts[result] = n
		}
		return counts
	}
	before := read()
	return func() map[string]float64 {
		counts := read()
		for result := range counts {
			counts[result] -= before[result]
		}
		return counts
	}
}

// heldOn returns the devices of a node's pool that somebody holds.
func (h *harness) heldOn(nodeName string) []string {
	var names []string
	for name := range h.plugin.shared.account.Tracker.Snapshot().Usage.Pool(usage.PoolID{Driver: testDriver, Pool: nodeName}).All() {
		names = append(names, name)
	}
	return names
}

func TestPreBindWrites(t *testing.T) {
	tests := map[string]struct {
		claim *resourceapi.ResourceClaim
		// meanwhile happens between Reserve and PreBind.
		meanwhile  func(h *harness)
		wantWrites []string
		wantUsers  []string
		adopts     bool
	}{
		"finalizer first, then allocation and reservation": {
			claim:      claim("c"),
			wantWrites: []string{"update/ c", "update/status c"},
			wantUsers:  []string{"p"},
		},
		"a finalizer that is there already is not written again": {
			claim:      claim("c", func(c *resourceapi.ResourceClaim) { c.Finalizers = []string{resourceapi.Finalizer} }),
			wantWrites: []string{"update/status c"},
			wantUsers:  []string{"p"},
		},
		"an allocated claim is only reserved": {
			claim:      claim("c", allocated("node-a", "gpu-0"), reservedFor("other")),
			wantWrites: []string{"update/status c"},
			wantUsers:  []string{"other", "p"},
		},
		"the reservation of an allocated and reserved claim is taken over": {
			claim:      claim("c", allocated("node-a", "gpu-0"), reservedFor("p")),
			wantWrites: []string{"update/ c"},
			wantUsers:  []string{"p"},
			adopts:     true,
		},
		"a change in between leads to another try on the present claim": {
			claim: claim("c"),
			meanwhile: func(h *harness) {
				h.api.hold() // the tracker does not know, so the first write is outdated
				h.api.change("c", func(c *resourceapi.ResourceClaim) { c.Labels = map[string]string{"new": "label"} })
			},
			wantWrites: []string{"update/ c", "update/status c"},
			wantUsers:  []string{"p"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{tc.claim}
			h := newHarness(t, w)
			a := h.filterAll(pod("p", "c")).reserve("node-a")
			if tc.meanwhile != nil {
				tc.meanwhile(h)
			}
			before := h.api.get("c")
			if status := a.preBind("node-a"); !status.IsSuccess() {
				t.Fatal(status)
			}
			if diff := cmp.Diff(tc.wantWrites, h.api.written()); diff != "" {
				t.Errorf("writes differ (-want +got):\n%s", diff)
			}
			want, got := before.DeepCopy(), h.api.get("c")
			allocated("node-a", "gpu-0")(want)
			reservedFor("p")(want)
			if tc.adopts {
				want.Annotations = map[string]string{binding.AdoptionKey("p-uid"): binding.Adoption{By: h.plugin.shared.books.FieldManager, At: binding.AdoptionOf(got, "p-uid").At}.String()}
			}
			if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(metav1.ObjectMeta{}, "ResourceVersion", "ManagedFields"),
				cmpopts.IgnoreFields(resourceapi.AllocationResult{}, "AllocationTimestamp"),
				cmpopts.IgnoreFields(resourceapi.ResourceClaimStatus{}, "ReservedFor")); diff != "" {
				t.Errorf("claim differs (-want +got):\n%s", diff)
			}
			if decided := before.Status.Allocation == nil; decided != (got.Status.Allocation.AllocationTimestamp != nil) {
				t.Errorf("allocation decided here: %t, but its time is %v", decided, got.Status.Allocation.AllocationTimestamp)
			}
			if diff := cmp.Diff(tc.wantUsers, usersOf(got)); diff != "" {
				t.Errorf("users differ (-want +got):\n%s", diff)
			}
			// The tracker knows without the watch, and nothing is in flight any more.
			if known, err := h.plugin.binder.Known(h.ctx, got); err != nil || known.ResourceVersion != got.ResourceVersion {
				t.Errorf("the tracker does not know what was written: %v", err)
			}
			if pending, _ := h.plugin.shared.account.Tracker.Pending(got.UID); pending != nil {
				t.Error("the allocation is still in flight")
			}
		})
	}
}

func TestPreBindRefusesAClaimThatHasChanged(t *testing.T) {
	tests := map[string]struct {
		claim     *resourceapi.ResourceClaim
		meanwhile func(h *harness)
		want      string
	}{
		"deleted": {
			claim:     claim("c"),
			meanwhile: func(h *harness) { h.api.delete("c") },
			want:      "was deleted while the pod was scheduled",
		},
		"being deleted": {
			claim:     claim("c"),
			meanwhile: func(h *harness) { h.api.change("c", deleting) },
			want:      "is being deleted",
		},
		"deleted and created again": {
			claim: claim("c"),
			meanwhile: func(h *harness) {
				h.api.delete("c")
				h.api.create(claim("c", func(c *resourceapi.ResourceClaim) { c.UID = "another" }))
			},
			want: "was deleted and created again",
		},
		"allocated by another scheduler": {
			claim:     claim("c"),
			meanwhile: func(h *harness) { h.api.change("c", allocated("node-b", "gpu-1")) },
			want:      "was allocated by somebody else",
		},
		"deallocated": {
			claim: claim("c", allocated("node-a", "gpu-0")),
			meanwhile: func(h *harness) {
				h.api.change("c", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
			},
			want: "lost its allocation",
		},
		"allocated elsewhere": {
			claim:     claim("c", allocated("node-a", "gpu-0")),
			meanwhile: func(h *harness) { h.api.change("c", allocated("node-b", "gpu-1")) },
			want:      "got another allocation",
		},
		"reserved for as many pods as possible": {
			claim: claim("c", allocated("node-a", "gpu-0")),
			meanwhile: func(h *harness) {
				h.api.change("c", func(c *resourceapi.ResourceClaim) {
					for i := range resourceapi.ResourceClaimReservedForMaxSize {
						reservedFor(fmt.Sprintf("pod-%d", i))(c)
					}
				})
			},
			want: "already reserved for 256 pods",
		},
	}
	// Known already when PreBind looks, or found out from the conflict.
	for _, seen := range []bool{true, false} {
		for name, tc := range tests {
			t.Run(fmt.Sprintf("%s, tracker knows %t", name, seen), func(t *testing.T) {
				w := twoNodes()
				w.claims = []*resourceapi.ResourceClaim{tc.claim}
				h := newHarness(t, w)
				a := h.filterAll(pod("p", "c")).reserve("node-a")
				if !seen {
					h.api.hold()
				}
				tc.meanwhile(h)
				if seen {
					h.caughtUp("c")
				}
				status := a.preBind("node-a")
				if !isQuiet(status) || !strings.Contains(status.Message(), "claim team-a/c: ") || !strings.Contains(status.Message(), tc.want) {
					t.Errorf("status %v, want one with %q", status, tc.want)
				}
				a.unreserve("node-a")
				if writes := h.api.written(); len(writes) > 0 {
					t.Errorf("written: %v", writes)
				}
				if pending, _ := h.plugin.shared.account.Tracker.Pending(tc.claim.UID); pending != nil {
					t.Error("the allocation is still in flight")
				}
			})
		}
	}
}

func TestUnreserveAfterPreBind(t *testing.T) {
	tests := map[string]struct {
		claim       *resourceapi.ResourceClaim
		meanwhile   func(h *harness)
		wantDevices []string
		wantUsers   []string
	}{
		"takes back reservation and allocation": {
			claim:     claim("c"),
			wantUsers: []string{},
		},
		"keeps the allocation that another pod uses by now": {
			claim:       claim("c"),
			meanwhile:   func(h *harness) { h.api.change("c", reservedFor("other")) },
			wantDevices: []string{"gpu-0"},
			wantUsers:   []string{"other"},
		},
		"keeps an allocation that was there before": {
			claim:       claim("c", allocated("node-a", "gpu-0")),
			wantDevices: []string{"gpu-0"},
			wantUsers:   []string{},
		},
		"keeps a reservation that was there before": {
			claim:       claim("c", allocated("node-a", "gpu-0"), reservedFor("p")),
			wantDevices: []string{"gpu-0"},
			wantUsers:   []string{"p"},
		},
		"looks again after a conflict": {
			claim: claim("c"),
			meanwhile: func(h *harness) {
				h.api.hold()
				h.api.change("c", func(c *resourceapi.ResourceClaim) { c.Labels = map[string]string{"new": "label"} })
			},
			wantUsers: []string{},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{tc.claim}
			h := newHarness(t, w)
			a := h.filterAll(pod("p", "c"))
			a.bind("node-a")
			if tc.meanwhile != nil {
				tc.meanwhile(h)
			}
			a.unreserve("node-a")
			got := h.api.get("c")
			if diff := cmp.Diff(tc.wantDevices, devicesOf(got)); diff != "" {
				t.Errorf("devices differ (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.wantUsers, usersOf(got)); diff != "" {
				t.Errorf("users differ (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.wantDevices, h.heldOn("node-a")); diff != "" {
				t.Errorf("held devices differ (-want +got):\n%s", diff)
			}
			h.api.written()
			a.unreserve("node-a")
			if writes := h.api.written(); len(writes) > 0 {
				t.Errorf("a second Unreserve wrote %v", writes)
			}
		})
	}
}

// A write that fails on the way back has taken effect. Until that is known, its device must not be free, and
// then it must be taken back.
func TestUncertainWriteKeepsDevicesUntilItIsKnown(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("c")}
	h := newHarness(t, w)
	a := h.filterAll(pod("p", "c")).reserve("node-a")
	h.api.hold() // the watch is not faster than Unreserve
	h.api.afterWrite(func(request string) error {
		if request == "update/status" {
			return errors.New("connection reset by peer")
		}
		return nil
	})
	if status := a.preBind("node-a"); status.Code() != fwk.Error || !strings.Contains(status.Message(), "connection reset") {
		t.Fatalf("PreBind: %v", status)
	}
	h.api.afterWrite(nil)

	reads := 0
	h.api.onRequest(func(request string) error {
		if request == "get/" {
			if reads++; reads == 1 {
				if held := h.heldOn("node-a"); !slices.Equal(held, []string{"gpu-0"}) {
					t.Errorf("held while the outcome is unknown: %v", held)
				}
				return errors.New("no route to host")
			}
		}
		return nil
	})
	a.unreserve("node-a")
	if reads < 2 {
		t.Errorf("the claim was read %d times", reads)
	}
	if got := h.api.get("c"); got.Status.Allocation != nil || len(got.Status.ReservedFor) > 0 {
		t.Errorf("not taken back: %+v", got.Status)
	}
	if held := h.heldOn("node-a"); len(held) > 0 {
		t.Errorf("still held: %v", held)
	}
}

func TestClaimsOfAPodAreWrittenInOneOrder(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("a"), claim("b")}
	h := newHarness(t, w)
	h.filterAll(pod("p", "b", "a")).bind("node-b")
	want := []string{"update/ a", "update/status a", "update/ b", "update/status b"}
	if diff := cmp.Diff(want, h.api.written()); diff != "" {
		t.Errorf("writes differ (-want +got):\n%s", diff)
	}
}

func TestPreBindPreFlight(t *testing.T) {
	w := twoNodes()
	w.claims = []*resourceapi.ResourceClaim{claim("c")}
	h := newHarness(t, w)
	tests := map[string]struct {
		state fwk.CycleState
		want  fwk.Code
	}{
		"a pod with claims is bound alone":      {state: h.filterAll(pod("p", "c")).state, want: fwk.Success},
		"a pod without claims is not held up":   {state: framework.NewCycleState(), want: fwk.Skip},
		"extended resources need no PreBind":    {state: h.filterAll(extendedPod("p", "example.com/gpu")).state, want: fwk.Skip},
		"a pod whose claims are there is bound": {state: h.filterAll(pod("q", "c")).state, want: fwk.Success},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			result, status := h.plugin.PreBindPreFlight(h.ctx, tc.state, pod("p", "c"), "node-a")
			if status.Code() != tc.want || result.AllowParallel {
				t.Errorf("status %v, parallel %t", status, result.AllowParallel)
			}
		})
	}
}

func TestBindingConditions(t *testing.T) {
	conditional := func(d *resourceapi.Device) {
		d.BindingConditions, d.BindingFailureConditions = []string{"Attached"}, []string{"Broken"}
	}
	report := func(condition string) func(h *harness) {
		return func(h *harness) {
			h.api.change("c", func(c *resourceapi.ResourceClaim) {
				c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: testDriver, Pool: "node-a", Device: "gpu-0", Conditions: []metav1.Condition{{
					Type: condition, Status: metav1.ConditionTrue, Reason: "Fabric", Message: "as it is",
				}}}}
			})
		}
	}
	tests := map[string]struct {
		then func(h *harness)
		want string // the event, if the pod may not go on
	}{
		"a device that becomes ready lets the pod go on": {then: report("Attached")},
		"a device that fails": {
			then: report("Broken"),
			want: "Warning DevicesNotReady claim team-a/c: wait for binding conditions: " +
				"device gpu.example.com/node-a/gpu-0: condition Broken: Fabric: as it is",
		},
		"a device that takes too long": {
			then: func(h *harness) { h.plugin.binder.Clock.(*testingclock.FakeClock).Step(h.plugin.binder.Timeout) },
			want: "Warning DevicesNotReady claim team-a/c: wait for binding conditions: " +
				"device gpu.example.com/node-a/gpu-0 not ready within the bindingTimeout of 10m0s after the allocation",
		},
		"a reservation that is lost": {
			then: func(h *harness) {
				h.api.change("c", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
			},
			want: "Normal ClaimChanged claim team-a/c: wait for binding conditions: the reservation was lost",
		},
		"a claim that is deleted": {
			then: func(h *harness) { h.api.delete("c") },
			want: "Normal ClaimChanged claim team-a/c: wait for binding conditions: was deleted while the pod was bound",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.objects = append(w.objects[:1:1], slice("node-a", device("gpu-0", conditional)))
			w.claims = []*resourceapi.ResourceClaim{claim("c")}
			h := newHarness(t, w)
			clock := testingclock.NewFakeClock(time.Now())
			h.plugin.binder.Clock = clock
			a := h.filterAll(pod("p", "c")).reserve("node-a")
			done := make(chan *fwk.Status)
			go func() { done <- a.preBind("node-a") }()
			h.eventually("PreBind waits", clock.HasWaiters)
			tc.then(h)
			status := <-done
			if status.IsSuccess() != (tc.want == "") {
				t.Fatalf("status %v, want %q", status, tc.want)
			}
			if tc.want != "" {
				if event, _ := told(status); event != tc.want || !isQuiet(status) {
					t.Errorf("event %q, want %q, and no error in the log", event, tc.want)
				}
			}
			select {
			case event := <-h.recorder.Events:
				if !strings.Contains(event, "BindingConditionsPending") {
					t.Errorf("event %q", event)
				}
			default:
				t.Error("no event tells what the pod waits for")
			}
		})
	}
}

func TestFailedDevicesAreGivenUp(t *testing.T) {
	failed := func(c *resourceapi.ResourceClaim) {
		allocated("node-a", "gpu-0")(c)
		result := &c.Status.Allocation.Devices.Results[0]
		result.BindingConditions, result.BindingFailureConditions = []string{"Attached"}, []string{"Broken"}
		c.Status.Devices = []resourceapi.AllocatedDeviceStatus{{Driver: testDriver, Pool: "node-a", Device: "gpu-0", Conditions: []metav1.Condition{{
			Type: "Broken", Status: metav1.ConditionTrue,
		}}}}
	}
	late := func(c *resourceapi.ResourceClaim) {
		failed(c)
		c.Status.Devices = nil
		c.Status.Allocation.AllocationTimestamp = &metav1.Time{Time: time.Now().Add(-time.Hour)}
	}
	for name, change := range map[string]func(*resourceapi.ResourceClaim){"a failure condition": failed, "a timeout": late} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			w.claims = []*resourceapi.ResourceClaim{claim("c", change, reservedFor("p"))}
			w.pods = []*v1.Pod{pod("p", "c")}
			h := newHarness(t, w)
			a := h.filterAll(w.pods[0])
			if diff := cmp.Diff(map[string]string{"node-a": refusals.ReasonBinding}, a.filter); diff != "" {
				t.Errorf("reasons differ (-want +got):\n%s", diff)
			}
			a.postFilter()
			if h.api.get("c").Status.Allocation != nil {
				t.Error("the allocation is still there")
			}
		})
	}
}
