// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"errors"
	"fmt"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/usage"
)

type holders = map[usage.DeviceID][]string

// I1. wantHeld, which all tests here use after every step, recomputes the usage
// from scratch. Here are the changes in which the two layers disagree;
// TestModel goes through arbitrary ones.
func TestI1UsageIsTheFoldOfBothLayers(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5), claim("b", "ub", 6, gpu1))
	wantHeld(t, tr, "listed", holders{gpu1: {"ub"}})
	reserve(t, tr, podA, claim("a", "ua", 5), gpu0)
	wantHeld(t, tr, "reserved", holders{gpu0: {"ua*"}, gpu1: {"ub"}})

	must(t, tr.Store().Update(claim("a", "ua", 11, gpu2)))
	wantHeld(t, tr, "allocated by somebody else meanwhile: both are held", holders{gpu0: {"ua*"}, gpu1: {"ub"}, gpu2: {"ua"}})
	must(t, tr.Store().Update(claim("a", "ua", 12, gpu0)))
	wantHeld(t, tr, "what is in flight is what the API has", holders{gpu0: {"ua"}, gpu1: {"ub"}})
	must(t, tr.Store().Update(claim("a", "ua", 13)))
	wantHeld(t, tr, "deallocated, but still in flight", holders{gpu0: {"ua*"}, gpu1: {"ub"}})
	must(t, tr.Store().Delete(claim("a", "ua", 14)))
	wantHeld(t, tr, "deleted, but still in flight", holders{gpu0: {"ua*"}, gpu1: {"ub"}})
	tr.Release("ua", podA)
	wantHeld(t, tr, "released", holders{gpu1: {"ub"}})
}

// I1 for names: devices are apart by driver and pool, and shares by device, whatever they are called. One that goes frees its own.
func TestI1WhatIsCalledAlikeIsApart(t *testing.T) {
	elsewhere := device("node-b", gpu0.Device)
	theirs := usage.DeviceID{Driver: "another.example.com", Pool: gpu0.Pool, Device: gpu0.Device}
	with := func(c *resourceapi.ResourceClaim, a *resourceapi.AllocationResult) *resourceapi.ResourceClaim {
		c.Status.Allocation = a
		return c
	}
	tr := listed(t, 10,
		with(claim("a", "ua", 5), shared(gpu0, "s")), with(claim("b", "ub", 6), shared(elsewhere, "s")), with(claim("c", "uc", 7), shared(theirs, "s")))
	wantHeld(t, tr, "three", holders{gpu0: {"ua/s"}, elsewhere: {"ub/s"}, theirs: {"uc/s"}})
	must(t, tr.Store().Delete(claim("a", "ua", 11)))
	wantHeld(t, tr, "two", holders{elsewhere: {"ub/s"}, theirs: {"uc/s"}})
}

// I1 for shares: each is a hold of its own, with what it takes, and a claim may
// have several on one device.
func TestI1UsageHasEverySharesCapacity(t *testing.T) {
	take := func(share types.UID, memory string) *resourceapi.AllocationResult {
		a := shared(gpu0, share)
		a.Devices.Results[0].ConsumedCapacity = map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(memory)}
		return a
	}
	twice := take("s1", "10Gi")
	twice.Devices.Results = append(twice.Devices.Results, take("s2", "20Gi").Devices.Results...)
	allocated := func(c *resourceapi.ResourceClaim, a *resourceapi.AllocationResult) *resourceapi.ResourceClaim {
		c.Status.Allocation = a
		return c
	}

	tr := listed(t, 10, allocated(claim("a", "ua", 5), twice), claim("b", "ub", 6))
	wantHeld(t, tr, "listed", holders{gpu0: {"ua/s1{memory=10Gi}", "ua/s2{memory=20Gi}"}})
	must(t, tr.Reserve(tr.Snapshot().Usage, podA, []Reservation{{Claim: claim("b", "ub", 6), Allocation: take("s3", "5Gi")}}))
	wantHeld(t, tr, "reserved", holders{gpu0: {"ua/s1{memory=10Gi}", "ua/s2{memory=20Gi}", "ub*/s3{memory=5Gi}"}})
	must(t, tr.Assume(allocated(claim("b", "ub", 11), take("s3", "6Gi"))))
	wantHeld(t, tr, "written with another amount: both count", holders{gpu0: {"ua/s1{memory=10Gi}", "ua/s2{memory=20Gi}", "ub*/s3{memory=5Gi}", "ub/s3{memory=6Gi}"}})
	tr.Release("ub", podA)
	must(t, tr.Store().Update(allocated(claim("a", "ua", 12), take("s2", "20Gi"))))
	wantHeld(t, tr, "one share less", holders{gpu0: {"ua/s2{memory=20Gi}", "ub/s3{memory=6Gi}"}})
	must(t, tr.Store().Delete(claim("a", "ua", 13)))
	wantHeld(t, tr, "deleted", holders{gpu0: {"ub/s3{memory=6Gi}"}})
}

