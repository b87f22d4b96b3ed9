// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

func ownedBy(c *resourceapi.ResourceClaim, pod types.UID) *resourceapi.ResourceClaim {
	c.OwnerReferences = []metav1.OwnerReference{
		{APIVersion: "v1", Kind: "Node", Name: "bystander", UID: "bystander"},
		{APIVersion: "v1", Kind: "Pod", Name: string(pod), UID: pod, Controller: ptr.To(true)},
	}
	return c
}

// unbornClaim is a claim that is not in the API yet.
func unbornClaim(uid types.UID) *resourceapi.ResourceClaim {
	c := claim("<extended-resources>", uid, 0)
	c.ResourceVersion = ""
	return c
}

// The claims of a pod are found by its UID, whichever way they came and went.
func TestOwnedBy(t *testing.T) {
	tr := listed(t, 10, claim("free", "uf", 4), ownedBy(claim("b", "ub", 5), podA), ownedBy(claim("other", "uo", 6), podB))
	want := func(step string, pod types.UID, uids ...types.UID) {
		t.Helper()
		var got []types.UID
		for _, c := range tr.OwnedBy("default", pod) {
			got = append(got, c.UID)
		}
		if diff := cmp.Diff(uids, got); diff != "" {
			t.Errorf("%s: claims of %s (-want +got):\n%s", step, pod, diff)
		}
	}
	want("listed", podA, "ub")
	want("listed", "bystander")
	want("listed", "")
	for i, owner := range []metav1.OwnerReference{
		{APIVersion: "batch/v1", Kind: "Job", UID: podA, Controller: ptr.To(true)},
		{APIVersion: "v1", Kind: "Node", UID: podA, Controller: ptr.To(true)},
		{APIVersion: "example.com/v1", Kind: "Pod", UID: podA, Controller: ptr.To(true)},
	} {
		other := claim(fmt.Sprint("other-", i), types.UID(fmt.Sprint("other-", i)), 11+i)
		other.OwnerReferences = []metav1.OwnerReference{owner}
		must(t, tr.Store().Update(other))
		if tr.claims.byUID[other.UID] != other {
			t.Fatalf("%s is not known", other.Name)
		}
		want(fmt.Sprintf("owned by a %s %s", owner.APIVersion, owner.Kind), podA, "ub")
	}
	foreign := ownedBy(claim("foreign", "foreign", 14), podA)
	foreign.Namespace = "another"
	must(t, tr.Store().Add(foreign))
	want("named as the owner by a claim of another namespace", podA, "ub")
	tr = listed(t, 10, claim("free", "uf", 4), ownedBy(claim("b", "ub", 5), podA), ownedBy(claim("other", "uo", 6), podB))

	must(t, tr.Assume(ownedBy(claim("a", "ua", 11), podA)))
	want("our own write, before the watch brings it", podA, "ua", "ub")
	must(t, tr.Store().Add(ownedBy(claim("a", "ua", 11), podA)))
	must(t, tr.Store().Update(ownedBy(claim("a", "ua", 12, gpu0), podA)))
	want("changed", podA, "ua", "ub")
	if got := tr.OwnedBy("default", podA)[0]; got.ResourceVersion != "12" {
		t.Errorf("the object has version %s, want the newest, 12", got.ResourceVersion)
	}

	must(t, tr.Store().Update(claim("b", "ub", 13)))
	want("disowned", podA, "ua")
	must(t, tr.Store().Add(ownedBy(claim("a", "ua2", 14), podB)))
	want("replaced by another claim of the name", podA)
	want("replaced by another claim of the name", podB, "ua2", "uo")
	must(t, tr.Store().Delete(ownedBy(claim("a", "ua2", 15), podB)))
	want("deleted", podB, "uo")
	relist(t, tr, 20)
	want("gone from the list", podB)
	if n := len(tr.claims.byOwner); n != 0 {
		t.Errorf("the index of owners has %d entries left", n)
	}
}

