// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/component-base/metrics/testutil"

	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// A relist after a gap brings two claims that no event told of, ours first, although the other one was allocated before
// it. Neither the order in the list nor the versions of the objects, which move with every reservation, tell who was first.
func TestRelistThatDeliversOurClaimBeforeAnOlderConflictingOne(t *testing.T) {
	ours, theirs := claim("a-ours", 15, results{}.device("a", "gpu-0")), claim("b-theirs", 14, results{}.device("a", "gpu-0"))
	touched := claim("b-theirs", 17, results{}.device("a", "gpu-0"))
	tests := map[string]struct {
		see   func(s *scheduler)
		want  tracker.Outcome
		other string
	}{
		"both in the gap": {
			see:  func(s *scheduler) { s.list(20, ours, theirs) },
			want: tracker.Undecided, other: "b-theirs",
		},
		"both in the gap, the other one touched afterwards": {
			see:  func(s *scheduler) { s.list(20, ours, touched) },
			want: tracker.Undecided, other: "b-theirs",
		},
		"the other one before the gap": {
			see:  func(s *scheduler) { s.watch(theirs); s.list(20, ours, theirs) },
			want: tracker.Lost, other: "b-theirs",
		},
		"the other one before the gap, touched in the gap": {
			see:  func(s *scheduler) { s.watch(theirs); s.list(20, ours, touched) },
			want: tracker.Undecided, other: "b-theirs", // it may have been given back and taken again
		},
		"the other one after the gap": {
			see:  func(s *scheduler) { s.list(20, ours); s.watch(claim("b-theirs", 21, results{}.device("a", "gpu-0"))) },
			want: tracker.Fits,
		},
		"our answer is known before the list": {
			see: func(s *scheduler) {
				if err := s.tracker.Assume(ours); err != nil {
					panic(err)
				}
				s.list(20, ours, theirs)
			},
			want: tracker.Undecided, other: "b-theirs",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(slice("a", whole("gpu-0")))
			s.list(10)
			tc.see(s)
			s.wantVerdict(t, ours, usage.View{}, tc.want, tc.other)
		})
	}
}

// The other scheduler has allocated a partition that our inventory does not know yet: it may take what ours takes.
func TestCounterConflictWithALaggingSlice(t *testing.T) {
	counters := map[string]string{"memory": "80Gi"}
	before := withCounters("a", counters, partition("ours", "40Gi"))
	small := withCounters("a", counters, partition("ours", "40Gi"), partition("new", "40Gi"))
	large := withCounters("a", counters, partition("ours", "40Gi"), partition("new", "80Gi"))
	theirs, ours := claim("theirs", 11, results{}.device("a", "new")), claim("ours", 12, results{}.device("a", "ours"))

	setup := func() *scheduler {
		s := newScheduler(before...)
		s.list(10)
		s.watch(theirs)
		s.watch(ours)
		return s
	}
	s := setup()
	s.wantVerdict(t, ours, usage.View{}, tracker.Undecided, "theirs")
	s.store.SetSlice(small[0])
	s.wantVerdict(t, ours, usage.View{}, tracker.Fits, "")

	s = setup()
	s.store.SetSlice(large[0])
	s.wantVerdict(t, ours, usage.View{}, tracker.Lost, "theirs")

	// The other way round: they came second, and it is they that give way.
	s = newScheduler(before...)
	s.list(10)
	s.watch(ours)
	s.watch(claim("theirs", 13, results{}.device("a", "new")))
	s.wantVerdict(t, ours, usage.View{}, tracker.Fits, "")

	// A device that has gone, and that its claim held when ours was decided, does not keep us from the pool for ever.
	s = newScheduler(before...)
	s.list(10, claim("theirs", 5, results{}.device("a", "new")))
	decidedOn := s.tracker.Snapshot().Usage
	s.watch(ours)
	s.wantVerdict(t, ours, decidedOn, tracker.Fits, "")
}

