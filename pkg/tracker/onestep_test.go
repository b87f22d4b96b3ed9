// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/usage"
)

// Each operation is one step to all others, however many changes it makes. Here
// another one comes in as soon as the mutex is free, wherever that is.
func TestOperationsAreOneStep(t *testing.T) {
	onGPU0 := func(name string, uid types.UID) []Reservation {
		return []Reservation{{Claim: claim(name, uid, 5), Allocation: allocation(gpu0)}}
	}
	tests := map[string]func(t *testing.T){
		"Assume checks and changes": func(t *testing.T) {
			tr := listed(t, 10, claim("a", "ua", 5))
			handOver(tr, func() { _ = tr.Assume(claim("a", "ua", 11, gpu0)) }, func() { must(t, tr.Store().Delete(claim("a", "ua", 12, gpu0))) })
			wantHeld(t, tr, "deleted at a later version", nil)
		},
		"Assume moves a claim from one layer to the other": func(t *testing.T) {
			tr := listed(t, 10, claim("a", "ua", 5))
			reserve(t, tr, podA, claim("a", "ua", 5), gpu0)
			var between Snapshot
			handOver(tr, func() { must(t, tr.Assume(claim("a", "ua", 11, gpu0))) }, func() { between = tr.Snapshot() })
			if n := between.Usage.Device(gpu0).Count(); n != 1 {
				t.Errorf("the device has %d holders in between", n)
			}
		},
		"Reserve checks and changes": func(t *testing.T) {
			tr := listed(t, 10, claim("a", "ua", 5), claim("b", "ub", 6))
			view := tr.Snapshot().Usage
			var first, second error
			handOver(tr, func() { first = tr.Reserve(view, podA, onGPU0("a", "ua")) }, func() { second = tr.Reserve(view, podB, onGPU0("b", "ub")) })
			if second == nil { // it was first after all
				first, second = second, first
			}
			if first != nil || !errors.Is(second, ErrStale) {
				t.Errorf("one %v, the other %v; want success and %v", first, second, ErrStale)
			}
		},
		"Reserve takes several claims": func(t *testing.T) {
			tr := listed(t, 10, claim("a", "ua", 5), claim("b", "ub", 6))
			both := append(onGPU0("a", "ua"), Reservation{Claim: claim("b", "ub", 6), Allocation: allocation(gpu1)})
			var between Snapshot
			handOver(tr, func() { must(t, tr.Reserve(usage.View{}, podA, both)) }, func() { between = tr.Snapshot() })
			if n := between.Usage.Len(); n != 0 && n != 2 {
				t.Errorf("%d devices are held in between, want none or both", n)
			}
		},
		"Release counts and removes": func(t *testing.T) {
			tr := listed(t, 10, claim("a", "ua", 5))
			reserve(t, tr, podA, claim("a", "ua", 5), gpu0)
			var last, joined bool
			handOver(tr, func() { last = tr.Release("ua", podA) }, func() { _, joined = tr.Share("ua", podB) })
			if last == joined {
				t.Errorf("the release was the last: %t, and another pod joined: %t", last, joined)
			}
		},
		"Snapshot has usage and revision": func(t *testing.T) {
			tr := listed(t, 10, claim("a", "ua", 5))
			before := tr.Snapshot()
			var got Snapshot
			handOver(tr, func() { got = tr.Snapshot() }, func() { must(t, tr.Store().Update(claim("a", "ua", 11, gpu0))) })
			if later := got.Revision > before.Revision; later != (got.Usage.Len() > 0) {
				t.Errorf("revision %d after %d, with %d devices held", got.Revision, before.Revision, got.Usage.Len())
			}
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			for range 20 {
				test(t)
			}
		})
	}
}

