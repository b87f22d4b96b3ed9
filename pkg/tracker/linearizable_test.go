// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/usage"
)

// TestTrackerIsLinearizable records what many goroutines do with one tracker at a
// time, and checks that what they saw can be explained by the sequential tracker
// doing the same one after the other. The goroutines are pods being scheduled,
// pods that share their claims, a watch that lags, repeats itself and lists over
// gaps, other components that write, and readers.
func TestTrackerIsLinearizable(t *testing.T) {
	rounds := 200
	if testing.Short() {
		rounds = 10
	}
	for name, m := range map[string]mix{
		"everything": {names: 4, pods: 3, steps: 25, schedules: 4, elsewhere: 1, late: 6, shares: 5, reads: 12, writes: 12, deletes: 2},
		// A claim is gone and there again before anybody knows.
		"claims come and go": {names: 2, pods: 2, steps: 60, schedules: 3, elsewhere: 1, late: 60, reads: 4, writes: 40, deletes: 8},
		"pods compete":       {names: 4, pods: 5, elsewhere: 3, steps: 8, schedules: 8, reads: 2, writes: 8},
		// All that pods do to one allocation in flight.
		"claims are shared": {names: 1, pods: 3, steps: 8, schedules: 8, late: 2, elsewhere: 2, shares: 16, reads: 16, writes: 4, deletes: 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they mostly wait
			var atOnce sync.WaitGroup
			seeds := make(chan uint64)
			for range 8 {
				atOnce.Go(func() {
					for seed := range seeds {
						m.run(t, seed)
					}
				})
			}
			for seed := range uint64(rounds) {
				seeds <- seed
			}
			close(seeds)
			atOnce.Wait()
		})
	}
}

// mix says how often what happens in a history.
type mix struct {
	names     int // of claims
	pods      int
	steps     int // of the watch
	schedules int // of each pod
	elsewhere int // of four pods go elsewhere after Reserve
	late      int // answers that come late
	shares    int
	reads     int
	writes    int // by others
	deletes   int // among ten writes
}

func (m mix) run(t *testing.T, seed uint64) {
	h := &history{tracker: quiet()}
	stop := h.deliver()
	w := newWorld(m.names)
	feed := &watchFeed{client: h.client(seed), world: w}
	h.client(seed).subscribe()
	feed.list(t, w.revisionNow())

	var goroutines sync.WaitGroup
	goroutines.Go(func() { feed.run(t, m.steps) })
	for pod := range m.pods {
		c := h.client(seed)
		goroutines.Go(func() { c.schedule(w, types.UID(fmt.Sprintf("p%d", pod)), m.schedules, m.elsewhere) })
	}
	latecomer, sharer, reader, outsider := h.client(seed), h.client(seed), h.client(seed), h.client(seed)
	goroutines.Go(func() { latecomer.assumeLate(w, m.late) })
	goroutines.Go(func() { sharer.shareAndRelease(w, "sharer", m.shares) })
	goroutines.Go(func() { reader.read(w, m.reads) })
	goroutines.Go(func() { outsider.meddle(w, m.writes, m.deletes) })
	uncrowd := h.crowd()
	goroutines.Wait()
	uncrowd()

	stop()
	reader.snapshot()
	h.judge(t, fmt.Sprintf("seed %d", seed))
}

// crowd keeps the mutex until callers have waited so long that it is handed from
// one to the next in turn (sync.Mutex calls that starvation). Whoever lets go of
// it in the middle of an operation then finds others there.
func (h *history) crowd() (stop func()) {
	var done atomic.Bool
	var goroutine sync.WaitGroup
	goroutine.Go(func() {
		for !done.Load() {
			h.tracker.mutex.Lock()
			time.Sleep(1200 * time.Microsecond)
			h.tracker.mutex.Unlock()
			runtime.Gosched()
		}
	})
	return func() {
		done.Store(true)
		goroutine.Wait()
	}
}

// world is an API server's ResourceClaims: every write has a revision, and all
// of them are remembered.
type world struct {
	mutex  sync.Mutex
	states []map[string]*resourceapi.ResourceClaim // states[r] is revision r
	names  []string
	uids   int
}

