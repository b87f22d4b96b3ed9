// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package deviceclaims

import (
	"context"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/types"
	fwk "k8s.io/kube-scheduler/framework"
	testingclock "k8s.io/utils/clock/testing"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// The scheduler ends while the binding of a pod is under way: the claim for the pod's extended resources stays, as all its claims do.
func TestShutdownKeepsTheExtendedClaimOfAPodThatMayBeBound(t *testing.T) {
	p := containersPod("a=1")
	h := newHarness(t, extendedWorld(p))
	h.plugin.binder.Grace = patience
	a := h.filterAll(p)
	a.bind("node-a")
	h.cancel()
	a.unreserve("node-a")
	claims := h.extendedClaims()
	if len(claims) != 1 || len(devicesOf(claims[0])) != 1 || !podclaims.IsReservedFor(claims[0], p.UID) {
		t.Errorf("claims %v, want the one of the pod, allocated and reserved", claims)
	}
}

// A deallocation times out, and the pod fits after all in its next attempt. What it is bound with must not be taken back afterwards,
// also where the pod had adopted its reservation before, or its group's.
func TestALateDeallocationDoesNotTakeAClaimFromItsPod(t *testing.T) {
	withGroups(t)
	for name, tc := range map[string]struct{ noted, ofGroup, restart bool }{
		"adopted before":              {noted: true},
		"not adopted":                 {},
		"the group's, adopted before": {ofGroup: true, noted: true},
		"the group's":                 {ofGroup: true},
		"the group's, which the next scheduler uses":                 {ofGroup: true, restart: true},
		"the group's, adopted before, which the next scheduler uses": {ofGroup: true, noted: true, restart: true},
	} {
		t.Run(name, func(t *testing.T) {
			w := twoNodes()
			user, reserved := "p", reservedFor("p")
			w.pods = []*v1.Pod{pod("p", "c")}
			if tc.ofGroup {
				user, reserved = "g", forGroup
				w.groups, w.pods = []*schedulingapi.PodGroup{group("c")}, []*v1.Pod{member(pod("p", "c"))}
			}
			w.claims = []*resourceapi.ResourceClaim{claim("c", allocated("node-a", "gpu-0"), reserved)}
			h := newHarness(t, w)
			if tc.noted {
				h.filterAll(w.pods[0]).bind("node-a")
				h.caughtUp("c")
			}
			h.statusWrites(errLate)
			known := h.api.get("c")
			if err := h.plugin.binder.GiveUp(context.Background(), w.pods[0], &binding.GivenUp{Claim: known}); err == nil {
				t.Fatal("the deallocation was answered")
			}
			h.api.onRequest(nil)
			binds := h
			if tc.restart {
				binds = startHarness(t, w, h.client, h.api)
			}
			binds.filterAll(w.pods[0]).bind("node-a")
			h.api.land()
			h.wantState("c", state{[]string{"gpu-0"}, []string{user}})
			if by := binding.AdoptionOf(h.api.get("c"), types.UID(user+"-uid")).By; by != binds.plugin.shared.books.FieldManager {
				t.Errorf("adopted by %q", by)
			}
		})
	}
}

// The withdrawal at the fence had no answer until it was given up, and then the claim that was earlier is gone. The pod relies on the note
// that it has made before. What it is bound with must not be taken back afterwards.
func TestALateWithdrawalDoesNotTakeAClaimFromItsPod(t *testing.T) {
	w := fenced()
	w.pods = w.pods[:1]
	p := w.pods[0]
	w.claims[0] = claim("mine", allocated("node-a", "gpu-0"), reservedFor("p"))
	w.claims[1] = claim("other", allocated("node-a", "gpu-0"), reservedFor("somebody"))
	h := newHarness(t, w)
	clock := testingclock.NewFakeClock(time.Now())
	h.plugin.binder.Clock = clock
	h.statusWrites(errLate)
	refuse := h.api.fault
	h.api.onRequest(func(request string) error {
		err := refuse(request)
		if err != nil {
			clock.Step(binding.UndoTimeout + 1)
		}
		return err
	})
	a := h.filterAll(p).reserve("node-a")
	if status := a.preBind("node-a"); !strings.Contains(status.Message(), "allocated earlier") {
		t.Fatalf("PreBind: %v", status)
	}
	a.unreserve("node-a")
	h.api.onRequest(nil)
	h.api.change("other", func(c *resourceapi.ResourceClaim) { c.Status = resourceapi.ResourceClaimStatus{} })
	h.caughtUp("other")
	h.caughtUp("mine")
	h.filterAll(p).bind("node-a")
	h.api.land()
	h.wantState("mine", state{[]string{"gpu-0"}, []string{"p"}})
}

// No node fitted with a claim for extended resources that a scheduler before had made and this one uses. Giving it up had no answer, and now one fits.
func TestALateRemovalDoesNotTakeAnExtendedClaimFromItsPod(t *testing.T) {
	p := containersPod("a=2")
	w := extendedWorld(p)
	w.claims = []*resourceapi.ResourceClaim{leftover(p)}
	h := newHarness(t, w)
	h.filterAll(p).bind("node-b")
	name := w.claims[0].Name
	h.caughtUp(name)
	h.statusWrites(errLate)
	p = h.stored("p")
	nodes := h.nodes
	h.nodes = nodes[:1] // its own is full
	if status := h.filterAll(p).postFilter(); status.Code() != fwk.Error {
		t.Fatalf("PostFilter: %v", status)
	}
	h.api.onRequest(nil)
	h.nodes = nodes
	h.filterAll(p).bind("node-b")
	h.api.land()
	h.wantState(name, state{[]string{"gpu-0", "gpu-1"}, []string{"p"}})
}