// A GPU is offered in parts from now on, and the other scheduler has taken one. To us it is a GPU without counters still, and may be
// taken as a whole.
func TestCounterConflictWithASliceThatHadNoCounters(t *testing.T) {
	parts := withCounters("a", map[string]string{"memory": "80Gi"}, partition("gpu-0", "80Gi"), partition("gpu-0-mig", "40Gi"), whole("gpu-1"))
	for _, s := range parts {
		s.Spec.Pool.Generation = 2
	}
	theirs := claim("theirs", 11, results{}.device("a", "gpu-0-mig"))
	tests := map[string]struct {
		ours *resourceapi.ResourceClaim
		then tracker.Outcome
	}{
		"of that GPU":     {claim("ours", 12, results{}.device("a", "gpu-0")), tracker.Lost},
		"of another GPU":  {claim("ours", 12, results{}.device("a", "gpu-1")), tracker.Fits},
		"another one yet": {claim("ours", 12, results{}.device("a", "gpu-0").device("a", "gpu-1")), tracker.Lost},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			s := newScheduler(slice("a", whole("gpu-0"), whole("gpu-1")))
			s.list(10)
			s.watch(theirs)
			s.watch(tc.ours)
			s.wantVerdict(t, tc.ours, usage.View{}, tracker.Undecided, "theirs")
			for i, slice := range parts {
				s.store.SetSlice(slice)
				if i == 0 {
					s.wantVerdict(t, tc.ours, usage.View{}, tracker.Undecided, "theirs") // half of it is known
				}
			}
			other := ""
			if tc.then == tracker.Lost {
				other = "theirs"
			}
			s.wantVerdict(t, tc.ours, usage.View{}, tc.then, other)
		})
	}
}

// Of two schedulers that see each other's writes in order, exactly one passes, whichever was first.
func TestOfTwoWithAKnownOrderExactlyOnePasses(t *testing.T) {
	for _, first := range []string{"x", "y"} {
		second := map[string]string{"x": "y", "y": "x"}[first]
		a, b := claim(first, 11, results{}.device("a", "gpu-0")), claim(second, 12, results{}.device("a", "gpu-0"))
		for _, s := range []*scheduler{newScheduler(), newScheduler()} {
			s.list(10)
			s.watch(a)
			s.watch(b)
			s.wantVerdict(t, a, usage.View{}, tracker.Fits, "")
			s.wantVerdict(t, b, usage.View{}, tracker.Lost, first)
		}
	}
}

// A claim that is reserved for a further pod was allocated when it was, and not when that was written.
func TestAReservationDoesNotMoveTheTimeOfTheAllocation(t *testing.T) {
	gpu := results{}.device("a", "gpu-0")
	first, second := claim("first", 11, gpu), claim("second", 12, gpu)
	s := newScheduler()
	s.list(10)
	s.watch(first)
	s.watch(second)
	s.watch(claim("first", 13, gpu))
	s.wantVerdict(t, first, usage.View{}, tracker.Fits, "")
	s.wantVerdict(t, second, usage.View{}, tracker.Lost, "first")
}

// A claim that is about to give way makes a third one give way, which fits as soon as it has.
func TestALoserThatHasNotGivenWayYet(t *testing.T) {
	gpu := results{}.device("a", "gpu-0")
	first, loser, third := claim("first", 11, gpu), claim("loser", 12, gpu), claim("third", 14, gpu)
	s := newScheduler()
	s.list(10)
	s.watch(first)
	s.watch(loser)
	s.watch(claim("first", 13, nil)) // its pod has ended
	s.watch(third)
	s.wantVerdict(t, third, usage.View{}, tracker.Lost, "loser")
	s.watch(claim("loser", 15, nil))
	s.wantVerdict(t, third, usage.View{}, tracker.Fits, "")
}

