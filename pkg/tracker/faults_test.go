// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// TestTrackerIsLinearizableBehindAFaultyAPIServer records what pods and a real
// Reflector do with a tracker while the API server refuses, forgets, repeats and
// lags. In the end the tracker must know what the server has, and the whole
// history must be that of a sequential tracker.
func TestTrackerIsLinearizableBehindAFaultyAPIServer(t *testing.T) {
	rounds := uint64(150)
	if testing.Short() {
		rounds = 20
	}
	seen := map[string]int{}
	missing := func() []string {
		return slices.DeleteFunc([]string{
			"conflict", "answer lost", "500", "429", "410", "watch closed", "relist over a gap", "bookmark", "watch before the answer", "event again",
			"stale event", "change after its deletion",
		}, func(fault string) bool { return seen[fault] > 0 })
	}
	// Which faults meet is up to the goroutines, not to the seed alone: more rounds, if one has not come up.
	for seed := uint64(0); seed < rounds || len(missing()) > 0 && seed < 10*rounds; seed++ {
		var h *history
		synctest.Test(t, func(t *testing.T) { h = behindFaults(t, seed, seen) })
		h.judge(t, fmt.Sprintf("seed %d", seed))
	}
	if faults := missing(); len(faults) > 0 {
		t.Errorf("no history had the faults %q: %v", faults, seen)
	}
	t.Log(seen)
}

func behindFaults(t *testing.T, seed uint64, seen map[string]int) *history {
	h, w := &history{tracker: quiet()}, newWorld(4)
	s := &faultyServer{world: w, random: rand.New(rand.NewPCG(seed, 1)), seen: seen}
	stop := h.deliver()
	h.client(seed).subscribe()

	ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), h.tracker.logger))
	var watching, working sync.WaitGroup
	reflector := cache.NewReflectorWithOptions(s, &resourceapi.ResourceClaim{}, h.client(seed).store(), cache.ReflectorOptions{Logger: &h.tracker.logger, Name: "faulty"})
	watching.Go(func() { reflector.RunWithContext(ctx) })
	must(t, h.tracker.WaitForSync(ctx))

	for pod := range 3 {
		c := h.client(seed)
		working.Go(func() { c.scheduleFaulty(s, types.UID(fmt.Sprintf("p%d", pod)), 5) })
	}
	outsider, reader := h.client(seed), h.client(seed)
	working.Go(func() {
		for range 20 {
			s.wait()
			outsider.meddle(w, 1, 2)
		}
	})
	working.Go(func() {
		for range 4 {
			s.wait()
			reader.read(w, 3)
		}
	})
	working.Wait()

	time.Sleep(30 * time.Minute) // until the Reflector has outlived all faults
	got := map[string]*resourceapi.ResourceClaim{}
	for _, name := range w.names {
		if c := reader.get(name); c != nil {
			got[name] = c
		}
	}
	if diff := cmp.Diff(w.at(w.revisionNow()), got); diff != "" {
		t.Errorf("seed %d: what the tracker knows in the end (-server +tracker):\n%s", seed, diff)
	}
	if diff := cmp.Diff(recomputed(h.tracker), held(h.tracker)); diff != "" || len(h.tracker.inFlight) > 0 {
		t.Errorf("seed %d: usage in the end, with %d claims in flight (-recomputed +got):\n%s", seed, len(h.tracker.inFlight), diff)
	}
	cancel()
	watching.Wait()
	s.feeds.Wait()
	stop()
	return h
}

// scheduleFaulty is schedule with requests that fail.
func (c *client) scheduleFaulty(s *faultyServer, pod types.UID, times int) {
	for range times {
		s.wait()
		snapshot := c.snapshot()
		known := c.get(some(c.restless, s.world.names)[0])
		if known == nil {
			continue
		}
		r := Reservation{Claim: known, Allocation: c.choose(snapshot.Usage)}
		if c.reserve(snapshot, pod, r) != nil {
			continue
		}
		c.writeFaulty(s, r)
		c.release(known.UID, pod)
	}
}

