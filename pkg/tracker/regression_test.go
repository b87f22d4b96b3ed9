// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"errors"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
)

// The tests of this file replay what has gone wrong in kube-scheduler's own claim
// tracker. The numbers are kubernetes/kubernetes issues and pull requests. What
// went wrong between the tracker and the plugin's extension points is replayed in
// pkg/plugins/deviceclaims, too (#139418, #140053).

// Holders were kept as a set of device IDs: with two claims on one device, the
// first to go took the entry of both along.
func TestUpstreamSetMembershipFreesADeviceThatAnotherClaimHolds(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5, gpu0))
	must(t, tr.Store().Add(claim("b", "ub", 11, gpu0))) // another scheduler's doing
	must(t, tr.Store().Delete(claim("b", "ub", 12, gpu0)))
	wantHeld(t, tr, "the second holder has gone", holders{gpu0: {"ua"}})
}

// An informer delivers a relist as updates. One that replaced an allocation by
// another was taken for no change, because allocations are immutable: the device
// before stayed held for ever, the device after was free.
func TestUpstreamRelistSwapsOneAllocationForAnother(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5, gpu0))
	// Deallocated at 11 and allocated again at 12, while the watch was down.
	relist(t, tr, 20, claim("a", "ua", 12, gpu1))
	wantHeld(t, tr, "relisted", holders{gpu1: {"ua"}})
	must(t, tr.Store().Update(claim("a", "ua", 21)))
	wantHeld(t, tr, "deallocated", nil)
}

// #136269: usage was put together from an index of allocated claims and a map of
// claims in flight under separate locks. A claim that moved from the one to the
// other in between was in neither.
func TestUpstreamClaimMovesFromInFlightToAllocatedWithoutAGap(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5))
	reserve(t, tr, podA, claim("a", "ua", 5), gpu0)
	before := tr.Snapshot()
	must(t, tr.Assume(claim("a", "ua", 11, gpu0)))
	between := tr.Snapshot()
	tr.Release("ua", podA)
	for name, s := range map[string]Snapshot{"before": before, "between": between, "after": tr.Snapshot()} {
		if s.Usage.Device(gpu0).Count() != 1 {
			t.Errorf("%s the move the device has holders %v", name, s.Usage.Device(gpu0).Holders())
		}
	}
}

// #136269: event handlers lag behind the store of an informer. A pod in flight
// was dropped as soon as the store had its claim, and the index did not have it
// yet. Here the answer to the write, the release and the echo come in any order.
func TestUpstreamEchoComesAfterTheReleaseOfTheAllocationInFlight(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5))
	reserve(t, tr, podA, claim("a", "ua", 5), gpu0)
	must(t, tr.Assume(claim("a", "ua", 12, gpu0)))
	tr.Release("ua", podA)
	must(t, tr.Store().Update(claim("a", "ua", 11))) // our finalizer, only now
	wantHeld(t, tr, "the echo of an earlier write", holders{gpu0: {"ua"}})

	err := tr.Reserve(tr.Snapshot().Usage, podB, []Reservation{{Claim: claim("a", "ua", 11), Allocation: allocation(gpu1)}})
	if !errors.Is(err, ErrClaimAllocated) {
		t.Errorf("Reserve() on the object of the late echo = %v", err)
	}
}

// #140263: a pod that shares a claim put it in flight when it was allocated
// already. Its release restored the watched object, which an assume cache does
// not have if it swallowed the echo: the claim lost its allocation for good.
func TestUpstreamReleaseAfterASwallowedEchoKeepsTheAllocation(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5))
	reserve(t, tr, podA, claim("a", "ua", 5), gpu0)
	tr.Share("ua", podB)
	allocated := claim("a", "ua", 12, gpu0)
	must(t, tr.Assume(allocated))
	must(t, tr.Store().Update(claim("a", "ua", 12, gpu0))) // the echo tells nothing new
	tr.Release("ua", podA)
	tr.Release("ua", podB) // goes elsewhere
	if got, err := tr.Get("default", "a"); err != nil || got != allocated {
		t.Errorf("Get() = %v, %v", got, err)
	}
	wantHeld(t, tr, "released by both", holders{gpu0: {"ua"}})

	err := tr.Reserve(tr.Snapshot().Usage, podB, []Reservation{{Claim: claim("a", "ua", 5), Allocation: allocation(gpu1)}})
	if !errors.Is(err, ErrClaimAllocated) {
		t.Errorf("Reserve() of an allocated claim = %v", err)
	}
}

// #137897: the number of pods that share an allocation in flight and the
// allocation itself were under different locks. The release by one pod, between
// the two, removed what another had just joined.
func TestUpstreamSharerJoinsWhileAnotherReleases(t *testing.T) {
	for range 1000 {
		tr := quiet()
		relist(t, tr, 10, claim("a", "ua", 5))
		must(t, tr.Reserve(tr.Snapshot().Usage, podA, []Reservation{{Claim: claim("a", "ua", 5), Allocation: allocation(gpu0)}}))
		done := make(chan bool)
		go func() { done <- tr.Release("ua", podA) }()
		_, joined := tr.Share("ua", podB)
		if last := <-done; last == joined {
			t.Fatalf("joined: %t, though the release was the last: %t", joined, last)
		}
		if isHeld := tr.Snapshot().Usage.Device(gpu0) != nil; isHeld != joined {
			t.Fatalf("joined: %t, but held: %t", joined, isHeld)
		}
	}
}