// I2. Whatever the order of the write's answer, its echo and other events, the
// device stays held from Reserve on.
func TestI2DeviceIsNeverFreeFromReserveToEcho(t *testing.T) {
	const reserved = 10
	finalizer, allocated := claim("a", "ua", 11), claim("a", "ua", 12, gpu0)
	status := claim("a", "ua", 13, gpu0)

	type step struct {
		name string
		do   func(*Tracker) error
	}
	echo := func(c *resourceapi.ResourceClaim) step {
		return step{"echo " + c.ResourceVersion, func(tr *Tracker) error { return tr.Store().Update(c) }}
	}
	answer := func(c *resourceapi.ResourceClaim) step {
		return step{"answer " + c.ResourceVersion, func(tr *Tracker) error { return tr.Assume(c) }}
	}
	release := step{"release", func(tr *Tracker) error { tr.Release("ua", podA); return nil }}
	list := func(revision int, c *resourceapi.ResourceClaim) step {
		return step{"list at " + strconv.Itoa(revision), func(tr *Tracker) error {
			return tr.Store().Replace([]any{c}, strconv.Itoa(revision))
		}}
	}

	for name, steps := range map[string][]step{
		"answers before echoes":              {answer(finalizer), answer(allocated), release, echo(finalizer), echo(allocated)},
		"echoes before answers":              {echo(finalizer), answer(finalizer), echo(allocated), answer(allocated), release},
		"echo of the first after the second": {answer(finalizer), answer(allocated), echo(finalizer), release, echo(allocated)},
		"echoes after the release":           {answer(finalizer), answer(allocated), release, echo(finalizer), echo(allocated), echo(status)},
		"answer after a later echo":          {echo(finalizer), echo(status), answer(allocated), release},
		"answers in the wrong order":         {answer(allocated), answer(finalizer), release},
		"list older than the answer":         {answer(allocated), release, list(11, finalizer), echo(allocated)},
		"list older than the answer, twice":  {answer(allocated), list(11, finalizer), release, list(11, finalizer)},
		"list with the answer":               {answer(finalizer), list(12, allocated), answer(allocated), release},
		"list before the release":            {answer(allocated), list(14, status), release},
	} {
		t.Run(name, func(t *testing.T) {
			tr := listed(t, reserved, claim("a", "ua", 5))
			reserve(t, tr, podA, claim("a", "ua", 5), gpu0)
			for _, step := range steps {
				must(t, step.do(tr))
				if tr.Snapshot().Usage.Device(gpu0) == nil {
					t.Fatalf("%s is free after: %s", gpu0, step.name)
				}
			}
			wantHeld(t, tr, "in the end", holders{gpu0: {"ua"}})
		})
	}
}

// I2 for a claim that several pods share: the device stays held until the last
// of them has released it.
func TestI2DeviceIsHeldUntilTheLastSharerReleases(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5))
	reserve(t, tr, podA, claim("a", "ua", 5), gpu0)
	for range 2 { // twice is once
		if got, ok := tr.Share("ua", podB); !ok || got.Devices.Results[0].Device != gpu0.Device {
			t.Fatalf("Share() = %v, %t", got, ok)
		}
	}
	if _, sharers := tr.Pending("ua"); sharers != 2 {
		t.Errorf("sharers = %d, want 2", sharers)
	}
	if tr.Release("ua", podA) {
		t.Error("the first release was taken for the last")
	}
	if tr.Release("ua", podA) {
		t.Error("a second release by one pod was taken for that of the other")
	}
	wantHeld(t, tr, "one sharer left", holders{gpu0: {"ua*"}})
	if !tr.Release("ua", podB) {
		t.Error("the last release was not taken for the last")
	}
	wantHeld(t, tr, "no sharer left", nil)
	if _, ok := tr.Share("ua", podB); ok {
		t.Error("shared what is not in flight")
	}
	if tr.Release("ua", podB) {
		t.Error("released what is not in flight")
	}
}

