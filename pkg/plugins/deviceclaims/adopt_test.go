package deviceclaims

import (
	"context"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
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
	if by := old.api.get("c").Annotations[adoptedKey("p-uid")]; by != old.plugin.shared.fieldManager {
		t.Errorf("adopted by %q, want %q", by, old.plugin.shared.fieldManager)
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
			if len(devicesOf(claims[0])) != 1 || !isReservedFor(claims[0], p.UID) {
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
		metav1.SetMetaDataAnnotation(&c.ObjectMeta, adoptedKey("p-uid"), "another")
	})
	h.api.release()
	if status := <-done; !strings.Contains(status.Message(), "was allocated earlier") {
		t.Errorf("PreBind: %v", status)
	}
	h.wantState("mine", state{[]string{"gpu-0"}, []string{"p"}})
}

// What is noted is true of one reservation, and goes with it.
func TestAdoptionsOfFormerReservationsAreForgotten(t *testing.T) {
	tests := map[string]struct {
		change func(*resourceapi.ResourceClaim)
		want   map[string]string
	}{
		"of the pod, whose claim is free again": {change: func(*resourceapi.ResourceClaim) {}, want: map[string]string{}},
		"of another user that is gone":          {change: reservedFor("p"), want: map[string]string{adoptedKey("p-uid"): "us"}},
		"not of another user that is there": {
			change: func(c *resourceapi.ResourceClaim) { reservedFor("q")(c) },
			want:   map[string]string{adoptedKey("q-uid"): "q's"},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			w := oneClaim()
			w.claims[0] = claim("c", allocated("node-a", "gpu-0"), func(c *resourceapi.ResourceClaim) {
				c.Annotations = map[string]string{adoptedKey("p-uid"): "former", adoptedKey("q-uid"): "q's", "example.com/other": "stays"}
				tc.change(c)
			})
			h := newHarness(t, w)
			if status := h.filterAll(pod("p", "c")).reserve("node-a").preBind("node-a"); !status.IsSuccess() {
				t.Fatal(status)
			}
			want := map[string]string{"example.com/other": "stays"}
			for key, value := range tc.want {
				if want[key] = value; value == "us" {
					want[key] = h.plugin.shared.fieldManager
				}
			}
			got := h.api.get("c")
			if diff := cmp.Diff(want, got.Annotations); diff != "" {
				t.Errorf("annotations differ (-want +got):\n%s", diff)
			}
			if !isReservedFor(got, types.UID("p-uid")) {
				t.Errorf("reserved for %v", usersOf(got))
			}
			// Once is enough.
			h.caughtUp("c")
			h.api.written()
			if status := h.filterAll(pod("p", "c")).reserve("node-a").preBind("node-a"); !status.IsSuccess() {
				t.Fatal(status)
			}
			if tc.want[adoptedKey("p-uid")] != "" && len(h.api.written()) > 0 {
				t.Error("what was noted is noted again")
			}
		})
	}
}

// The pods of a group use its reservation, which none of them has to take over.
func TestTheReservationOfAGroupIsNotAdopted(t *testing.T) {
	h := newHarness(t, oneClaim())
	c := claim("c", allocated("node-a", "gpu-0"), reservedFor("g"))
	h.api.change("c", func(into *resourceapi.ResourceClaim) { into.Status = c.Status })
	w := &claimWrite{planned: h.api.get("c"), user: resourceapi.ResourceClaimConsumerReference{APIGroup: "scheduling.k8s.io", Resource: "podgroups", Name: "g", UID: "g-uid"}}
	h.api.written()
	if err := h.plugin.writeBinding(context.Background(), w, h.api.get("c")); err != nil {
		t.Fatal(err)
	}
	if writes := h.api.written(); len(writes) > 0 || w.written == nil {
		t.Errorf("wrote %v", writes)
	}
}
