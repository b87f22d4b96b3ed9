// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package searchtime

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/demand"
)

func TestBudget(t *testing.T) {
	const timeout = 10 * time.Second
	for name, tc := range map[string]struct {
		timeout time.Duration
		begins  time.Duration // after the first long search
		has     time.Duration // 0 for no bound
	}{
		"the first long search":                  {timeout, 0, timeout},
		"while there is enough for another node": {timeout, timeout, timeout},
		"when less is left":                      {timeout, 2*timeout - time.Second, time.Second},
		"when nearly nothing is left":            {timeout, 2*timeout - 1, leastTimeout},
		"after that":                             {timeout, 10 * timeout, leastTimeout},
		"never more than the timeout":            {time.Millisecond, time.Second, time.Millisecond},
		"no timeout":                             {0, 10 * timeout, 0},
	} {
		t.Run(name, func(t *testing.T) {
			start := time.Unix(1, 0)
			now := start
			b := newBudget(tc.timeout, nil)
			b.now = func() time.Time { return now }
			b.Begin()
			now = start.Add(tc.begins)
			end := b.Begin()
			if tc.has == 0 {
				if now = now.Add(1000 * time.Hour); b.IsOver(end) {
					t.Error("it has an end")
				}
				return
			}
			if now = now.Add(tc.has - 1); b.IsOver(end) {
				t.Errorf("it is over after %v", tc.has-1)
			}
			if now = now.Add(1); !b.IsOver(end) {
				t.Errorf("it is not over after %v", tc.has)
			}
		})
	}
}

// TestEvaluationsOfOneAttemptShareItsTime uses it up in two parts. Another attempt has its own.
func TestEvaluationsOfOneAttemptShareItsTime(t *testing.T) {
	now := time.Unix(1, 0)
	clock := func() time.Time { return now }
	b, other := &Budget{now: clock, evaluation: demand.EvaluationTime}, &Budget{now: clock, evaluation: demand.EvaluationTime}
	for i, takes := range []time.Duration{demand.EvaluationTime - 1, 1, 0} {
		ctx, done := b.Evaluate(context.Background())
		if ended := ctx.Err() != nil; ended != (i == 2) && i != 1 { // of the second a nanosecond is left
			t.Errorf("evaluation %d: it has ended: %t", i, ended)
		}
		now = now.Add(takes)
		done()
	}
	ctx, done := b.Evaluate(context.Background())
	defer done()
	if !errors.Is(context.Cause(ctx), demand.ErrEvaluation) {
		t.Errorf("the time is used up, and the cause is %v", context.Cause(ctx))
	}
	ctx, done = other.Evaluate(context.Background())
	defer done()
	if ctx.Err() != nil {
		t.Errorf("another attempt: %v", ctx.Err())
	}
}

// TestOneAttemptHasNoMoreThanItsNamespaceHasSaved searches and evaluates, one after the other and at once, with a minute that is granted.
func TestOneAttemptHasNoMoreThanItsNamespaceHasSaved(t *testing.T) {
	type step struct {
		evaluate bool
		until    time.Duration // from the start on, within an hour
		has      time.Duration
	}
	for name, tc := range map[string]struct {
		steps  []step
		atOnce bool
		spent  time.Duration
	}{
		"a search":                 {steps: []step{{until: 30 * time.Second, has: time.Minute}}, spent: 30*time.Second - FreeTime},
		"less than is free":        {steps: []step{{until: FreeTime - 1, has: time.Minute}}},
		"two searches":             {steps: []step{{until: 30 * time.Second, has: time.Minute}, {until: 50 * time.Second, has: 30 * time.Second}}, spent: 50*time.Second - FreeTime},
		"two at once":              {steps: []step{{until: 30 * time.Second, has: time.Minute}, {until: 30 * time.Second, has: 50 * time.Second}}, atOnce: true, spent: 30*time.Second - FreeTime},
		"a search and CEL":         {steps: []step{{until: 59 * time.Second, has: time.Minute}, {evaluate: true, until: time.Minute, has: time.Second}}, spent: time.Minute - FreeTime},
		"CEL and a search":         {steps: []step{{evaluate: true, until: time.Second, has: demand.EvaluationTime}, {until: 2 * time.Second, has: 59 * time.Second}}, spent: 2*time.Second - FreeTime},
		"more than there is":       {steps: []step{{until: 2 * time.Minute, has: time.Minute}, {until: 2 * time.Minute}}, spent: 2*time.Minute - FreeTime},
		"CEL when nothing is left": {steps: []step{{until: time.Minute, has: time.Minute}, {evaluate: true, until: time.Minute}}, spent: time.Minute - FreeTime},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // the deadline of an evaluation is of the real clock
				start := time.Unix(1, 0)
				now := start
				s := NewShares(func() time.Time { return now }, demand.EvaluationTime)
				account := s.of(&v1.Pod{})
				account.saved = time.Minute - FreeTime
				b, ends := newBudget(time.Hour, account), []func(){}
				for _, step := range tc.steps {
					var has time.Duration
					if step.evaluate {
						ctx, done := b.Evaluate(context.Background())
						deadline, _ := ctx.Deadline()
						has = time.Until(deadline)
						ends = append(ends, done)
					} else {
						has = time.Duration(b.Begin()) - now.Sub(b.first)
						ends = append(ends, b.End)
					}
					if max(has, 0) != step.has {
						t.Errorf("it has %v, want %v", has, step.has)
					}
					if tc.atOnce {
						now = now.Add(10 * time.Second)
						continue
					}
					now = start.Add(step.until)
					ends[len(ends)-1]()
					ends = nil
				}
				now = start.Add(tc.steps[len(tc.steps)-1].until)
				for _, end := range ends {
					end()
				}
				account.update()
				saved := time.Minute - FreeTime // no more is added to so much
				if got := saved - account.saved; (got - tc.spent).Abs() > now.Sub(start)/savedPart {
					t.Errorf("%v are spent, want %v", got, tc.spent)
				}
			})
		})
	}
}

