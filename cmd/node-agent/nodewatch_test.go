package main

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	testingclock "k8s.io/utils/clock/testing"
)

// nodeAPI answers for one Node, and notes what it is asked.
type nodeAPI struct {
	*fake.Clientset
	asked []string
	// version of the Node that a get is answered with, or the error; watchErr is of a watch.
	version       string
	err, watchErr error
	events        *watch.FakeWatcher
}

func newNodeAPI() *nodeAPI {
	api := &nodeAPI{Clientset: fake.NewClientset()}
	api.PrependReactor("get", "nodes", func(action clienttesting.Action) (bool, runtime.Object, error) {
		api.asked = append(api.asked, "get "+action.(clienttesting.GetActionImpl).GetOptions.ResourceVersion)
		return true, nodeOf(api.version), api.err
	})
	api.PrependWatchReactor("nodes", func(action clienttesting.Action) (bool, watch.Interface, error) {
		of := action.(clienttesting.WatchActionImpl).GetWatchRestrictions()
		api.asked = append(api.asked, "watch "+of.ResourceVersion)
		if !of.Fields.Matches(fieldsOf("node-1")) || of.Fields.Matches(fieldsOf("node-2")) {
			return true, nil, errors.New("other nodes are watched")
		}
		api.events = watch.NewFakeWithChanSize(10, false)
		return true, api.events, api.watchErr
	})
	return api
}

type fieldsOf string

func (f fieldsOf) Has(string) bool   { return true }
func (f fieldsOf) Get(string) string { return string(f) }

func nodeOf(version string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", ResourceVersion: version}}
}

// TestTheNodeIsReadOnceAndWatched: in an hour it costs two requests for each time that the watch ends, and a change is known at the
// next look.
func TestTheNodeIsReadOnceAndWatched(t *testing.T) {
	api, clock := newNodeAPI(), testingclock.NewFakePassiveClock(time.Now())
	w := &nodeWatch{client: api, name: "node-1", clock: clock}
	api.version = "7"
	look := func(want string) {
		t.Helper()
		clock.SetTime(clock.Now().Add(time.Second))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel() // the watch outlives the call
		if node, err := w.Node(ctx); err != nil || node.ResourceVersion != want {
			t.Errorf("%v, %v; want version %s", node, err, want)
		}
	}
	for range 1800 {
		look("7")
	}
	api.events.Modify(nodeOf("8"))
	api.events.Modify(nodeOf("9"))
	look("9")
	for range 1800 {
		look("9")
	}
	// The API server that is asked next is behind, and then the version is too old to be watched.
	api.events.Stop()
	api.version = "10"
	look("10")
	api.events.Error(&metav1.Status{Reason: metav1.StatusReasonExpired})
	for range 4 {
		look("10") // not at once: it might end again and again
	}
	look("10")
	want := []string{"get ", "watch 7", "get 9", "watch 10", "get 10", "watch 10"}
	if !slices.Equal(api.asked, want) {
		t.Errorf("asked %q, want %q", api.asked, want)
	}
}

// TestANodeIsNeverReadAsItWasBefore: an API server that is behind does not give the driver back to the agent. One that does not catch up is
// asked for what etcd has.
func TestANodeIsNeverReadAsItWasBefore(t *testing.T) {
	api, clock := newNodeAPI(), testingclock.NewFakePassiveClock(time.Now())
	api.watchErr = errors.New("no watch today")
	w := &nodeWatch{client: api, name: "node-1", clock: clock}
	behind := apierrors.NewTimeoutError("Too large resource version: 9, current: 8", 1)
	for _, answer := range []struct {
		version string
		err     error
	}{{version: "7"}, {version: "9"}, {err: behind}, {version: "3"} /* etcd was put back */, {version: "3"}} {
		api.version, api.err = answer.version, answer.err
		node, err := w.Node(t.Context())
		if !errors.Is(err, answer.err) || err == nil && node.ResourceVersion != answer.version {
			t.Errorf("%+v: %v, %v", answer, node, err)
		}
		clock.SetTime(clock.Now().Add(nodeInterval))
	}
	want := []string{"get ", "watch 7", "get 7", "watch 9", "get 9", "get ", "watch 3", "get 3", "watch 3"}
	if !slices.Equal(api.asked, want) {
		t.Errorf("asked %q, want %q", api.asked, want)
	}
}

// TestANodeThatMayNotBeWatchedIsReadInstead: the role of an older version lacks that right. A Node that is gone is told as such.
func TestANodeThatMayNotBeWatchedIsReadInstead(t *testing.T) {
	api, clock := newNodeAPI(), testingclock.NewFakePassiveClock(time.Now())
	api.version, api.watchErr = "7", apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "node-1", nil)
	w := &nodeWatch{client: api, name: "node-1", clock: clock}
	for range 11 {
		if _, err := w.Node(t.Context()); err != nil {
			t.Error(err)
		}
		clock.SetTime(clock.Now().Add(time.Second))
	}
	if want := []string{"get ", "watch 7", "get 7", "get 7"}; !slices.Equal(api.asked, want) {
		t.Errorf("asked %q, want %q", api.asked, want)
	}
	// Nor is an API server asked more often that has nothing to say, or is away: all agents of a cluster would come at once.
	api.err, api.asked = apierrors.NewNotFound(schema.GroupResource{Resource: "nodes"}, "node-1"), nil
	clock.SetTime(clock.Now().Add(nodeInterval))
	for range 10 {
		if _, err := w.Node(t.Context()); !apierrors.IsNotFound(err) {
			t.Errorf("gone: %v", err)
		}
		clock.SetTime(clock.Now().Add(time.Second))
	}
	if want := []string{"get 7", "get "}; !slices.Equal(api.asked, want) {
		t.Errorf("asked %q, want %q", api.asked, want)
	}
}