// I3.
func TestI3OfTwoHoldersOneGoesAndTheDeviceIsStillHeld(t *testing.T) {
	for name, goes := range map[string]func(*Tracker) error{
		"deleted":     func(tr *Tracker) error { return tr.Store().Delete(claim("a", "ua", 11, gpu0)) },
		"deallocated": func(tr *Tracker) error { return tr.Store().Update(claim("a", "ua", 11)) },
		"not listed":  func(tr *Tracker) error { return tr.Store().Replace([]any{claim("b", "ub", 6, gpu0)}, "11") },
	} {
		t.Run(name, func(t *testing.T) {
			tr := listed(t, 10, claim("a", "ua", 5, gpu0), claim("b", "ub", 6, gpu0))
			wantHeld(t, tr, "two holders", holders{gpu0: {"ua", "ub"}})
			must(t, goes(tr))
			wantHeld(t, tr, "one holder", holders{gpu0: {"ub"}})
			must(t, tr.Store().Delete(claim("b", "ub", 12, gpu0)))
			wantHeld(t, tr, "no holder", nil)
		})
	}
}

// I4, first half.
func TestI4OlderObjectNeverReplacesNewer(t *testing.T) {
	for name, older := range map[string]func(*Tracker) error{
		"event":          func(tr *Tracker) error { return tr.Store().Update(claim("a", "ua", 9, gpu1)) },
		"added event":    func(tr *Tracker) error { return tr.Store().Add(claim("a", "ua", 9, gpu1)) },
		"answer":         func(tr *Tracker) error { return tr.Assume(claim("a", "ua", 9, gpu1)) },
		"list":           func(tr *Tracker) error { return tr.Store().Replace([]any{claim("a", "ua", 9, gpu1)}, "10") },
		"list without":   func(tr *Tracker) error { return tr.Store().Replace(nil, "10") },
		"recreated, old": func(tr *Tracker) error { return tr.Store().Delete(claim("a", "u0", 9, gpu1)) },
	} {
		t.Run(name, func(t *testing.T) {
			// A longer version is a later one: 99 < 100.
			tr := listed(t, 8, claim("a", "ua", 8))
			newest := claim("a", "ua", 100, gpu0)
			must(t, tr.Assume(newest))
			must(t, older(tr))
			wantHeld(t, tr, "after something older", holders{gpu0: {"ua"}})
			if got, err := tr.Get("default", "a"); err != nil || got != newest {
				t.Errorf("Get() = %v, %v", got, err)
			}
		})
	}
}

// I4, second half.
func TestI4RelistThatChangesAnAllocationMovesTheUsage(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5, gpu0), claim("b", "ub", 6, gpu1), claim("c", "uc", 7, gpu2))
	relist(t, tr, 20, claim("a", "ua", 15, gpu1), claim("b", "ub", 16, gpu0))
	wantHeld(t, tr, "swapped, and one gone", holders{gpu0: {"ub"}, gpu1: {"ua"}})
}

