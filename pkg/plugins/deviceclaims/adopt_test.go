// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	fwk "k8s.io/kube-scheduler/framework"
	testingclock "k8s.io/utils/clock/testing"

	"stowage.dev/stowage/pkg/plugins/config"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/failures"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podevents"
)

// oneClaim is a pod with a claim, for schedulers with a fence.
func oneClaim() world {
	w := twoNodes()
	w.fence = fenced().fence
	w.claims = []*resourceapi.ResourceClaim{claim("c")}
	w.pods = []*v1.Pod{pod("p", "c")}
	return w
}

// A leader that was frozen after PreBind goes on when another one has taken over, and its binding fails. The pod that the other one binds
// with the reservation keeps it.
func TestAReservationThatAnotherSchedulerUsesIsLeftAlone(t *testing.T) {
	old := newHarness(t, oneClaim())
	frozen := old.filterAll(pod("p", "c")).reserve("node-a")
	if status := frozen.preBind("node-a"); !status.IsSuccess() {
		t.Fatal(status)
	}
	next := startHarness(t, oneClaim(), old.client, old.api)
	a := next.filterAll(pod("p", "c")).reserve("node-a")
	if status := a.preBind("node-a"); !status.IsSuccess() {
		t.Fatal(status)
	}
	frozen.unreserve("node-a")
	old.wantState("c", state{[]string{"gpu-0"}, []string{"p"}})

	// Neither does the other one take back what it did not make. The pod's next attempt uses it, and is the last to have said so.
	a.unreserve("node-a")
	old.wantState("c", state{[]string{"gpu-0"}, []string{"p"}})
	old.caughtUp("c")
	again := old.filterAll(pod("p", "c")).reserve("node-a")
	if status := again.preBind("node-a"); !status.IsSuccess() {
		t.Fatal(status)
	}
	if by := binding.AdoptionOf(old.api.get("c"), "p-uid").By; by != old.plugin.shared.books.FieldManager {
		t.Errorf("adopted by %q, want %q", by, old.plugin.shared.books.FieldManager)
	}
}

// The same goes for the claim that the first one has made for the pod's extended resources, whether or not it has heard that it is used.
func TestAnExtendedClaimThatAnotherSchedulerUsesIsLeftAlone(t *testing.T) {
	for name, hears := range map[string]bool{"heard of": true, "not heard of": false} {
		t.Run(name, func(t *testing.T) {
			p := containersPod("a=1")
			old := newHarness(t, extendedWorld(p))
			frozen := old.filterAll(p)
			frozen.bind("node-a")
			made := old.extendedClaims()[0].Name
			next := startHarness(t, extendedWorld(p), old.client, old.api)
			if !hears {
				old.api.hold()
			}
			next.filterAll(next.stored("p")).bind("node-a")
			if hears {
				old.caughtUp(made)
			}
			frozen.unreserve("node-a")
			claims := old.extendedClaims()
			if len(claims) != 1 || claims[0].Name != made {
				t.Fatalf("claims %v, want %s", claims, made)
			}
			if len(devicesOf(claims[0])) != 1 || !podclaims.IsReservedFor(claims[0], p.UID) {
				t.Errorf("devices %v, users %v", devicesOf(claims[0]), usersOf(claims[0]))
			}
		})
	}
}

// The frozen one is faster: what the other one found is gone, although it has not heard of that.
func TestAReservationThatIsTakenBackCannotBeUsed(t *testing.T) {
	old := newHarness(t, oneClaim())
	frozen := old.filterAll(pod("p", "c")).reserve("node-a")
	if status := frozen.preBind("node-a"); !status.IsSuccess() {
		t.Fatal(status)
	}
	next := startHarness(t, oneClaim(), old.client, old.api)
	a := next.filterAll(pod("p", "c")).reserve("node-a")
	old.api.hold()
	frozen.unreserve("node-a")
	if status := a.preBind("node-a"); status.IsSuccess() || !strings.Contains(status.Message(), "lost its allocation") {
		t.Errorf("PreBind: %v", status)
	}
	old.wantState("c", state{})
}

