// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/usage"
)

// told is an Event without its objects.
type told struct {
	Kind     EventKind
	Claim    string
	Old, New string // resource versions
	Freed    []usage.DeviceID
}

func tell(e Event) told {
	s := told{Kind: e.Kind, Claim: string(e.Claim.UID), Freed: e.Freed}
	if e.Old != nil {
		s.Old = e.Old.ResourceVersion
	}
	if e.New != nil {
		s.New = e.New.ResourceVersion
	}
	return s
}

func TestSubscribersHearOfEveryChangeInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, tr := &server{}, newTracker(t)
		s.set(10, claim("a", "ua", 5, gpu0), claim("b", "ub", 6, gpu0, gpu1))
		var heard, heardToo []told
		var revisions []uint64
		tr.Subscribe(func(e Event) {
			heard = append(heard, tell(e))
			revisions = append(revisions, e.Revision)
			tr.Snapshot() // no lock is held
		})
		tr.Subscribe(func(e Event) { heardToo = append(heardToo, tell(e)) })
		run(t, tr, s)

		for _, step := range []struct {
			name string
			do   func() error
			want []told
		}{
			{"listed", func() error { return nil }, []told{
				{ClaimAdded, "ua", "", "5", nil}, {ClaimAdded, "ub", "", "6", nil},
			}},
			{"listed again, with nothing new", func() error {
				return tr.Store().Replace([]any{claim("a", "ua", 5, gpu0), claim("b", "ub", 6, gpu0, gpu1)}, "11")
			}, nil},
			{"changed, but not the allocation", func() error { return tr.Store().Update(claim("a", "ua", 12, gpu0)) }, []told{
				{ClaimUpdated, "ua", "5", "12", nil},
			}},
			{"stale", func() error { return tr.Assume(claim("a", "ua", 11)) }, nil},
			{"deallocated, though another one holds it still", func() error { return tr.Assume(claim("a", "ua", 13)) }, []told{
				{ClaimUpdated, "ua", "12", "13", []usage.DeviceID{gpu0}},
			}},
			{"the echo", func() error { return tr.Store().Update(claim("a", "ua", 13)) }, nil},
			{"reserved", func() error { reserve(t, tr, podA, claim("a", "ua", 13), gpu2); return nil }, nil},
			{"released without a write", func() error { tr.Release("ua", podA); return nil }, []told{
				{AllocationReleased, "ua", "", "", []usage.DeviceID{gpu2}},
			}},
			{"reserved, written and released", func() error {
				reserve(t, tr, podA, claim("a", "ua", 13), gpu2)
				must(t, tr.Assume(claim("a", "ua", 14, gpu2)))
				tr.Release("ua", podA)
				return nil
			}, []told{
				{ClaimUpdated, "ua", "13", "14", nil}, {AllocationReleased, "ua", "", "", nil},
			}},
			{"deleted", func() error { return tr.Store().Delete(claim("b", "ub", 15, gpu0, gpu1)) }, []told{
				{ClaimDeleted, "ub", "6", "", []usage.DeviceID{gpu0, gpu1}},
			}},
			{"recreated and moved by a list", func() error {
				return tr.Store().Replace([]any{claim("a", "ua2", 18, gpu1), claim("c", "uc", 19), claim("d", "ud", 17), claim("e", "ue", 16)}, "20")
			}, []told{
				{ClaimDeleted, "ua", "14", "", []usage.DeviceID{gpu2}},
				{ClaimAdded, "ua2", "", "18", nil},
				{ClaimAdded, "uc", "", "19", nil},
				{ClaimAdded, "ud", "", "17", nil},
				{ClaimAdded, "ue", "", "16", nil},
			}},
			{"all gone, by name", func() error { return tr.Store().Replace(nil, "30") }, []told{
				{ClaimDeleted, "ua2", "18", "", []usage.DeviceID{gpu1}},
				{ClaimDeleted, "uc", "19", "", nil},
				{ClaimDeleted, "ud", "17", "", nil},
				{ClaimDeleted, "ue", "16", "", nil},
			}},
		} {
			must(t, step.do())
			synctest.Wait()
			if diff := cmp.Diff(step.want, heard); diff != "" {
				t.Errorf("%s: events (-want +got):\n%s", step.name, diff)
			}
			if diff := cmp.Diff(step.want, heardToo); diff != "" {
				t.Errorf("%s: events of the second subscriber (-want +got):\n%s", step.name, diff)
			}
			heard, heardToo = nil, nil
		}
		for i := 1; i < len(revisions); i++ {
			if revisions[i] <= revisions[i-1] {
				t.Errorf("revisions do not grow: %v", revisions)
			}
		}
		if last := revisions[len(revisions)-1]; last != tr.Snapshot().Revision {
			t.Errorf("the snapshot's revision is %d, that of the last event %d", tr.Snapshot().Revision, last)
		}
	})
}

