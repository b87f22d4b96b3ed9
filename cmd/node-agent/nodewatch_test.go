// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
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

func newNodeAPI(t *testing.T) *nodeAPI {
	api := &nodeAPI{Clientset: fake.NewSimpleClientset()}
	t.Cleanup(func() {
		if api.events != nil {
			api.events.Stop()
		}
	})
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
		api.events = watch.NewFake() // as the real one it waits until each event is taken
		return true, api.events, api.watchErr
	})
	return api
}

type fieldsOf string

func (f fieldsOf) Has(string) bool   { return true }
func (f fieldsOf) Get(string) string { return string(f) }

// look looks at the Node when all that the watch has said has been taken.
func look(ctx context.Context, w *nodeWatch) (*corev1.Node, error) {
	synctest.Wait()
	return w.Node(ctx)
}

func nodeOf(version string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1", ResourceVersion: version}}
}

// TestTheNodeIsReadOnceAndWatched: in an hour it costs two requests for each time that the watch ends, and a change is known at the
// next look.
func TestTheNodeIsReadOnceAndWatched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api, clock := newNodeAPI(t), testingclock.NewFakePassiveClock(time.Now())
		w := &nodeWatch{client: api, name: "node-1", clock: clock}
		api.version = "7"
		see := func(want string) {
			t.Helper()
			clock.SetTime(clock.Now().Add(time.Second))
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel() // the watch outlives the call
			if node, err := look(ctx, w); err != nil || node.ResourceVersion != want {
				t.Errorf("%v, %v; want version %s", node, err, want)
			}
		}
		for range 1800 {
			see("7")
		}
		api.events.Modify(nodeOf("8"))
		api.events.Modify(nodeOf("9"))
		see("9")
		for range 1800 {
			see("9")
		}
		// The API server that is asked next is behind, and then the version is too old to be watched.
		within := func(least, most int, version string) {
			t.Helper()
			asked := len(api.asked)
			for second := range most + 1 {
				clock.SetTime(clock.Now().Add(time.Second))
				if _, err := look(t.Context(), w); err != nil {
					t.Error(err)
				}
				if is := len(api.asked) > asked; is && second < least || !is && second == most {
					t.Errorf("after %d s it is read: %t; want that from %d s on, within %d s", second, is, least, most)
				}
			}
			see(version)
		}
		api.events.Stop()
		api.version = "10"
		within(1, 6, "10")
		clock.SetTime(clock.Now().Add(time.Hour))
		api.events.Error(&metav1.Status{Reason: metav1.StatusReasonExpired})
		within(1, 6, "10")
		api.events.Stop() // at once: it might end again and again
		within(0, 11, "10")
		want := []string{"get ", "watch 7", "get 9", "watch 10", "get 10", "watch 10", "get 10", "watch 10"}
		if !slices.Equal(api.asked, want) {
			t.Errorf("asked %q, want %q", api.asked, want)
		}
	})
}

// TestAgentsDoNotAskTogether when the API server ends all watches at once, or answers none.
func TestAgentsDoNotAskTogether(t *testing.T) {
	for name, end := range map[string]func(*nodeAPI){
		"watches end": func(api *nodeAPI) { api.events.Stop() },
		"away": func(api *nodeAPI) {
			api.events.Stop()
			api.err = errors.New("the API server is away")
		},
		"busy": func(api *nodeAPI) {
			api.events.Stop()
			api.err = apierrors.NewTooManyRequests("busy", 1)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const agents, seconds = 200, 60
				begun := time.Now()
				var at [seconds]int
				for range agents {
					api, clock := newNodeAPI(t), testingclock.NewFakePassiveClock(begun)
					w := &nodeWatch{client: api, name: "node-1", clock: clock}
					if _, err := look(t.Context(), w); err != nil {
						t.Fatal(err)
					}
					clock.SetTime(begun.Add(time.Hour))
					end(api)
					var said error
					for second := range seconds {
						asked := len(api.asked)
						_, err := look(t.Context(), w)
						if len(api.asked) > asked {
							at[second]++
							said = api.err
						}
						if !errors.Is(err, said) {
							t.Fatalf("after %d s: %v, want what was said last: %v", second, err, said)
						}
						clock.SetTime(clock.Now().Add(time.Second))
					}
				}
				sum := 0
				for second, n := range at {
					sum += n
					if n > agents/2 {
						t.Errorf("%d of %d agents ask in second %d", n, agents, second)
					}
				}
				if most := agents * seconds / 5; sum > most {
					t.Errorf("%d agents ask %d times in %d s, want at most %d times", agents, sum, seconds, most)
				}
			})
		})
	}
}