// I5.
func TestI5RecreatedClaimInheritsNothing(t *testing.T) {
	t.Run("from layer 1, by events", func(t *testing.T) {
		tr := listed(t, 10, claim("a", "u1", 5, gpu0))
		must(t, tr.Store().Delete(claim("a", "u1", 11, gpu0)))
		must(t, tr.Store().Add(claim("a", "u2", 12)))
		wantHeld(t, tr, "recreated", nil)
	})
	t.Run("from layer 1, by a list", func(t *testing.T) {
		tr := listed(t, 10, claim("a", "u1", 5, gpu0))
		relist(t, tr, 20, claim("a", "u2", 12))
		wantHeld(t, tr, "recreated", nil)
	})
	t.Run("from layer 2", func(t *testing.T) {
		tr := listed(t, 10, claim("a", "u1", 5))
		reserve(t, tr, podA, claim("a", "u1", 5), gpu0)
		relist(t, tr, 20, claim("a", "u2", 12))
		wantHeld(t, tr, "the old one is in flight, the new one is not", holders{gpu0: {"u1*"}})
		if got, _ := tr.Pending("u2"); got != nil {
			t.Errorf("the new claim has in flight: %v", got)
		}
		reserve(t, tr, podB, claim("a", "u2", 12), gpu1)
		tr.Release("u1", podA)
		wantHeld(t, tr, "the new one alone", holders{gpu1: {"u2*"}})
	})
	t.Run("by an answer that comes late", func(t *testing.T) {
		tr := listed(t, 10, claim("a", "u1", 5))
		must(t, tr.Store().Delete(claim("a", "u1", 12)))
		var claimErr *ClaimError
		if err := tr.Assume(claim("a", "u1", 11, gpu0)); !errors.Is(err, ErrClaimGone) || !errors.As(err, &claimErr) || claimErr.Claim.UID != "u1" {
			t.Errorf("Assume() of a deleted claim = %v", err)
		}
		wantHeld(t, tr, "deleted", nil)
		must(t, tr.Store().Add(claim("a", "u2", 13)))
		if err := tr.Assume(claim("a", "u1", 11, gpu0)); !errors.Is(err, ErrClaimRecreated) {
			t.Errorf("Assume() of a recreated claim = %v", err)
		}
		wantHeld(t, tr, "recreated", nil)
	})
	t.Run("though the watch does not know of the deletion yet", func(t *testing.T) {
		tr := listed(t, 10, claim("a", "u1", 5, gpu0))
		must(t, tr.Assume(claim("a", "u2", 13, gpu1))) // made by ourselves
		wantHeld(t, tr, "assumed", holders{gpu1: {"u2"}})
		must(t, tr.Store().Update(claim("a", "u1", 11, gpu0)))
		must(t, tr.Store().Delete(claim("a", "u1", 12, gpu0)))
		wantHeld(t, tr, "the watch has caught up with the deletion", holders{gpu1: {"u2"}})
		must(t, tr.Store().Delete(claim("a", "u2", 14, gpu1)))
		wantHeld(t, tr, "deleted", nil)
	})
}

// I6 is BenchmarkSnapshotAndApply. This is what can be checked without a clock: a
// snapshot allocates nothing, however much is held.
func TestI6SnapshotCopiesNothing(t *testing.T) {
	tr := listed(t, 1)
	for i := range 1000 {
		must(t, tr.Store().Add(claim(strconv.Itoa(i), types.UID(strconv.Itoa(i)), i+2, device("node-"+strconv.Itoa(i/8), "gpu-"+strconv.Itoa(i%8)))))
	}
	var s Snapshot
	if got := testing.AllocsPerRun(10, func() { s = tr.Snapshot() }); got != 0 {
		t.Errorf("a snapshot of %d devices allocates %v objects", s.Usage.Len(), got)
	}
}

