// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
	"k8s.io/utils/clock"
)

// TestRunLooksEveryMinute, and when it is asked to and a minute after that, and ends with its context.
func TestRunLooksEveryMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		_, ctx := ktesting.NewTestContext(t)
		ctx, cancel := context.WithCancel(ctx)
		s.reconciler.opts.Clock = clock.RealClock{}
		s.registered = time.Now().Add(-time.Hour)
		looks, again := make(chan Summary), make(chan struct{})
		s.reconciler.opts.Again = again
		s.reconciler.opts.Seen = func(summary Summary) { looks <- summary }
		began := time.Now()
		done := make(chan struct{})
		go func() { defer close(done); s.reconciler.Run(ctx) }()
		look := func(at time.Duration, released int) {
			t.Helper()
			summary := <-looks
			if took := time.Since(began); took != at || summary.Released != released {
				t.Errorf("look after %s, released %d; want after %s, %d", took, summary.Released, at, released)
			}
		}
		look(0, 0)
		time.Sleep(Interval / 2)
		again <- struct{}{}
		look(Interval/2, 0)
		look(Interval, 1)
		look(3*Interval/2, 0)
		look(2*Interval, 0)
		cancel()
		<-done
	})
}

// logged returns a context whose log the test can read.
func logged(t *testing.T) (ctx context.Context, lines func(about string) int) {
	logger := ktesting.NewLogger(t, ktesting.NewConfig(ktesting.BufferLogs(true)))
	return klog.NewContext(t.Context(), logger), func(about string) int {
		return strings.Count(logger.GetSink().(ktesting.Underlier).GetBuffer().String(), about)
	}
}

// TestWhatFailsIsSaidOnce, and again once it has been otherwise. That the agent ends is no failure.
func TestWhatFailsIsSaidOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScene(t)
		ctx, lines := logged(t)
		ctx, cancel := context.WithCancel(ctx)
		s.reconciler.opts.Clock = clock.RealClock{}
		looks := make(chan struct{})
		s.reconciler.opts.Seen = func(Summary) { <-looks }
		full, broken := errors.New("disk full"), errors.New("disk broken")
		fails := []error{full, full, broken, nil, broken, nil}
		s.reconciler.opts.Repair = func(context.Context) error {
			s.repaired++
			if s.repaired > len(fails) {
				cancel()
				return errors.New("was cut off")
			}
			return fails[s.repaired-1]
		}
		done := make(chan struct{})
		go func() { defer close(done); s.reconciler.Run(ctx) }()
		for range len(fails) + 1 {
			looks <- struct{}{}
		}
		<-done
		got := map[string]int{}
		for _, about := range []string{full.Error(), broken.Error(), "was cut off", "reconcile/UnhandledError: The ledger could not be compared"} {
			got[about] = lines(about)
		}
		if diff := cmp.Diff(map[string]int{full.Error(): 1, broken.Error(): 2, "was cut off": 0, "reconcile/UnhandledError: The ledger could not be compared": 3}, got); diff != "" {
			t.Errorf("lines (-want +got):\n%s", diff)
		}
	})
}

// TestWhyAClaimStaysIsSaidOnce for each reason, also of a CDI file without a record.
func TestWhyAClaimStaysIsSaidOnce(t *testing.T) {
	s := newScene(t)
	s.strays = slices.Insert(s.strays, 0, lost())
	ctx, lines := logged(t)
	for _, n := range []int{1, 1, 2, 2, 1} {
		s.processes["gpu-0"], s.processes["gpu-2"] = n, n
		s.clock.Step(Interval)
		if err := s.reconciler.Once(ctx); err != nil {
			t.Fatal(err)
		}
	}
	for about, want := range map[string]int{
		"Claim is not allocated any more and stays prepared": 3, "CDI specification of a claim that is not in the ledger stays": 3,
		"1 processes": 4, "2 processes": 2,
	} {
		if got := lines(about); got != want {
			t.Errorf("%q is in the log %d times, want %d", about, got, want)
		}
	}
}

// TestNothingOfALookGoesOn when it is over.
func TestNothingOfALookGoesOn(t *testing.T) {
	s := newScene(t)
	var asked []context.Context
	claim := s.reconciler.opts.Sources.Claim
	s.reconciler.opts.Sources.Claim = func(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
		asked = append(asked, ctx)
		return claim(ctx, namespace, name)
	}
	s.reconciler.opts.Repair = func(ctx context.Context) error { asked = append(asked, ctx); return nil }
	if err := s.look(); err != nil {
		t.Fatal(err)
	}
	s.reconciler.UseOf(t.Context(), entry())
	if len(asked) != 3 {
		t.Fatalf("asked %d times, want for the repair, the look and the use", len(asked))
	}
	for i, ctx := range asked {
		if ctx.Err() == nil {
			t.Errorf("the context of question %d goes on", i)
		}
	}
}

// TestWhoUsesAClaimIsAskedNow: the claim first, and the node's pods if it is known.
func TestWhoUsesAClaimIsAskedNow(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*scene)
		want   string
		ends   bool
		lists  int
	}{
		"a pod":                        {func(s *scene) {}, "used by pod default/pod, which is starting", false, 1},
		"a pod of another of its name": {func(s *scene) { s.claim = claimWith("next-uid") }, "which is being released: its pod is gone from the API server, and the kubelet has not unprepared it yet", true, 1},
		"the API server does not tell": {func(s *scene) { s.claimErr = errors.New("away") }, "and the API server does not tell who uses it: away", true, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScene(t)
			s.pods = []corev1.Pod{podWith("pod", corev1.PodPending, byName)}
			tc.change(s)
			use := s.reconciler.UseOf(t.Context(), entry())
			if use.Text != tc.want || use.Ends != tc.ends || s.podLists != tc.lists {
				t.Errorf("%+v after %d lists of pods, want %q, ends %t after %d", use, s.podLists, tc.want, tc.ends, tc.lists)
			}
		})
	}
}