// At the fence, too, the claim is left to whoever uses it, and passes a fence of its own.
func TestAnAdoptedClaimDoesNotGiveWayForItsFirstScheduler(t *testing.T) {
	h := newHarness(t, fenced())
	h.api.hold()
	h.othersTake("gpu-0")
	a := h.filterAll(pod("p", "mine")).reserve("node-a")
	done := a.preBindAsync()
	h.eventually("the claim is written", func() bool { return h.api.get("mine").Status.Allocation != nil })
	h.api.change("mine", func(c *resourceapi.ResourceClaim) {
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, binding.AdoptionKey("p-uid"), "another")
	})
	h.api.release()
	if status := <-done; !strings.Contains(status.Message(), "was allocated earlier") {
		t.Errorf("PreBind: %v", status)
	}
	a.unreserve("node-a")
	h.wantState("mine", state{[]string{"gpu-0"}, []string{"p"}})
}

// What is noted is true of one reservation, and goes with it.
func TestAdoptionsOfFormerReservationsAreForgotten(t *testing.T) {
	tests := map[string]struct {
		change func(*resourceapi.ResourceClaim)
		want   map[string]string
	}{
		"of the pod, whose claim is free again": {change: func(*resourceapi.ResourceClaim) {}, want: map[string]string{}},
		"of another user that is gone":          {change: reservedFor("p"), want: map[string]string{binding.AdoptionKey("p-uid"): "us"}},
		"not of another user that is there": {
			change: func(c *resourceapi.ResourceClaim) { reservedFor("q")(c) },
			want:   map[string]string{binding.AdoptionKey("q-uid"): "q's"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := oneClaim()
			w.claims[0] = claim("c", allocated("node-a", "gpu-0"), func(c *resourceapi.ResourceClaim) {
				c.Annotations = map[string]string{binding.AdoptionKey("p-uid"): "former", binding.AdoptionKey("q-uid"): "q's", "example.com/other": "stays"}
				tc.change(c)
			})
			h := newHarness(t, w)
			if status := h.filterAll(pod("p", "c")).reserve("node-a").preBind("node-a"); !status.IsSuccess() {
				t.Fatal(status)
			}
			want := map[string]string{"example.com/other": "stays"}
			got := h.api.get("c")
			for key, value := range tc.want {
				if want[key] = value; value == "us" {
					want[key] = binding.Adoption{By: h.plugin.shared.books.FieldManager, At: binding.AdoptionOf(got, "p-uid").At}.String()
				}
			}
			if diff := cmp.Diff(want, got.Annotations); diff != "" {
				t.Errorf("annotations differ (-want +got):\n%s", diff)
			}
			if !podclaims.IsReservedFor(got, types.UID("p-uid")) {
				t.Errorf("reserved for %v", usersOf(got))
			}
			// Once is enough.
			h.caughtUp("c")
			h.api.written()
			if status := h.filterAll(pod("p", "c")).reserve("node-a").preBind("node-a"); !status.IsSuccess() {
				t.Fatal(status)
			}
			if tc.want[binding.AdoptionKey("p-uid")] != "" && len(h.api.written()) > 0 {
				t.Error("what was noted is noted again")
			}
		})
	}
}

// PostFilter leaves alone what another scheduler is about to bind the pod with, until that one must have ended. Its own notes do not
// concern it.
func TestPostFilterTakesNothingThatAnotherSchedulerHasAdopted(t *testing.T) {
	tests := map[string]struct {
		world  func() world
		ours   bool // the note
		passes time.Duration
		want   state
		told   string
	}{
		"the last user's claim": {world: oneClaim, want: state{[]string{"gpu-0"}, []string{"p"}}, told: "is in use by another scheduler"},
		"of the same process":   {world: oneClaim, ours: true, told: "gave up the allocation"},
		"of one that has ended": {world: oneClaim, passes: config.DefaultBindingTimeout + binding.AdoptionRenewal, told: "gave up the allocation"},
		"of one that may still be at it": {
			world: oneClaim, passes: config.DefaultBindingTimeout, want: state{[]string{"gpu-0"}, []string{"p"}}, told: "is in use by another scheduler",
		},
		"a place among others": {
			world: func() world {
				w := oneClaim()
				w.claims[0] = claim("c", allocated("node-a", "gpu-0"), reservedFor("q"))
				return w
			},
			want: state{[]string{"gpu-0"}, []string{"p", "q"}}, told: "is in use by another scheduler",
		},
		"a place among others, ours": {
			world: func() world {
				w := oneClaim()
				w.claims[0] = claim("c", allocated("node-a", "gpu-0"), reservedFor("q"))
				return w
			},
			ours: true, want: state{[]string{"gpu-0"}, []string{"q"}}, told: "gave up the reservation",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			old := newHarness(t, tc.world())
			old.filterAll(pod("p", "c")).bind("node-a")
			next := startHarness(t, tc.world(), old.client, old.api)
			next.filterAll(pod("p", "c")).bind("node-a")
			tries := old
			if tc.ours {
				tries = next
			}
			tries.caughtUp("c")
			noted := binding.AdoptionOf(tries.api.get("c"), "p-uid")
			if noted.By != next.plugin.shared.books.FieldManager {
				t.Fatalf("adopted by %q", noted.By)
			}
			tries.plugin.binder.Clock = testingclock.NewFakeClock(noted.At.Add(tc.passes))
			tries.nodes = tries.nodes[1:] // the claim's own node is full
			if status := tries.filterAll(pod("p", "c")).postFilter(); status.Code() == fwk.Error || !strings.Contains(status.Message(), tc.told) {
				t.Errorf("PostFilter: %v, want %q", status, tc.told)
			}
			tries.wantState("c", tc.want)
		})
	}
}