// A waiter subscribes, takes a snapshot, finds its device held and waits. However
// these steps interleave with the device being freed, it must see that: in the
// snapshot, or as an event that is later than the snapshot.
func TestDeviceFreedIsSeenInTheSnapshotOrAsALaterEvent(t *testing.T) {
	for range 200 {
		synctest.Test(t, func(t *testing.T) { // fails when all wait for each other
			tr := quiet()
			relist(t, tr, 10, claim("a", "ua", 5, gpu0))
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			wg.Go(func() { tr.deliverEvents(ctx) })
			wg.Go(func() { must(t, tr.Store().Update(claim("a", "ua", 11))) })

			freed := make(chan uint64, 1)
			tr.Subscribe(func(e Event) {
				if len(e.Freed) > 0 {
					freed <- e.Revision
				}
			})
			if s := tr.Snapshot(); s.Usage.Device(gpu0) != nil {
				if revision := <-freed; revision <= s.Revision {
					t.Errorf("freed at revision %d, but held at %d", revision, s.Revision)
				}
			}
			cancel()
			wg.Wait()
		})
	}
}

func TestRunReturnsAfterTheLastCallOfASubscriber(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, tr := &server{}, newTracker(t)
		s.set(10, claim("a", "ua", 5), claim("b", "ub", 6))
		calls, goOn, returned := 0, make(chan struct{}), false
		tr.Subscribe(func(Event) { calls++; <-goOn })
		ctx, cancel := context.WithCancel(t.Context())
		go func() { tr.Run(ctx, s); returned = true }()
		synctest.Wait()
		cancel()
		must(t, tr.Assume(claim("a", "ua", 11)))
		synctest.Wait()
		if returned {
			t.Error("Run has returned while a subscriber was being called")
		}
		close(goOn)
		synctest.Wait()
		if !returned || calls != 1 {
			t.Errorf("returned: %t, calls: %d; want true, 1", returned, calls)
		}
		if n := len(tr.events.pending); n != 0 {
			t.Errorf("%d events are kept for nobody", n)
		}
	})
}

func TestEventsAreNotKeptWithoutASubscriber(t *testing.T) {
	tr := listed(t, 10, claim("a", "ua", 5))
	if n := len(tr.events.pending); n != 0 {
		t.Errorf("%d events are kept for nobody", n)
	}
}

// What a list shows to have gone is told of by name, not as it comes.
func TestClaimsThatAreNotListedGoInTheOrderOfTheirNames(t *testing.T) {
	var claims []*resourceapi.ResourceClaim
	var want []string
	for i := range 20 {
		name := fmt.Sprintf("claim-%02d", i)
		claims, want = append(claims, claim(name, types.UID(name), i+1)), append(want, name)
	}
	tr := listed(t, 30, claims...)
	tr.Subscribe(func(Event) {})
	relist(t, tr, 40)
	var got []string
	for _, event := range tr.events.pending {
		got = append(got, event.Claim.Name)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}