// hostile is a namespace of pods, each of which takes all the time that it gets and never has an answer.
type hostile struct {
	account *account
	tryAt   []time.Time // by pod
	retries []int
}

func newHostile(s *Shares, namespace string, pods int, now time.Time) *hostile {
	h := &hostile{account: s.of(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: namespace}}), retries: make([]int, pods)}
	for range pods {
		h.tryAt = append(h.tryAt, now)
	}
	return h
}

// try makes the attempt of a pod that is due, and puts the next one off as PostFilter and the waiting room do. It is false if none is due.
func (h *hostile) try(now *time.Time) bool {
	for i := range h.tryAt {
		if h.tryAt[i].After(*now) {
			continue
		}
		b := newBudget(10*time.Second, h.account)
		for range 3 { // nodes, no two alike
			*now = now.Add(max(0, time.Duration(b.Begin())-now.Sub(b.first)))
			b.End()
		}
		h.tryAt[i] = now.Add(5 * time.Second << min(h.retries[i], 5))
		if at := h.account.wait(); at.After(h.tryAt[i]) {
			h.tryAt[i] = at
		}
		h.retries[i]++
		return true
	}
	return false
}

// TestHardPodsOfANamespaceHaveABoundedPartOfTheTime lets many pods of a namespace take all that they get for a day. Another namespace has
// what it has alone.
func TestHardPodsOfANamespaceHaveABoundedPartOfTheTime(t *testing.T) {
	for _, pods := range []int{1, 100} {
		start := time.Unix(1, 0)
		now := start
		s := NewShares(func() time.Time { return now }, demand.EvaluationTime)
		h := newHostile(s, "hostile", pods, now)
		var longest, used, free time.Duration
		for now.Sub(start) < 24*time.Hour {
			began := now
			if !h.try(&now) {
				now = now.Add(time.Second)
				continue
			}
			took := now.Sub(began)
			longest, used, free = max(longest, took), used+max(0, took-FreeTime), free+min(took, FreeTime)
		}
		if most := mostSaved + 24*time.Hour/savedPart; used > most || used < most*3/4 {
			t.Errorf("%d pods use %v, want nearly all of %v", pods, used, most)
		}
		if most := 24 * time.Hour / 1000; free > most {
			t.Errorf("%d pods use %v that are not counted, want at most %v", pods, free, most)
		}
		if longest < 10*time.Second {
			t.Errorf("%d pods: no attempt takes longer than %v, want the search of a node to come to its end", pods, longest)
		}
		other := s.of(&v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "other"}})
		if granted := newBudget(10*time.Second, other).granted; granted != mostSaved+FreeTime || !other.wait().IsZero() {
			t.Errorf("another namespace gets %v", granted)
		}
	}
}

// TestPodsBesideHardOnesWaitNoLonger is how long pods wait until they have been tried that come at random to a loop that is busy half of the time
// with them, in four virtual hours after the first: alone, and with a hundred pods of another namespace that take all the time that they get. Of a
// hundred pods, 99 wait no more than twice as long.
func TestPodsBesideHardOnesWaitNoLonger(t *testing.T) {
	part := func(waits []time.Duration, of float64) time.Duration { return waits[int(of*float64(len(waits)))] }
	alone, beside := waitsBeside(0), waitsBeside(100)
	for _, of := range []float64{0.5, 0.99, 0.999} {
		t.Logf("%g: %v alone, %v beside hard pods", of, part(alone, of), part(beside, of))
	}
	if got, before := part(beside, 0.99), part(alone, 0.99); got > 2*before {
		t.Errorf("one in a hundred waits %v, and alone %v", got, before)
	}
	if most := beside[len(beside)-1]; most < 10*time.Second {
		t.Errorf("no pod waits longer than %v: the hard ones do not search for long", most)
	}
}

// waitsBeside returns the times that the pods wait, sorted.
func waitsBeside(hard int) []time.Duration {
	const attempt = 5 * time.Millisecond // of any pod, besides long searches
	random := rand.New(rand.NewPCG(1, 2))
	start := time.Unix(1, 0)
	now := start
	h := newHostile(NewShares(func() time.Time { return now }, demand.EvaluationTime), "hostile", hard, now)
	due := start
	var waits []time.Duration
	for comes := start; now.Sub(start) < 5*time.Hour; {
		switch { // the queue is in the order of time
		case hard > 0 && !due.After(comes):
			if due.After(now) {
				now = due
			}
			h.try(&now)
			now = now.Add(attempt)
			due = h.due()
		case comes.After(now):
			now = comes
		default:
			now = now.Add(attempt)
			if now.Sub(start) > time.Hour { // what is saved at first has been used
				waits = append(waits, now.Sub(comes))
			}
			comes = comes.Add(time.Duration(random.ExpFloat64() * float64(2*attempt)))
		}
	}
	slices.Sort(waits)
	return waits
}

// due is when the first pod is to be tried.
func (h *hostile) due() time.Time {
	first := h.tryAt[0]
	for _, at := range h.tryAt {
		if at.Before(first) {
			first = at
		}
	}
	return first
}