// Whatever reads or changes the tracker waits for the mutex before it does anything.
func TestMethodsWaitForTheMutex(t *testing.T) {
	over, end := context.WithCancel(t.Context())
	end()
	ref := usage.RefOf(claim("a", "ua", 0))
	for name, method := range map[string]func(tr *Tracker){
		"Store.Update":   func(tr *Tracker) { _ = tr.Store().Update(claim("a", "ua", 11, gpu0)) },
		"Store.Delete":   func(tr *Tracker) { _ = tr.Store().Delete(claim("a", "ua", 11)) },
		"Store.Replace":  func(tr *Tracker) { _ = tr.Store().Replace(nil, "11") },
		"Store.Bookmark": func(tr *Tracker) { _ = tr.Store().(store).Bookmark("11") },
		"Reserve": func(tr *Tracker) {
			_ = tr.Reserve(usage.View{}, podA, []Reservation{{Claim: claim("a", "ua", 5), Allocation: allocation(gpu0)}})
		},
		"Move":         func(tr *Tracker) { _ = tr.Move("ux", claim("a", "ua", 5)) },
		"Share":        func(tr *Tracker) { tr.Share("ua", podA) },
		"Release":      func(tr *Tracker) { tr.Release("ua", podA) },
		"Assume":       func(tr *Tracker) { _ = tr.Assume(claim("a", "ua", 11, gpu0)) },
		"Snapshot":     func(tr *Tracker) { tr.Snapshot() },
		"Account":      func(tr *Tracker) { tr.Account() },
		"Holding":      func(tr *Tracker) { tr.Holding(ref) },
		"InFlightFor":  func(tr *Tracker) { tr.InFlightFor(podA) },
		"Pending":      func(tr *Tracker) { tr.Pending("ua") },
		"OwnedBy":      func(tr *Tracker) { tr.OwnedBy("default", podA) },
		"Get":          func(tr *Tracker) { _, _ = tr.Get("default", "a") },
		"Verdict":      func(tr *Tracker) { _, _ = tr.Verdict(ref, allocation(gpu0), usage.View{}) },
		"AllocatedAt":  func(tr *Tracker) { tr.AllocatedAt("ua") },
		"WaitObserved": func(tr *Tracker) { _ = tr.WaitObserved(over, "1000000") },
		"Subscribe":    func(tr *Tracker) { tr.Subscribe(func(Event) {}) },
		"takeEvents":   func(tr *Tracker) { tr.takeEvents() },
		"closeEvents":  func(tr *Tracker) { tr.closeEvents() },
	} {
		t.Run(name, func(t *testing.T) {
			tr := listed(t, 10, claim("a", "ua", 5))
			tr.mutex.Lock()
			done := make(chan struct{})
			go func() {
				defer close(done)
				method(tr)
			}()
			hopeless := time.After(time.Minute)
			for waits := false; !waits; waits = waiters(tr) > 0 {
				select {
				case <-done:
					t.Fatal("it is done while another one has the mutex")
				case <-hopeless:
					t.Fatal("neither done nor seen to wait: does the state of a sync.Mutex look different now?")
				default:
					runtime.Gosched()
				}
			}
			tr.mutex.Unlock()
			<-done
		})
	}
}

// mutexState is the state of the tracker's mutex: flags, and above them how many wait for it.
func mutexState(tr *Tracker) int32 { return atomic.LoadInt32((*int32)(unsafe.Pointer(&tr.mutex))) }

func waiters(tr *Tracker) int32 { return mutexState(tr) >> 3 }

// handOver calls both, the first one a little earlier, with the mutex in the mode in
// which Unlock gives it to who has waited longest (sync.Mutex calls that
// starvation): if first lets go of it too early, second has it before first goes on.
//
// Whether anybody waits, and the mode, are only to be seen in the mutex's state. If
// that should look different one day, the two merely run side by side.
func handOver(tr *Tracker, first, second func()) {
	const starving, patience = 1 << 2, 100 * time.Millisecond
	until := func(met func() bool) {
		for start := time.Now(); !met() && time.Since(start) < patience; {
			runtime.Gosched()
		}
	}
	tr.mutex.Lock()
	var both sync.WaitGroup
	both.Go(first)
	until(func() bool { return waiters(tr) == 1 })
	both.Go(second)
	until(func() bool { return waiters(tr) == 2 })
	for start := time.Now(); time.Since(start) < 2*time.Millisecond; {
		runtime.Gosched() // who waits for a millisecond starves
	}
	// The first one wakes up, finds the mutex taken again, and insists.
	tr.mutex.Unlock()
	tr.mutex.Lock()
	until(func() bool { return mutexState(tr)&starving != 0 })
	tr.mutex.Unlock()
	both.Wait()
}