// I2 for a claim that is made after its devices were chosen: they are never free.
func TestMoveToTheClaimThatWasCreated(t *testing.T) {
	tr := listed(t, 10)
	unborn := unbornClaim("temporary")
	must(t, tr.Reserve(tr.Snapshot().Usage, podA, []Reservation{{Claim: unborn, Allocation: allocation(gpu0)}}))
	wantHeld(t, tr, "unborn", holders{gpu0: {"temporary*"}})
	var claimErr *ClaimError
	if err := tr.Reserve(tr.Snapshot().Usage, podB, []Reservation{{Claim: unborn, Allocation: allocation(gpu1)}}); !errors.As(err, &claimErr) || !errors.Is(err, ErrClaimInFlight) {
		t.Errorf("the same UID twice: got %v, want %v", err, ErrClaimInFlight)
	}
	var held *HeldError
	if err := tr.Reserve(tr.Snapshot().Usage, podB, []Reservation{{Claim: unbornClaim("second"), Allocation: allocation(gpu0)}}); !errors.As(err, &held) {
		t.Errorf("a held device for an unborn claim: got %v, want a HeldError", err)
	}

	created := claim("real", "ur", 11)
	must(t, tr.Assume(created))
	revision := tr.Snapshot().Revision
	tr.Subscribe(func(Event) {})
	must(t, tr.Move("temporary", created))
	wantHeld(t, tr, "created", holders{gpu0: {"ur*"}})
	pending, _ := tr.takeEvents()
	if len(pending) != 1 || pending[0].Kind != AllocationMoved || pending[0].Claim.UID != "temporary" || len(pending[0].Freed) > 0 {
		t.Errorf("events %+v, want one that the allocation has left the unborn claim and no device is free", pending)
	}
	if after := tr.Snapshot().Revision; after <= revision {
		t.Errorf("revision %d after the move, was %d", after, revision)
	}
	if err := tr.Move("temporary", created); !errors.Is(err, ErrClaimGone) {
		t.Errorf("moved twice: got %v, want %v", err, ErrClaimGone)
	}

	must(t, tr.Assume(claim("real", "ur", 12, gpu0)))
	if !tr.Release("ur", podA) {
		t.Error("the pod lost its interest in the allocation")
	}
	wantHeld(t, tr, "written", holders{gpu0: {"ur"}})
}

// The allocation goes with the claim that it was given to.
func TestMovedAllocationIsReleased(t *testing.T) {
	tr := listed(t, 10, claim("real", "ur", 5))
	must(t, tr.Reserve(tr.Snapshot().Usage, podA, []Reservation{{Claim: unbornClaim("temporary"), Allocation: allocation(gpu0)}}))
	must(t, tr.Move("temporary", claim("real", "ur", 5)))
	if got := tr.InFlightFor(podA); len(got) != 1 || got[0].UID != "ur" || got[0].Name != "real" {
		t.Errorf("in flight for the pod: %v", got)
	}
	if !tr.Release("ur", podA) {
		t.Error("the release was not the last")
	}
	wantHeld(t, tr, "released without a write", nil)
}

// A claim that was created cannot have two allocations in flight.
func TestMoveOntoAClaimWithAnAllocationInFlight(t *testing.T) {
	tr := listed(t, 10, claim("real", "ur", 5))
	reserve(t, tr, podB, claim("real", "ur", 5), gpu1)
	must(t, tr.Reserve(tr.Snapshot().Usage, podA, []Reservation{{Claim: unbornClaim("temporary"), Allocation: allocation(gpu0)}}))
	if err := tr.Move("temporary", claim("real", "ur", 5)); !errors.Is(err, ErrClaimInFlight) {
		t.Errorf("got %v, want %v", err, ErrClaimInFlight)
	}
	wantHeld(t, tr, "refused", holders{gpu0: {"temporary*"}, gpu1: {"ur*"}})
}