var worldDevices = []usage.DeviceID{gpu0, gpu1, gpu2}

func newWorld(names int) *world {
	w := &world{states: []map[string]*resourceapi.ResourceClaim{{}}, names: []string{"a", "b", "c", "d"}[:names]}
	for _, name := range w.names {
		w.create(name)
	}
	return w
}

// write changes a claim in the next revision, unless change refuses. A nil
// result deletes it.
func (w *world) write(name string, change func(old *resourceapi.ResourceClaim) (now *resourceapi.ResourceClaim, ok bool)) (written *resourceapi.ResourceClaim) {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	old := w.states[len(w.states)-1][name]
	now, ok := change(old.DeepCopy())
	if !ok {
		return nil
	}
	next := maps.Clone(w.states[len(w.states)-1])
	delete(next, name)
	if now != nil {
		now.ResourceVersion = strconv.Itoa(len(w.states))
		next[name] = now
	}
	w.states = append(w.states, next)
	return now
}

func (w *world) create(name string) {
	w.write(name, func(old *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, bool) {
		w.uids++
		return claim(name, types.UID(fmt.Sprintf("%s%d", name, w.uids)), 0), old == nil
	})
}

// allocate is the write of a scheduler: it fails if the claim has changed in what
// matters. The answer may be lost though it took effect.
func (w *world) allocate(c *resourceapi.ResourceClaim, a *resourceapi.AllocationResult) *resourceapi.ResourceClaim {
	return w.write(c.Name, func(old *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, bool) {
		if old == nil || old.UID != c.UID || old.Status.Allocation != nil {
			return nil, false
		}
		old.Status.Allocation = a
		return old, true
	})
}

func (w *world) update(name string, change func(*resourceapi.ResourceClaim)) {
	w.write(name, func(old *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, bool) {
		if old != nil {
			change(old)
		}
		return old, old != nil
	})
}

func (w *world) read(name string) *resourceapi.ResourceClaim {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.states[len(w.states)-1][name]
}

func (w *world) revisionNow() int {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return len(w.states) - 1
}

func (w *world) at(revision int) map[string]*resourceapi.ResourceClaim {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	return w.states[revision]
}

// watchFeed plays the Reflector: it feeds a store with what happened in a world.
type watchFeed struct {
	client *client
	world  *world
	seen   int
}

func (f *watchFeed) run(t *testing.T, steps int) {
	random := f.client.restless
	for range steps {
		now := f.world.revisionNow()
		switch choice := random.IntN(12); {
		case choice == 0: // over a gap
			f.list(t, f.seen+random.IntN(now-f.seen+1))
		case choice == 1: // a server that lags behind
			f.list(t, max(1, f.seen-random.IntN(3)))
		case choice == 2: // the watch begins again, a little earlier
			for again := max(1, f.seen-random.IntN(3)); again < f.seen; again++ {
				must(t, f.event(again))
			}
		case f.seen == now:
			must(t, f.client.store().Bookmark(strconv.Itoa(f.seen)))
			runtime.Gosched()
		default:
			must(t, f.event(f.seen))
			f.seen++
		}
	}
}

// list lists at a revision, in no particular order.
func (f *watchFeed) list(t *testing.T, revision int) {
	objs := []any{}
	for _, c := range f.world.at(revision) {
		objs = append(objs, c)
	}
	must(t, f.client.store().Replace(objs, strconv.Itoa(revision)))
	f.seen = revision
}

// event tells what happened after a revision.
func (f *watchFeed) event(revision int) error {
	kind, claim := changed(f.world.at(revision), f.world.at(revision+1), revision+1)
	store := f.client.store()
	switch kind {
	case watch.Added:
		return store.Add(claim)
	case watch.Deleted:
		return store.Delete(claim)
	default:
		return store.Update(claim)
	}
}

