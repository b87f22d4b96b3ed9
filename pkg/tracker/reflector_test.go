// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"context"
	"errors"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
)

// server is a ListerWatcher that does what the test says.
type server struct {
	streaming bool // answers streamed lists

	mutex    sync.Mutex
	revision int
	claims   []resourceapi.ResourceClaim
	failures []error // of the next requests
	watcher  *watch.RaceFreeFakeWatcher
	requests []string
}

var _ cache.ListerWatcherWithContext = &server{}

func (s *server) IsWatchListSemanticsUnSupported() bool { return !s.streaming }

func (s *server) List(options metav1.ListOptions) (runtime.Object, error) {
	return s.ListWithContext(context.Background(), options)
}

func (s *server) Watch(options metav1.ListOptions) (watch.Interface, error) {
	return s.WatchWithContext(context.Background(), options)
}

func (s *server) ListWithContext(_ context.Context, options metav1.ListOptions) (runtime.Object, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.requests = append(s.requests, "list from "+options.ResourceVersion)
	if err := s.fail(); err != nil {
		return nil, err
	}
	list := &resourceapi.ResourceClaimList{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(s.revision)}}
	list.Items = append(list.Items, s.claims...)
	return list, nil
}

func (s *server) WatchWithContext(_ context.Context, options metav1.ListOptions) (watch.Interface, error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	request := "watch from " + options.ResourceVersion
	if options.SendInitialEvents != nil {
		request = "stream from " + options.ResourceVersion
	}
	s.requests = append(s.requests, request)
	if err := s.fail(); err != nil {
		return nil, err
	}
	s.watcher = watch.NewRaceFreeFake()
	if options.SendInitialEvents != nil {
		for i := range s.claims {
			s.watcher.Add(&s.claims[i])
		}
		s.watcher.Action(watch.Bookmark, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{
			ResourceVersion: strconv.Itoa(s.revision),
			Annotations:     map[string]string{metav1.InitialEventsAnnotationKey: "true"},
		}})
	}
	return s.watcher, nil
}

func (s *server) fail() error {
	if len(s.failures) == 0 {
		return nil
	}
	err := s.failures[0]
	s.failures = s.failures[1:]
	return err
}

// set changes what the next list answers.
func (s *server) set(revision int, claims ...*resourceapi.ResourceClaim) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.revision, s.claims = revision, nil
	for _, c := range claims {
		s.claims = append(s.claims, *c)
	}
}

func (s *server) failNext(errs ...error) {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	s.failures = errs
}

// takeRequests returns the requests since the last call.
func (s *server) takeRequests() []string {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	taken := s.requests
	s.requests = nil
	return taken
}

// run runs a tracker in a synctest bubble until the test ends.
func run(t *testing.T, tr *Tracker, lw cache.ListerWatcher) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { tr.Run(ctx, lw) })
	t.Cleanup(func() { cancel(); wg.Wait() })
}

func wantRequests(t *testing.T, s *server, step string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, s.takeRequests()); diff != "" {
		t.Errorf("%s: requests (-want +got):\n%s", step, diff)
	}
}