// writeFaulty writes until it knows what has become of the write: after any error
// it reads.
func (c *client) writeFaulty(s *faultyServer, r Reservation) {
	latest := r.Claim
	for {
		answer, err := s.write(latest, r.Allocation)
		for errors.Is(err, errAnswerLost) || apierrors.IsConflict(err) {
			if answer, err = s.read(latest.Name); err == nil && answer != nil && answer.UID == r.Claim.UID && answer.Status.Allocation == nil {
				break // not written, or taken away again
			}
		}
		switch {
		case err != nil:
			s.wait()
		case answer == nil || answer.UID != r.Claim.UID:
			return // gone
		case answer.Status.Allocation == nil:
			_ = c.assume(answer)
			latest = answer
			s.wait()
		default:
			_ = c.assume(answer) // fails if the watch has seen it go
			return
		}
	}
}

// faultyServer is a world behind a network.
type faultyServer struct {
	world *world
	feeds sync.WaitGroup // of watches

	mutex  sync.Mutex
	random *rand.Rand
	seen   map[string]int // faults, by kind
}

var _ cache.ListerWatcherWithContext = &faultyServer{}

var errAnswerLost = errors.New("timeout: it may or may not have taken effect")

// history that the server keeps for watches
const kept = 6

// wait is a network's latency, or a goroutine's.
func (s *faultyServer) wait() { time.Sleep(time.Duration(s.chance(20)) * time.Millisecond) }

func (s *faultyServer) chance(of int) int {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	return s.random.IntN(of)
}

func (s *faultyServer) saw(fault string) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.seen[fault]++
}

// refuse is an error of a server that is in trouble, or nil.
func (s *faultyServer) refuse() error {
	switch s.chance(8) {
	case 0:
		s.saw("500")
		return apierrors.NewInternalError(errors.New("etcd has no leader"))
	case 1:
		s.saw("429")
		return apierrors.NewTooManyRequests("slow down", 1)
	}
	return nil
}

// write allocates a claim, with a resourceVersion precondition.
func (s *faultyServer) write(c *resourceapi.ResourceClaim, a *resourceapi.AllocationResult) (*resourceapi.ResourceClaim, error) {
	s.wait()
	if err := s.refuse(); err != nil {
		return nil, err
	}
	conflict := false
	answer := s.world.write(c.Name, func(old *resourceapi.ResourceClaim) (*resourceapi.ResourceClaim, bool) {
		if conflict = old == nil || old.ResourceVersion != c.ResourceVersion; conflict {
			return nil, false
		}
		old.Status.Allocation = a
		return old, true
	})
	if conflict {
		s.saw("conflict")
		return nil, apierrors.NewConflict(resourceapi.Resource("resourceclaims"), c.Name, errors.New("it has been changed"))
	}
	s.wait()
	if s.chance(4) == 0 {
		s.saw("answer lost")
		return nil, errAnswerLost
	}
	if s.chance(2) == 0 {
		s.saw("watch before the answer")
		time.Sleep(time.Second)
	}
	return answer, nil
}

func (s *faultyServer) read(name string) (*resourceapi.ResourceClaim, error) {
	s.wait()
	if err := s.refuse(); err != nil {
		return nil, errors.Join(errAnswerLost, err)
	}
	return s.world.read(name), nil
}

func (s *faultyServer) IsWatchListSemanticsUnSupported() bool { return true }

func (s *faultyServer) List(options metav1.ListOptions) (runtime.Object, error) {
	return s.ListWithContext(context.Background(), options)
}

func (s *faultyServer) Watch(options metav1.ListOptions) (watch.Interface, error) {
	return s.WatchWithContext(context.Background(), options)
}