// schedule schedules a pod several times, as the plugin does: a snapshot, the
// claims, Reserve, the write, Assume, Release.
func (c *client) schedule(w *world, pod types.UID, times, elsewhere int) {
	for range times {
		snapshot := c.snapshot()
		var reservations []Reservation
		for _, name := range some(c.restless, w.names) {
			if known := c.get(name); known != nil {
				reservations = append(reservations, Reservation{Claim: known, Allocation: c.choose(snapshot.Usage)})
			}
		}
		if len(reservations) == 0 || c.reserve(snapshot, pod, reservations...) != nil {
			continue
		}
		for _, r := range reservations {
			if c.restless.IntN(4) >= elsewhere {
				c.write(w, r)
			}
			c.release(r.Claim.UID, pod)
		}
	}
}

// write writes an allocation, and learns what became of it.
func (c *client) write(w *world, r Reservation) {
	answer := w.allocate(r.Claim, r.Allocation)
	if answer == nil || c.restless.IntN(4) == 0 { // refused, or the answer was lost: read
		answer = w.read(r.Claim.Name)
	}
	if answer == nil {
		return
	}
	_ = c.assume(answer) // fails if the claim is known to be gone
	if c.restless.IntN(4) == 0 {
		_ = c.assume(answer) // a write that changes nothing has the same answer
	}
}

// assumeLate assumes what the server had a moment ago, like a goroutine that was
// suspended between an answer and Assume.
func (c *client) assumeLate(w *world, times int) {
	for range times {
		now := w.revisionNow()
		if claim := w.at(now - c.restless.IntN(min(now, 5)))[some(c.restless, w.names)[0]]; claim != nil {
			_ = c.assume(claim) // fails if the claim is known to be gone
		}
	}
}

// choose makes an allocation of devices that are mostly free; now and then a
// wrong one, and now and then a share of a device.
func (c *client) choose(view usage.View) *resourceapi.AllocationResult {
	var devices []usage.DeviceID
	for _, d := range some(c.restless, worldDevices) {
		if view.Device(d) == nil || c.restless.IntN(5) == 0 {
			devices = append(devices, d)
		}
	}
	a := allocation(devices...)
	for i := range a.Devices.Results {
		if c.restless.IntN(3) == 0 {
			a.Devices.Results[i].ShareID = ptr.To(types.UID(fmt.Sprintf("s%d", c.restless.IntN(3))))
		}
	}
	return a
}

// some draws one or two.
func some[T any](random *rand.Rand, from []T) []T {
	shuffled := slices.Clone(from)
	random.Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	return shuffled[:min(len(shuffled), 1+random.IntN(2))]
}

// shareAndRelease joins allocations in flight and leaves them.
func (c *client) shareAndRelease(w *world, pod types.UID, times int) {
	for range times {
		if known := w.read(some(c.restless, w.names)[0]); known != nil && c.share(known.UID, pod) {
			c.snapshot()
			c.release(known.UID, pod)
		}
	}
}

func (c *client) read(w *world, times int) {
	for i := range times {
		switch i % 4 {
		case 0:
			if known := w.read(some(c.restless, w.names)[0]); known != nil {
				c.pending(known.UID)
			}
		case 1:
			c.get(some(c.restless, w.names)[0])
		default:
			c.snapshot()
		}
		if i == times/2 {
			c.subscribe()
		}
	}
}

// meddle is everybody else who writes claims.
func (c *client) meddle(w *world, times, deletes int) {
	for range times {
		name := some(c.restless, w.names)[0]
		choice := c.restless.IntN(10)
		switch {
		case choice < deletes:
			w.write(name, func(old *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, bool) { return nil, old != nil })
			w.create(name)
		case choice == 8:
			w.update(name, func(c *resourceapi.ResourceClaim) { c.DeletionTimestamp = ptr.To(metav1.Unix(1, 0)) })
		case choice == 9: // another scheduler, without a fence
			w.update(name, func(old *resourceapi.ResourceClaim) { old.Status.Allocation = c.choose(usage.View{}) })
		default:
			w.update(name, func(c *resourceapi.ResourceClaim) { c.Status.Allocation = nil })
		}
		runtime.Gosched()
		if choice%2 == 0 {
			c.snapshot() // keeps pace with the others
		}
	}
}