// TestANodeIsNeverReadAsItWasBefore: an API server that is behind does not give the driver back to the agent. One that does not catch up is
// asked for what etcd has.
func TestANodeIsNeverReadAsItWasBefore(t *testing.T) {
	api, clock := newNodeAPI(t), testingclock.NewFakePassiveClock(time.Now())
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
		clock.SetTime(clock.Now().Add(2 * nodeInterval))
	}
	want := []string{"get ", "watch 7", "get 7", "watch 9", "get 9", "get ", "watch 3", "get 3", "watch 3"}
	if !slices.Equal(api.asked, want) {
		t.Errorf("asked %q, want %q", api.asked, want)
	}
}

// TestANodeThatMayNotBeWatchedIsReadInstead: the role of an older version lacks that right. When it has it the Node is watched. A Node that
// is gone is told as such.
func TestANodeThatMayNotBeWatchedIsReadInstead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api, clock := newNodeAPI(t), testingclock.NewFakePassiveClock(time.Now())
		forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "nodes"}, "node-1", nil)
		api.version, api.watchErr = "7", forbidden
		logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
		ctx := klog.NewContext(t.Context(), logger)
		w := &nodeWatch{client: api, name: "node-1", clock: clock}
		asked := func(of time.Duration) (gets, watches int) {
			t.Helper()
			api.asked = nil
			for end := clock.Now().Add(of); clock.Now().Before(end); clock.SetTime(clock.Now().Add(time.Second)) {
				if _, err := look(ctx, w); err != nil {
					t.Error(err)
				}
			}
			for _, what := range api.asked {
				if strings.HasPrefix(what, "watch ") {
					watches++
				} else {
					gets++
				}
			}
			return gets, watches
		}
		if gets, watches := asked(time.Hour); gets < 3600/11 || gets > 3600/5 || watches < 3 || watches > 6 {
			t.Errorf("read %d times in an hour, and %d times tried to watch", gets, watches)
		}
		api.watchErr = nil
		if _, watches := asked(2*forbiddenInterval + time.Minute); watches != 1 {
			t.Errorf("watched %d times when it may be", watches)
		}
		if gets, watches := asked(time.Hour); gets+watches != 0 {
			t.Errorf("read %d times and watched %d times while it is watched", gets, watches)
		}

		// Each reason is told once.
		for _, err := range []error{errors.New("no watch today"), errors.New("no connection"), nil} {
			api.watchErr = err
			if err != nil && w.events != nil {
				api.events.Stop()
			}
			asked(time.Hour)
		}
		api.events.Error(&metav1.Status{Message: "too old resource version: 7 (9)"})
		asked(time.Minute)
		output := logger.GetSink().(ktesting.Underlier).GetBuffer().String()
		for _, reason := range []string{forbidden.Error(), "no watch today", "no connection", "too old resource version"} {
			if n := strings.Count(output, strings.ReplaceAll(reason, `"`, `\"`)); n != 1 {
				t.Errorf("%q is told %d times:\n%s", reason, n, output)
			}
		}

		api.events.Stop()
		api.err = apierrors.NewNotFound(schema.GroupResource{Resource: "nodes"}, "node-1")
		clock.SetTime(clock.Now().Add(2 * nodeInterval))
		_, _ = look(ctx, w)
		clock.SetTime(clock.Now().Add(2 * nodeInterval))
		if _, err := look(ctx, w); !apierrors.IsNotFound(err) {
			t.Errorf("gone: %v", err)
		}
	})
}