// #139418: a pod whose PreBind failed was counted out of an allocation in flight
// twice, in PreBind and in Unreserve. With that the allocation was dropped although
// another pod shared it, which then found it "allocated elsewhere".
func TestUpstreamOnePodReleasesTwiceAndTheOtherKeepsItsShare(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5))
	reserve(t, tr, podA, claim("a", "ua", 5), gpu0)
	chosen, ok := tr.Share("ua", podB)
	if !ok {
		t.Fatal("nothing to share")
	}
	for range 2 {
		if tr.Release("ua", podA) {
			t.Fatal("a release by one pod was taken for the last one")
		}
		wantHeld(t, tr, "released by the pod that failed", holders{gpu0: {"ua*"}})
	}
	if got, sharers := tr.Pending("ua"); got != chosen || sharers != 1 {
		t.Errorf("Pending() = %v, %d; want what the other pod shares", got, sharers)
	}
	must(t, tr.Assume(claim("a", "ua", 12, gpu0))) // the other pod's write
	tr.Release("ua", podB)
	wantHeld(t, tr, "written by the other pod", holders{gpu0: {"ua"}})
}

// #140053: two pods that share a claim both decided on it while it was not
// allocated. The write of the first was a conflict to the second, for good. Here the
// second either shares what is in flight, and finds just that written, or is refused
// before anything is in flight for it.
func TestUpstreamSecondPodOfAClaimThatTheFirstOneAllocates(t *testing.T) {
	t.Run("while it is in flight", func(t *testing.T) {
		tr := listed(t, 10, claim("a", "ua", 5))
		decided := tr.Snapshot().Usage // by both
		must(t, tr.Reserve(decided, podA, []Reservation{{Claim: claim("a", "ua", 5), Allocation: allocation(gpu0)}}))
		err := tr.Reserve(decided, podB, []Reservation{{Claim: claim("a", "ua", 5), Allocation: allocation(gpu2)}})
		if !errors.Is(err, ErrClaimInFlight) {
			t.Fatalf("Reserve() of what is in flight = %v", err)
		}
		chosen, ok := tr.Share("ua", podB)
		if !ok {
			t.Fatal("nothing to share")
		}
		must(t, tr.Assume(claim("a", "ua", 12, gpu0)))
		tr.Release("ua", podA)
		if got, err := tr.Get("default", "a"); err != nil || !sameDevices(got.Status.Allocation, chosen) {
			t.Errorf("Get() = %v, %v; want the devices that the second pod shares", got, err)
		}
		if !tr.Release("ua", podB) {
			t.Error("the second pod's release was not the last")
		}
		wantHeld(t, tr, "both have let go", holders{gpu0: {"ua"}})
	})
	t.Run("when it is written", func(t *testing.T) {
		tr := listed(t, 10, claim("a", "ua", 5))
		decided := tr.Snapshot().Usage
		must(t, tr.Reserve(decided, podA, []Reservation{{Claim: claim("a", "ua", 5), Allocation: allocation(gpu0)}}))
		must(t, tr.Assume(claim("a", "ua", 12, gpu0)))
		tr.Release("ua", podA)
		err := tr.Reserve(decided, podB, []Reservation{{Claim: claim("a", "ua", 5), Allocation: allocation(gpu2)}})
		if !errors.Is(err, ErrClaimAllocated) {
			t.Errorf("Reserve() of what is allocated = %v", err)
		}
		if got, sharers := tr.Pending("ua"); got != nil || sharers != 0 {
			t.Errorf("Pending() = %v, %d", got, sharers)
		}
		wantHeld(t, tr, "the second pod was refused", holders{gpu0: {"ua"}})
	})
}

// A relist is delivered by an informer as single deletions and updates: in
// between, devices seem to be free, or held twice.
func TestUpstreamRelistIsOneChange(t *testing.T) {
	for name, after := range map[string][]*resourceapi.ResourceClaim{
		"a device's holder has gone, another has it": {claim("b", "ub", 6, gpu1), claim("c", "uc", 15, gpu0)},
		"the claims have swapped their devices":      {claim("a", "ua", 15, gpu1), claim("b", "ub", 16, gpu0)},
	} {
		t.Run(name, func(t *testing.T) {
			for range 20 {
				tr := listed(t, 10, claim("a", "ua", 5, gpu0), claim("b", "ub", 6, gpu1))
				var between Snapshot
				handOver(tr, func() { relist(t, tr, 20, after...) }, func() { between = tr.Snapshot() })
				if first, second := between.Usage.Device(gpu0).Count(), between.Usage.Device(gpu1).Count(); first != 1 || second != 1 {
					t.Fatalf("a snapshot shows a part of a relist: the devices have %d and %d holders", first, second)
				}
			}
		})
	}
}