// Nor does a loser make room: that it has a share of a device already is no reason to pass with another share, because with the loser
// the counters go that it took for the device.
func TestALoserThatSharesADevice(t *testing.T) {
	all := shareable("all", "80Gi")
	all.ConsumesCounters = partition("", "80Gi").ConsumesCounters
	s := newScheduler(withCounters("a", map[string]string{"memory": "80Gi"}, partition("part", "40Gi"), all)...)
	first := claim("first", 11, results{}.device("a", "part"))
	loser, third := claim("loser", 12, results{}.share("a", "all", "s1", "10Gi")), claim("third", 13, results{}.share("a", "all", "s2", "10Gi"))
	s.list(10)
	s.watch(first)
	s.watch(loser)
	s.watch(third)
	s.wantVerdict(t, loser, usage.View{}, tracker.Lost, "first")
	s.wantVerdict(t, third, usage.View{}, tracker.Lost, "first")
	s.watch(claim("loser", 14, nil))
	s.wantVerdict(t, third, usage.View{}, tracker.Lost, "first")
	s.watch(claim("first", 15, nil))
	s.wantVerdict(t, third, usage.View{}, tracker.Fits, "")
}

func TestPass(t *testing.T) {
	gpu0, gpu1 := results{}.device("a", "gpu-0"), results{}.device("a", "gpu-1")
	tests := map[string]struct {
		claims []*resourceapi.ResourceClaim
		// then happens a second later.
		then       func(s *scheduler)
		want       []string
		wantYields int
		wantTook   time.Duration
		wantResult string
	}{
		"all have been seen": {
			claims: []*resourceapi.ResourceClaim{claim("seen", 5, gpu1)}, wantResult: resultPassed,
		},
		"one is seen later": {
			claims: []*resourceapi.ResourceClaim{claim("seen", 5, gpu1), claim("x", 12, gpu0)},
			then:   func(s *scheduler) { s.watch(claim("x", 12, gpu0)) }, wantTook: time.Second, wantResult: resultPassed,
		},
		"one comes second": {
			claims: []*resourceapi.ResourceClaim{claim("seen", 5, gpu1), claim("x", 12, gpu0)},
			then:   func(s *scheduler) { s.watch(claim("y", 11, gpu0)); s.watch(claim("x", 12, gpu0)) }, wantTook: time.Second,
			want: []string{"claim default/x gives way: claim default/y (UID y) was allocated earlier: device gpu.example.com/a/gpu-0"}, wantYields: 1, wantResult: resultLost,
		},
		"both come second": {
			claims: []*resourceapi.ResourceClaim{claim("w", 13, gpu1), claim("x", 12, gpu0)},
			then: func(s *scheduler) {
				s.watch(claim("y", 11, gpu0))
				s.watch(claim("x", 12, gpu0))
				s.watch(claim("w", 13, gpu1))
			}, wantTook: time.Second,
			want: []string{"claim default/y (UID y)", "claim default/seen (UID seen)"}, wantYields: 2, wantResult: resultLost,
		},
		"it is not known who was first": {
			claims: []*resourceapi.ResourceClaim{claim("x", 12, gpu0)},
			then:   func(s *scheduler) { s.list(20, claim("x", 12, gpu0), claim("y", 11, gpu0)) }, wantTook: time.Second,
			want: []string{"claim default/y (UID y) may have been allocated earlier"}, wantYields: 1, wantResult: resultUndecided,
		},
		"the watch is silent": {
			claims: []*resourceapi.ResourceClaim{claim("x", 12, gpu0)}, wantTook: time.Minute,
			want: []string{"claim default/x", `at resourceVersion "10", not yet at 12`, "timed out after 1m0s"}, wantResult: resultTimeout,
		},
		"the claim is deleted": {
			claims: []*resourceapi.ResourceClaim{claim("x", 12, gpu0)}, then: func(s *scheduler) { s.list(20) }, wantTook: time.Second,
			want: []string{"claim default/x (UID x): claim does not exist any more"}, wantResult: resultChanged,
		},
		"a version that is none": {
			claims: []*resourceapi.ResourceClaim{claim("x", 0, gpu0)}, want: []string{`claim default/x: wait for resourceVersion "0"`}, wantResult: resultError,
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newScheduler(slice("a", whole("gpu-0"), whole("gpu-1")))
				s.list(10, claim("seen", 5, gpu1))
				fence := New(s.tracker, Options{Timeout: time.Minute})
				counted, waited := countOf(t, tc.wantResult), waits(t)
				if tc.then != nil {
					time.AfterFunc(time.Second, func() { tc.then(s) })
				}
				start := time.Now()
				err := fence.Pass(t.Context(), tc.claims, decidedElsewhere)
				if took := time.Since(start); took != tc.wantTook {
					t.Errorf("took %s, want %s", took, tc.wantTook)
				}
				if (err == nil) != (tc.want == nil) {
					t.Fatalf("error %v", err)
				}
				for _, want := range tc.want {
					if !strings.Contains(err.Error(), want) {
						t.Errorf("error %v, want %q", err, want)
					}
				}
				if yields := len(Yields(err)); yields != tc.wantYields {
					t.Errorf("%d claims give way, want %d", yields, tc.wantYields)
				}
				for _, yield := range Yields(err) {
					if yield.Allocation == nil {
						t.Errorf("claim %s gives way with no allocation", yield.Claim)
					}
				}
				if n := waits(t) - waited; n != 1 {
					t.Errorf("%d waits were measured", n)
				}
				if n := countOf(t, tc.wantResult) - counted; n != 1 {
					t.Errorf("counted %v times as %s", n, tc.wantResult)
				}
			})
		})
	}
}