func TestReserveChecksWhatTheDecisionWasMadeOn(t *testing.T) {
	free, other := claim("free", "uf", 3), claim("other", "uo", 4)
	deleting := claim("deleting", "ud", 5)
	deleting.DeletionTimestamp = ptr.To(metav1.Now())
	allocated, flying, holder := claim("allocated", "ua", 6, gpu1), claim("flying", "uy", 7), claim("holder", "uh", 8)
	prepare := func(t *testing.T) *Tracker {
		tr := listed(t, 10, free, other, deleting, allocated, flying, holder)
		reserve(t, tr, podB, flying, device("node-c", "gpu-0"))
		must(t, tr.Reserve(tr.Snapshot().Usage, podB, []Reservation{{Claim: holder, Allocation: shared(device("node-c", "gpu-1"), "s1")}}))
		return tr
	}
	onGPU1 := claim("x", "ux", 11, gpu1)

	for name, tc := range map[string]struct {
		meanwhile    func(*Tracker) error
		reservations []Reservation
		want         error  // errors.Is
		message      string // if not empty, the whole of it
	}{
		"nothing happened":                          {nil, []Reservation{{Claim: free, Allocation: allocation(gpu0)}, {Claim: other, Allocation: allocation(gpu2)}}, nil, ""},
		"a device in another pool was taken":        {func(tr *Tracker) error { return tr.Store().Add(onGPU1) }, []Reservation{{Claim: free, Allocation: allocation(gpu2)}}, nil, ""},
		"a device in the pool was taken":            {func(tr *Tracker) error { return tr.Store().Add(onGPU1) }, []Reservation{{Claim: other, Allocation: allocation(gpu2)}, {Claim: free, Allocation: allocation(gpu0)}}, ErrStale, "pool gpu.nvidia.com/node-a: usage has changed since the decision"},
		"a device in the pool was freed":            {func(tr *Tracker) error { return tr.Store().Delete(allocated) }, []Reservation{{Claim: free, Allocation: allocation(gpu0)}}, ErrStale, ""},
		"the pool was empty and is not any more":    {func(tr *Tracker) error { return tr.Store().Add(claim("x", "ux", 11, device("node-b", "gpu-1"))) }, []Reservation{{Claim: free, Allocation: allocation(gpu2)}}, ErrStale, ""},
		"claim deleted":                             {func(tr *Tracker) error { return tr.Store().Delete(free) }, []Reservation{{Claim: free, Allocation: allocation(gpu0)}}, ErrClaimGone, "claim default/free (UID uf): claim does not exist any more"},
		"claim recreated":                           {func(tr *Tracker) error { return tr.Store().Update(claim("free", "uf2", 11)) }, []Reservation{{Claim: free, Allocation: allocation(gpu0)}}, ErrClaimRecreated, `claim default/free (UID uf): claim was deleted and created again: found "uf2"`},
		"claim allocated":                           {func(tr *Tracker) error { return tr.Store().Update(claim("free", "uf", 11, gpu2)) }, []Reservation{{Claim: free, Allocation: allocation(gpu0)}}, ErrClaimAllocated, ""},
		"claim being deleted":                       {nil, []Reservation{{Claim: deleting, Allocation: allocation(gpu0)}}, ErrClaimDeleting, ""},
		"claim in flight":                           {nil, []Reservation{{Claim: flying, Allocation: allocation(gpu0)}}, ErrClaimInFlight, ""},
		"one claim twice":                           {nil, []Reservation{{Claim: free, Allocation: allocation(gpu0)}, {Claim: free, Allocation: allocation(gpu2)}}, ErrClaimInFlight, ""},
		"the last of several":                       {nil, []Reservation{{Claim: free, Allocation: allocation(gpu0)}, {Claim: other, Allocation: allocation(gpu2)}, {Claim: flying, Allocation: allocation(gpu2)}}, ErrClaimInFlight, ""},
		"a device that is held":                     {nil, []Reservation{{Claim: free, Allocation: allocation(gpu1)}}, &HeldError{}, "claim default/free (UID uf): device gpu.nvidia.com/node-a/gpu-1 is held by claim default/allocated (UID ua)"},
		"a device for two claims at once":           {nil, []Reservation{{Claim: free, Allocation: allocation(gpu0)}, {Claim: other, Allocation: allocation(gpu0)}}, &HeldError{}, "claim default/other (UID uo): device gpu.nvidia.com/node-a/gpu-0 is held by claim default/free (UID uf)"},
		"a share of a device that is held":          {nil, []Reservation{{Claim: free, Allocation: shared(gpu1, "s2")}}, &HeldError{}, ""},
		"a shared device for oneself":               {nil, []Reservation{{Claim: free, Allocation: allocation(device("node-c", "gpu-1"))}}, &HeldError{}, ""},
		"a second share of a shared device":         {nil, []Reservation{{Claim: free, Allocation: shared(device("node-c", "gpu-1"), "s2")}, {Claim: other, Allocation: shared(device("node-c", "gpu-1"), "s3")}}, nil, ""},
		"admin access to a device that is held":     {func(tr *Tracker) error { return tr.Store().Add(onGPU1) }, []Reservation{{Claim: free, Allocation: adminAccess(gpu1)}}, nil, ""},
		"an allocation without devices goes flying": {nil, []Reservation{{Claim: free, Allocation: allocation()}}, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			tr := prepare(t)
			view := tr.Snapshot().Usage
			if tc.meanwhile != nil {
				must(t, tc.meanwhile(tr))
			}
			before := held(tr)
			err := tr.Reserve(view, podA, tc.reservations)
			wantHeldErr := errors.As(tc.want, new(*HeldError))
			if wantHeldErr != errors.As(err, new(*HeldError)) || !wantHeldErr && !errors.Is(err, tc.want) {
				t.Fatalf("Reserve() = %v, want %v", err, tc.want)
			}
			if tc.message != "" && err.Error() != tc.message {
				t.Errorf("message:\n%s\nwant:\n%s", err, tc.message)
			}
			if err != nil {
				if diff := cmp.Diff(before, held(tr)); diff != "" {
					t.Errorf("a failed Reserve left traces (-before +after):\n%s", diff)
				}
				if _, sharers := tr.Pending(free.UID); sharers != 0 {
					t.Error("a failed Reserve left a claim in flight")
				}
				return
			}
			for _, r := range tc.reservations {
				if got, sharers := tr.Pending(r.Claim.UID); got != r.Allocation || sharers != 1 {
					t.Errorf("Pending(%s) = %v, %d", r.Claim.Name, got, sharers)
				}
				tr.Release(r.Claim.UID, podA)
			}
			if diff := cmp.Diff(before, held(tr)); diff != "" {
				t.Errorf("usage after the release (-before +after):\n%s", diff)
			}
		})
	}
}