// A claim for extended resources is left alone in the same way, by PostFilter and by PreBind, which does not need it.
func TestNothingRemovesAnExtendedClaimThatAnotherSchedulerHasAdopted(t *testing.T) {
	p := containersPod("a=1")
	old := newHarness(t, extendedWorld(p))
	old.filterAll(p).bind("node-a")
	made := old.extendedClaims()[0].Name
	next := startHarness(t, extendedWorld(p), old.client, old.api)
	next.filterAll(next.stored("p")).bind("node-a")
	old.caughtUp(made)
	noted := binding.AdoptionOf(old.api.get(made), p.UID)
	clock := testingclock.NewFakeClock(noted.At)
	old.plugin.binder.Clock = clock
	old.nodes = old.nodes[1:]
	for range 2 {
		if status := old.filterAll(old.stored("p")).postFilter(); status.Code() != fwk.UnschedulableAndUnresolvable || !strings.Contains(status.Message(), "is in use by another scheduler") {
			t.Errorf("PostFilter: %v", status)
		}
	}
	if at := old.changesAt(old.stored("p")); !at.Equal(noted.At.Add(config.DefaultBindingTimeout + binding.AdoptionRenewal)) {
		t.Errorf("to be looked at again at %v", at)
	}
	err := old.plugin.extended.Create(old.ctx, old.stored("p"), &extended.Plan{Leftovers: old.extendedClaims()}, &extended.Binding{}, nil)
	if postponed := failures.AsPostponed(err); postponed == nil || postponed.EventType != v1.EventTypeNormal || postponed.Reason != podevents.ReasonLostRace {
		t.Errorf("PreBind: %v", err)
	}
	if claims := old.extendedClaims(); len(claims) != 1 || len(devicesOf(claims[0])) != 1 {
		t.Fatalf("claims: %v", claims)
	}
	clock.Step(config.DefaultBindingTimeout + binding.AdoptionRenewal)
	old.filterAll(old.stored("p")).postFilter()
	if claims := old.extendedClaims(); len(claims) != 0 {
		t.Errorf("claims: %v", claims)
	}
}

// A note is good for the bindings that begin within a minute, then it is made anew, whatever the clock says.
func TestANoteIsRenewed(t *testing.T) {
	for passes, want := range map[time.Duration]bool{-time.Hour: true, 0: false, binding.AdoptionRenewal - 1: false, binding.AdoptionRenewal: true} {
		t.Run(passes.String(), func(t *testing.T) {
			w := oneClaim()
			w.claims[0] = claim("c", allocated("node-a", "gpu-0"), reservedFor("p"))
			h := newHarness(t, w)
			h.filterAll(pod("p", "c")).bind("node-a")
			h.caughtUp("c")
			before := h.api.get("c")
			h.plugin.binder.Clock = testingclock.NewFakeClock(binding.AdoptionOf(before, "p-uid").At.Add(passes))
			h.filterAll(pod("p", "c")).bind("node-a")
			after := h.api.get("c")
			if renewed := after.ResourceVersion != before.ResourceVersion; renewed != want {
				t.Errorf("renewed: %t, want %t", renewed, want)
			}
		})
	}
}