func countOf(t *testing.T, result string) float64 {
	t.Helper()
	n, err := testutil.GetCounterMetricValue(passagesTotal.WithLabelValues(result))
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func waits(t *testing.T) uint64 {
	t.Helper()
	n, err := testutil.GetHistogramMetricCount(waitDuration.ObserverMetric)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestPassEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScheduler()
		s.list(10)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		counted := countOf(t, resultCanceled)
		err := New(s.tracker, Options{Timeout: time.Minute}).Pass(ctx, []*resourceapi.ResourceClaim{claim("x", 12, results{}.device("a", "gpu-0"))}, decidedElsewhere)
		if !errors.Is(err, context.Canceled) || errors.Is(err, ErrTimeout) {
			t.Errorf("error %v", err)
		}
		if n := countOf(t, resultCanceled) - counted; n != 1 {
			t.Errorf("counted %v times", n)
		}
	})
}

// foreign is a context of another make: what is derived from it has a goroutine until it is over.
type foreign struct{ context.Context }

func (foreign) Done() <-chan struct{} { return make(chan struct{}) }

// What Pass begins ends with it, however long its timeout is. Else the bubble would not end.
func TestPassLeavesNothingBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newScheduler()
		x := claim("x", 5, results{}.device("a", "gpu-0"))
		s.list(10, x)
		if err := New(s.tracker, Options{Timeout: 1 << 62}).Pass(foreign{t.Context()}, []*resourceapi.ResourceClaim{x}, decidedElsewhere); err != nil {
			t.Error(err)
		}
	})
}

func TestPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		took := map[time.Duration]bool{}
		fence := New(newScheduler().tracker, Options{Jitter: time.Second})
		for range 100 {
			start := time.Now()
			fence.Pause(t.Context())
			took[time.Since(start)] = true
			if time.Since(start) >= time.Second {
				t.Errorf("paused for %s", time.Since(start))
			}
		}
		if len(took) < 50 {
			t.Errorf("100 pauses are of %d different lengths", len(took))
		}
		start := time.Now()
		New(newScheduler().tracker, Options{}).Pause(t.Context())
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		New(newScheduler().tracker, Options{Jitter: 100 * time.Hour}).Pause(ctx)
		if took := time.Since(start); took != 0 {
			t.Errorf("paused for %s without jitter, or when it is over", took)
		}
	})
}
