// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package searchtime is the time that a profile, and in it the pods of a namespace, have for long searches and for CEL expressions.
package searchtime

import (
	"context"
	"math"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/demand"
)

// Profile is the time that a profile has for searches. It implements contention.Time.
type Profile struct {
	// FilterTimeout is for one node, none if it is 0.
	FilterTimeout time.Duration
	// Shares are those of the namespaces, which all profiles have in common.
	Shares *Shares
}

// Budget is that of one attempt for the pod.
func (t *Profile) Budget(pod *v1.Pod) *Budget { return newBudget(t.FilterTimeout, t.Shares.of(pod)) }

// Attempt implements contention.Time.
func (t *Profile) Attempt(pod *v1.Pod) allocator.Attempt { return t.Budget(pod) }

// HasTimeAt is when the pod's namespace has time for long searches and CEL expressions, zero if it has some now.
func (t *Profile) HasTimeAt(pod *v1.Pod) time.Time { return t.Shares.of(pod).wait() }

// OnNode implements contention.Time.
func (t *Profile) OnNode(ctx context.Context) (context.Context, context.CancelFunc) {
	if t.FilterTimeout > 0 {
		return context.WithTimeout(ctx, t.FilterTimeout)
	}
	return ctx, func() {}
}

// Budget is the time that Filter has for one pod: on each node the timeout, and on all nodes together podTimeouts times
// that, from the first long search on. After that each node has leastTimeout, in which all but hard searches end: a pod
// for which the search is hard on many different nodes must not keep the scheduler from all others.
//
// Long searches and CEL expressions together have no more than the pod's namespace has saved, see [Shares].
type Budget struct {
	timeout time.Duration // for one node; none if it is 0
	// evaluation is how long CEL expressions may be evaluated.
	evaluation time.Duration
	now        func() time.Time
	// account is the namespace's, granted what it has given for this attempt. Without an account there is no such bound.
	account *account
	granted time.Duration

	mutex sync.Mutex
	first time.Time // when the first long search began; zero before
	// evaluated is how long CEL expressions were evaluated.
	evaluated time.Duration
	// busy is how many goroutines search or evaluate, and used how long at least one did, until since.
	busy  int
	since time.Time
	used  time.Duration
}

const (
	podTimeouts  = 2
	leastTimeout = 20 * time.Millisecond
)

// newBudget is the budget of one attempt for a pod with that account, which may be nil.
func newBudget(timeout time.Duration, account *account) *Budget {
	b := &Budget{timeout: timeout, evaluation: demand.EvaluationTime, now: time.Now, account: account}
	if account != nil {
		b.evaluation, b.now, b.granted = account.shares.evaluation, account.shares.now, account.grant()
	}
	return b
}

// Again is the budget of a decision that Filter has found to be possible: as much as the attempt was granted, which may be more than is
// saved by now. What it takes has to be saved before another attempt is granted anything.
func (b *Budget) Again() *Budget {
	return &Budget{timeout: b.timeout, evaluation: b.evaluation, now: b.now, account: b.account, granted: b.granted}
}

// Granted is how long all searches and evaluations together may take, as far as the namespace has a say in it.
func (b *Budget) Granted() time.Duration { return b.granted }

// Used is how long somebody has searched or evaluated.
func (b *Budget) Used() time.Duration {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	return b.used
}

// Begin implements [allocator.Attempt]. The end is counted from the first long search on.
func (b *Budget) Begin() (end int64) {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	now := b.now()
	b.start(now)
	left := b.left(now)
	if b.first.IsZero() {
		b.first = now
	}
	passed := now.Sub(b.first)
	if b.timeout > 0 {
		left = min(left, b.timeout, max(podTimeouts*b.timeout-passed, leastTimeout))
	}
	if left == math.MaxInt64 {
		return math.MaxInt64
	}
	return int64(passed + left)
}

// IsOver implements [allocator.Attempt].
func (b *Budget) IsOver(end int64) bool {
	if end == math.MaxInt64 {
		return false
	}
	b.mutex.Lock()
	first := b.first
	b.mutex.Unlock()
	return int64(b.now().Sub(first)) >= end
}

// End implements [allocator.Attempt].
func (b *Budget) End() {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.stop(b.now())
}

// Evaluate implements [allocator.Attempt]. Several goroutines may evaluate at a time: none longer than until the time is used up.
func (b *Budget) Evaluate(ctx context.Context) (context.Context, context.CancelFunc) {
	b.mutex.Lock()
	began := b.now()
	b.start(began)
	left := min(b.evaluation-b.evaluated, b.left(began))
	b.mutex.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, left, demand.ErrEvaluation)
	return ctx, func() {
		cancel()
		b.mutex.Lock()
		defer b.mutex.Unlock()
		now := b.now()
		b.evaluated += now.Sub(began)
		b.stop(now)
	}
}

// start and stop count the time in which somebody is busy, with the mutex held.
func (b *Budget) start(now time.Time) {
	if b.busy == 0 {
		b.since = now
	}
	b.busy++
}

func (b *Budget) stop(now time.Time) {
	before := b.used
	b.used += now.Sub(b.since)
	b.since = now
	b.busy--
	if b.account == nil {
		return
	}
	if charged := max(b.used, FreeTime) - max(before, FreeTime); charged > 0 {
		b.account.spend(charged)
	}
	if b.used >= b.granted {
		b.account.want(b.granted)
	}
}

// left is what is left of what the namespace has given, with the mutex held.
func (b *Budget) left(now time.Time) time.Duration {
	if b.account == nil {
		return math.MaxInt64
	}
	used := b.used
	if b.busy > 0 {
		used += now.Sub(b.since)
	}
	return max(0, b.granted-used)
}