func adminAccess(d usage.DeviceID) *resourceapi.AllocationResult {
	a := allocation(d)
	a.Devices.Results[0].AdminAccess = ptr.To(true)
	return a
}

func TestClaimBeingDeletedHoldsItsDevicesUntilItHasGone(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5, gpu0))
	deleting := claim("a", "ua", 11, gpu0)
	deleting.DeletionTimestamp = ptr.To(metav1.Now())
	must(t, tr.Store().Update(deleting))
	wantHeld(t, tr, "being deleted", holders{gpu0: {"ua"}})
	must(t, tr.Store().Delete(deleting))
	wantHeld(t, tr, "gone", nil)
}

func TestVersionsThatCannotBeCompared(t *testing.T) {
	t.Run("of a list are refused", func(t *testing.T) {
		for _, version := range []string{"", "0", "x", "01"} {
			tr := newTracker(t)
			if err := tr.Store().Replace([]any{claim("a", "ua", 5, gpu0)}, version); !errors.Is(err, ErrClaimVersion) {
				t.Errorf("Replace at %q: %v", version, err)
			}
			if tr.HasSynced() {
				t.Errorf("synced by a list at %q", version)
			}
			wantHeld(t, tr, "refused list", nil)
		}
	})
	t.Run("of a bookmark before the list are no position", func(t *testing.T) {
		for _, version := range []string{"", "0", "x"} {
			tr := newTracker(t)
			must(t, tr.Store().(store).Bookmark(version))
			if got := tr.Account().Version; got != "" {
				t.Errorf("bookmark at %q: position %q", version, got)
			}
		}
	})
	t.Run("of an answer are refused", func(t *testing.T) {
		for _, version := range []string{"", "0"} {
			tr := listed(t, 10, claim("a", "ua", 5))
			c := claim("a", "ua", 0, gpu0)
			c.ResourceVersion = version
			err := tr.Assume(c)
			if want := fmt.Sprintf("claim default/a (UID ua): resource version is not a positive decimal number: found %q", version); !errors.Is(err, ErrClaimVersion) || version != "" && err.Error() != want {
				t.Errorf("Assume at %q: %v, want %q", version, err, want)
			}
			wantHeld(t, tr, "refused answer", nil)
		}
	})
	t.Run("of an event are taken in the order of their coming", func(t *testing.T) {
		for _, version := range []string{"", "0"} {
			tr := listed(t, 10, claim("a", "ua", 5))
			c := claim("a", "ua", 0, gpu0)
			c.ResourceVersion = version
			must(t, tr.Store().Update(c))
			wantHeld(t, tr, "taken", holders{gpu0: {"ua"}})
			must(t, tr.Store().Update(claim("a", "ua", 11, gpu1)))
			wantHeld(t, tr, "taken, too", holders{gpu1: {"ua"}})
			must(t, tr.Store().Update(c))
			relist(t, tr, 12)
			wantHeld(t, tr, "not in the list", nil)
		}
	})
}

// A deletion leaves no trace but the revision up to which the watch has come.
func TestI4EventThatComesAgainDoesNotBringBackADeletedClaim(t *testing.T) {
	for name, again := range map[string]func(*Tracker) error{
		"its last change":      func(tr *Tracker) error { return tr.Store().Update(claim("a", "ua", 12, gpu0)) },
		"its creation":         func(tr *Tracker) error { return tr.Store().Add(claim("a", "ua", 11)) },
		"what the list had":    func(tr *Tracker) error { return tr.Store().Update(claim("b", "ub", 10, gpu1)) },
		"its deletion, as new": func(tr *Tracker) error { return tr.Store().Add(claim("a", "ua", 13, gpu0)) },
	} {
		t.Run(name, func(t *testing.T) {
			tr := listed(t, 10, claim("b", "ub", 10, gpu1))
			must(t, tr.Store().Add(claim("a", "ua", 11)))
			must(t, tr.Store().Update(claim("a", "ua", 12, gpu0)))
			must(t, tr.Store().Delete(claim("a", "ua", 13, gpu0)))
			must(t, tr.Store().Delete(claim("b", "ub", 14, gpu1)))
			before := tr.Snapshot().Revision
			must(t, again(tr))
			wantHeld(t, tr, "an event of a claim that is gone", nil)
			if _, ok := tr.AllocatedAt("ua"); ok || tr.Snapshot().Revision != before {
				t.Errorf("the event has changed something: revision %d, was %d", tr.Snapshot().Revision, before)
			}
			must(t, tr.Store().Add(claim("a", "ua2", 15, gpu0)))
			wantHeld(t, tr, "a later claim of that name", holders{gpu0: {"ua2"}})
		})
	}
}

