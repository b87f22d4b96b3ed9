// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"context"
	"strconv"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/usage"
)

// Every method may be called from any goroutine. What they return is the business
// of other tests: here the race detector looks for state that no lock guards.
func TestMethodsMayBeCalledFromAnyGoroutine(t *testing.T) {
	const times = 100
	tr := New(newTracker(t).logger, WithJudge(&exclusive{}))
	relist(t, tr, 1)
	ctx, cancel := context.WithCancel(t.Context())
	tr.Subscribe(func(Event) {})

	var goroutines sync.WaitGroup
	repeat := func(do func(i int)) {
		goroutines.Go(func() {
			for i := range times {
				do(i)
			}
		})
	}
	ref := usage.RefOf(claim("a", "ua", 0))
	goroutines.Go(func() { tr.deliverEvents(ctx) })
	repeat(func(i int) {
		s := tr.Store().(store)
		a := ownedBy(claim("a", "ua", 10*i+2, gpu0), podA)
		must(t, s.Update(a))
		must(t, s.Bookmark(strconv.Itoa(10*i+3)))
		if i%10 == 5 {
			must(t, s.Replace([]any{a}, strconv.Itoa(10*i+4)))
		}
		must(t, s.Delete(claim("a", "ua", 10*i+5)))
		if i == times/2 {
			cancel() // ends deliverEvents while events come
		}
	})
	repeat(func(i int) {
		uid := types.UID("unborn-" + strconv.Itoa(i))
		must(t, tr.Reserve(usage.View{}, podB, []Reservation{{Claim: unbornClaim(uid), Allocation: allocation()}}))
		tr.Share(uid, podA)
		tr.Release(uid, podB)
		tr.Release(uid, podA)
	})
	// A goroutine that calls nothing else has no other lock to be ordered by.
	for i := range times {
		must(t, tr.Reserve(usage.View{}, podB, []Reservation{{Claim: unbornClaim(types.UID("moving-" + strconv.Itoa(i))), Allocation: allocation()}}))
	}
	repeat(func(i int) {
		must(t, tr.Move(types.UID("moving-"+strconv.Itoa(i)), claim("moved", types.UID("moved-"+strconv.Itoa(i)), 1)))
	})
	repeat(func(int) { must(t, tr.Store().(store).Bookmark("1")) })
	repeat(func(i int) { _ = tr.Assume(claim("assumed", "assumed", 10_000+i)) })
	repeat(func(int) { tr.Snapshot() })
	repeat(func(int) { tr.Account() })
	repeat(func(int) { tr.Holding(ref) })
	repeat(func(int) { tr.InFlightFor(podA) })
	repeat(func(i int) { tr.Pending(types.UID("unborn-" + strconv.Itoa(i))) })
	repeat(func(int) { tr.OwnedBy("default", podA) })
	repeat(func(int) { _, _ = tr.Get("default", "a") })
	repeat(func(int) { _, _ = tr.Verdict(ref, allocation(gpu0), usage.View{}) })
	repeat(func(int) { tr.AllocatedAt("ua") })
	over, end := context.WithCancel(t.Context())
	end()
	for range times { // once each, for the same reason
		goroutines.Go(func() { _ = tr.WaitObserved(over, "1000000") })
	}
	repeat(func(int) { tr.Subscribe(func(Event) {}) })
	goroutines.Wait()
	cancel()
}