func TestReflectorListsWatchesAndListsAgainWhenTheWatchHasExpired(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, tr := &server{}, newTracker(t)
		s.set(10, claim("a", "ua", 5, gpu0))
		s.failNext(apierrors.NewServiceUnavailable("not yet"))
		run(t, tr, s)

		synctest.Wait()
		if tr.HasSynced() {
			t.Error("synced without a list")
		}
		must(t, tr.WaitForSync(t.Context()))
		synctest.Wait()
		wantHeld(t, tr, "listed", holders{gpu0: {"ua"}})
		wantRequests(t, s, "start", "list from 0", "list from 0", "watch from 10")

		s.watcher.Add(claim("b", "ub", 11))
		s.watcher.Modify(claim("b", "ub", 12, gpu1))
		s.watcher.Delete(claim("a", "ua", 13, gpu0))
		synctest.Wait()
		wantHeld(t, tr, "watched", holders{gpu1: {"ub"}})

		// The watch ends as watches do: it goes on where it was.
		s.watcher.Stop()
		time.Sleep(time.Minute)
		synctest.Wait()
		wantRequests(t, s, "watch closed", "watch from 13")
		wantHeld(t, tr, "watch closed", holders{gpu1: {"ub"}})

		// A bookmark moves on the revision from which it would go on.
		s.watcher.Action(watch.Bookmark, &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "15"}})
		synctest.Wait()
		if err := tr.Assume(claim("gone", "ug", 14, gpu0)); !errors.Is(err, ErrClaimGone) {
			t.Errorf("Assume() of what the watch would have brought before the bookmark = %v", err)
		}

		// We write, the watch has not brought it, and then it cannot go on.
		must(t, tr.Assume(claim("c", "uc", 25, gpu2)))
		s.set(20, claim("b", "ub", 18, gpu0))
		s.watcher.Error(&apierrors.NewResourceExpired("too old").ErrStatus)
		synctest.Wait()
		wantHeld(t, tr, "while the watch is broken", holders{gpu1: {"ub"}, gpu2: {"uc"}})
		time.Sleep(time.Minute)
		synctest.Wait()
		wantRequests(t, s, "watch expired", "list from 15", "watch from 20")
		wantHeld(t, tr, "listed again", holders{gpu0: {"ub"}, gpu2: {"uc"}})

		s.watcher.Add(claim("c", "uc", 25, gpu2))
		s.watcher.Delete(claim("c", "uc", 26, gpu2))
		synctest.Wait()
		wantHeld(t, tr, "the watch has caught up", holders{gpu0: {"ub"}})
	})
}

func TestReflectorStreamsTheList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, tr := &server{streaming: true}, newTracker(t)
		s.set(10, claim("b", "ub", 9, gpu1), claim("a", "ua", 5, gpu0))
		run(t, tr, s)
		must(t, tr.WaitForSync(t.Context()))
		synctest.Wait()
		wantRequests(t, s, "start", "stream from ")
		wantHeld(t, tr, "streamed", holders{gpu0: {"ua"}, gpu1: {"ub"}})

		s.watcher.Modify(claim("a", "ua", 11))
		synctest.Wait()
		wantHeld(t, tr, "watched", holders{gpu1: {"ub"}})

		s.set(20, claim("a", "ua", 15, gpu1))
		s.watcher.Error(&apierrors.NewResourceExpired("too old").ErrStatus)
		time.Sleep(time.Minute)
		synctest.Wait()
		wantRequests(t, s, "watch expired", "stream from 11")
		wantHeld(t, tr, "streamed again", holders{gpu1: {"ua"}})
	})
}

func TestWaitForSyncEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cause := errors.New("shutting down")
	cancel(cause)
	tr := newTracker(t)
	if err := tr.WaitForSync(ctx); !errors.Is(err, cause) {
		t.Errorf("WaitForSync() = %v, want %v", err, cause)
	}
	if tr.HasSynced() {
		t.Error("synced without a list")
	}
	relist(t, tr, 1)
	must(t, tr.WaitForSync(ctx))
	if !tr.HasSynced() {
		t.Error("not synced by a list")
	}
}

func TestRunEndsWithItsContextAndLeavesNoGoroutine(t *testing.T) {
	defer goleak.VerifyNone(t, goleak.IgnoreCurrent())
	s, tr := &server{}, newTracker(t)
	s.set(10, claim("a", "ua", 5, gpu0))
	tr.Subscribe(func(Event) {})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); tr.Run(ctx, s) }()
	must(t, tr.WaitForSync(ctx))
	tr.Run(ctx, s) // a second Run returns at once
	cancel()
	<-done

	must(t, tr.Assume(claim("a", "ua", 11)))
	if n := len(tr.events.pending); n != 0 {
		t.Errorf("%d events wait for nobody", n)
	}
}

func TestNewListWatchFollowsTheClaimsOfAllNamespaces(t *testing.T) {
	client := fake.NewSimpleClientset(claim("a", "ua", 5, gpu0))
	tr := newTracker(t)
	synced := make(chan struct{}, 10)
	tr.Subscribe(func(Event) { synced <- struct{}{} })
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { tr.Run(ctx, NewListWatch(client)) })
	defer wg.Wait()
	defer cancel()
	must(t, tr.WaitForSync(ctx))

	other := claim("b", "ub", 6, gpu1)
	other.Namespace = "other"
	if _, err := client.ResourceV1().ResourceClaims("other").Create(ctx, other, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	<-synced
	<-synced
	wantHeld(t, tr, "listed and watched", holders{gpu0: {"ua"}, gpu1: {"ub"}})
}