// The revision up to which the watch has come tells a claim that has gone from
// one that the watch has not brought yet.
func TestAnswerForAnUnknownClaimIsTakenIfTheWatchHasNotPassedIt(t *testing.T) {
	for name, tc := range map[string]struct {
		do      func(*Tracker) error // after a list at 10
		reached int
	}{
		"list":  {func(*Tracker) error { return nil }, 10},
		"event": {func(tr *Tracker) error { return tr.Store().Add(claim("a", "ua", 15)) }, 15},
		"event of a stale": {func(tr *Tracker) error {
			must(t, tr.Assume(claim("a", "ua", 20)))
			return tr.Store().Update(claim("a", "ua", 15))
		}, 15},
		"deletion":          {func(tr *Tracker) error { return tr.Store().Delete(claim("a", "ua", 15)) }, 15},
		"bookmark":          {func(tr *Tracker) error { return tr.Store().(store).Bookmark("15") }, 15},
		"bookmark without":  {func(tr *Tracker) error { return tr.Store().(store).Bookmark("") }, 10},
		"later list":        {func(tr *Tracker) error { return tr.Store().Replace(nil, "15") }, 15},
		"older list":        {func(tr *Tracker) error { return tr.Store().Replace(nil, "8") }, 8},
		"older event":       {func(tr *Tracker) error { return tr.Store().Update(claim("a", "ua", 8)) }, 10},
		"answer to a write": {func(tr *Tracker) error { return tr.Assume(claim("a", "ua", 15)) }, 10},
		"event without order": {func(tr *Tracker) error {
			c := claim("a", "ua", 0)
			c.ResourceVersion = ""
			return tr.Store().Update(c)
		}, 10},
	} {
		t.Run(name, func(t *testing.T) {
			tr := listed(t, 10)
			must(t, tc.do(tr))
			if err := tr.Assume(claim("x", "ux", tc.reached, gpu0)); !errors.Is(err, ErrClaimGone) {
				t.Errorf("Assume() at %d = %v", tc.reached, err)
			}
			must(t, tr.Assume(claim("x", "ux", tc.reached+1, gpu0)))
			wantHeld(t, tr, "assumed", holders{gpu0: {"ux"}})
		})
	}
}

func TestGetReturnsTheNewestObjectWithoutManagedFields(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5))
	if _, err := tr.Get("other", "a"); !apierrors.IsNotFound(err) {
		t.Errorf("Get() in another namespace: %v", err)
	}
	assumed := claim("a", "ua", 11, gpu0)
	assumed.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "m"}}
	must(t, tr.Assume(assumed))
	got, err := tr.Get("default", "a")
	must(t, err)
	if diff := cmp.Diff(claim("a", "ua", 11, gpu0), got); diff != "" {
		t.Errorf("Get() (-want +got):\n%s", diff)
	}
	if len(assumed.ManagedFields) != 1 {
		t.Error("the caller's object was modified")
	}
}

func TestStoreRefusesOtherTypes(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5, gpu0))
	s := tr.Store()
	for name, err := range map[string]error{
		"Add":     s.Add(&resourceapi.DeviceClass{}),
		"Update":  s.Update("text"),
		"Delete":  s.Delete(nil),
		"Replace": s.Replace([]any{claim("b", "ub", 6), &resourceapi.DeviceClass{}}, "11"),
	} {
		if err == nil {
			t.Errorf("%s accepts what is no claim", name)
		}
	}
	must(t, s.Resync())
	wantHeld(t, tr, "unchanged", holders{gpu0: {"ua"}})
}