// ListWithContext answers with a revision that is not older than the one asked
// for, as a server does that answers from its cache.
func (s *faultyServer) ListWithContext(_ context.Context, options metav1.ListOptions) (runtime.Object, error) {
	s.wait()
	if err := s.refuse(); err != nil {
		return nil, err
	}
	now := s.world.revisionNow()
	from, err := strconv.Atoi(options.ResourceVersion)
	if err != nil { // the newest
		from = now
	}
	revision := now - s.chance(min(3, now-max(from, 1)+1))
	if revision > from+1 && from > 0 {
		s.saw("relist over a gap")
	}
	list := &resourceapi.ResourceClaimList{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(revision)}}
	for _, c := range s.world.at(revision) {
		list.Items = append(list.Items, *c)
	}
	return list, nil
}

func (s *faultyServer) WatchWithContext(_ context.Context, options metav1.ListOptions) (watch.Interface, error) {
	s.wait()
	if err := s.refuse(); err != nil {
		return nil, err
	}
	from, err := strconv.Atoi(options.ResourceVersion)
	if err != nil {
		return nil, apierrors.NewBadRequest("a watch from " + options.ResourceVersion)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stream := &faultyWatch{events: make(chan watch.Event), cancel: cancel}
	s.feeds.Go(func() { s.feed(ctx, stream, from) })
	return stream, nil
}

// faultyWatch is the client's side of a watch.
type faultyWatch struct {
	events chan watch.Event
	cancel context.CancelFunc
}

func (w *faultyWatch) ResultChan() <-chan watch.Event { return w.events }
func (w *faultyWatch) Stop()                          { w.cancel() }

// feed sends what happens after a revision, until the client stops, the
// connection breaks, or the server has forgotten that revision.
func (s *faultyServer) feed(ctx context.Context, stream *faultyWatch, seen int) {
	defer close(stream.events)
	send := func(kind watch.EventType, obj runtime.Object) {
		select {
		case stream.events <- watch.Event{Type: kind, Object: obj}:
		case <-ctx.Done():
		}
	}
	for ctx.Err() == nil {
		s.wait()
		now := s.world.revisionNow()
		switch choice := s.chance(24); {
		case now-seen > kept:
			s.saw("410")
			send(watch.Error, &apierrors.NewResourceExpired("too old").ErrStatus)
			return
		case choice < 3 && now > seen:
			s.saw("watch closed")
			return
		case choice == 3 && now > seen:
			time.Sleep(5 * time.Second) // lags until much has happened
		case choice == 4 && seen > 1:
			s.saw("event again")
			send(changed(s.world.at(seen-1), s.world.at(seen), seen))
		case choice == 5 && seen > 2:
			s.saw("stale event") // the Reflector goes on from there when it watches again
			old := max(2, seen-s.chance(kept))
			send(changed(s.world.at(old-1), s.world.at(old), old))
		case seen == now:
			s.saw("bookmark")
			send(watch.Bookmark, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.Itoa(seen)}})
			time.Sleep(time.Duration(1+s.chance(20)) * time.Second)
		default:
			seen++
			kind, claim := changed(s.world.at(seen-1), s.world.at(seen), seen)
			send(kind, claim)
			if kind == watch.Deleted && s.chance(2) == 0 {
				s.saw("change after its deletion")
				send(watch.Modified, s.world.at(seen - 1)[claim.Name])
			}
		}
	}
}

// changed is the event of one revision.
func changed(before, after map[string]*resourceapi.ResourceClaim, revision int) (watch.EventType, *resourceapi.ResourceClaim) {
	for _, name := range slices.Sorted(maps.Keys(mergedNames(before, after))) {
		switch {
		case before[name] == after[name]:
		case after[name] == nil:
			last := before[name].DeepCopy()
			last.ResourceVersion = strconv.Itoa(revision)
			return watch.Deleted, last
		case before[name] == nil:
			return watch.Added, after[name]
		default:
			return watch.Modified, after[name]
		}
	}
	panic(fmt.Sprintf("nothing happened at revision %d", revision))
}

func mergedNames(a, b map[string]*resourceapi.ResourceClaim) map[string]*resourceapi.ResourceClaim {
	merged := maps.Clone(a)
	maps.Copy(merged, b)
	return merged
}
