package deviceclaims

import (
	"context"
	"math"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/demand"
)

// searchTime is the time that a profile has for searches. It implements [Time].
type searchTime struct {
	filterTimeout time.Duration
	shares        *shares
}

// budget is that of one attempt for the pod.
func (t *searchTime) budget(pod *v1.Pod) *budget { return newBudget(t.filterTimeout, t.shares.of(pod)) }

// Attempt implements [Time].
func (t *searchTime) Attempt(pod *v1.Pod) allocator.Attempt { return t.budget(pod) }

// OnNode implements [Time].
func (t *searchTime) OnNode(ctx context.Context) (context.Context, context.CancelFunc) {
	if t.filterTimeout > 0 {
		return context.WithTimeout(ctx, t.filterTimeout)
	}
	return ctx, func() {}
}

// budget is the time that Filter has for one pod: on each node the timeout, and on all nodes together podTimeouts times
// that, from the first long search on. After that each node has leastTimeout, in which all but hard searches end: a pod
// for which the search is hard on many different nodes must not keep the scheduler from all others.
//
// Long searches and CEL expressions together have no more than the pod's namespace has saved, see [shares].
type budget struct {
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
func newBudget(timeout time.Duration, account *account) *budget {
	b := &budget{timeout: timeout, evaluation: demand.EvaluationTime, now: time.Now, account: account}
	if account != nil {
		b.evaluation, b.now, b.granted = account.shares.evaluation, account.shares.now, account.grant()
	}
	return b
}

// again is the budget of a decision that Filter has found to be possible: as much as the attempt was granted, which may be more than is saved
// by now. What it takes has to be saved before another attempt is granted anything.
func (b *budget) again() *budget {
	return &budget{timeout: b.timeout, evaluation: b.evaluation, now: b.now, account: b.account, granted: b.granted}
}

// Begin implements [allocator.Attempt]. The end is counted from the first long search on.
func (b *budget) Begin() (end int64) {
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
func (b *budget) IsOver(end int64) bool {
	if end == math.MaxInt64 {
		return false
	}
	b.mutex.Lock()
	first := b.first
	b.mutex.Unlock()
	return int64(b.now().Sub(first)) >= end
}

// End implements [allocator.Attempt].
func (b *budget) End() {
	b.mutex.Lock()
	defer b.mutex.Unlock()
	b.stop(b.now())
}

// Evaluate implements [allocator.Attempt]. Several goroutines may evaluate at a time: none longer than until the time is used up.
func (b *budget) Evaluate(ctx context.Context) (context.Context, context.CancelFunc) {
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
func (b *budget) start(now time.Time) {
	if b.busy == 0 {
		b.since = now
	}
	b.busy++
}

func (b *budget) stop(now time.Time) {
	before := b.used
	b.used += now.Sub(b.since)
	b.since = now
	b.busy--
	if b.account == nil {
		return
	}
	if charged := max(b.used, freeTime) - max(before, freeTime); charged > 0 {
		b.account.spend(charged)
	}
	if b.used >= b.granted {
		b.account.want(b.granted)
	}
}

// left is what is left of what the namespace has given, with the mutex held.
func (b *budget) left(now time.Time) time.Duration {
	if b.account == nil {
		return math.MaxInt64
	}
	used := b.used
	if b.busy > 0 {
		used += now.Sub(b.since)
	}
	return max(0, b.granted-used)
}

// shares is the time of the scheduling loop that the pods of each namespace have for long searches and for CEL expressions: for what most pods
// do not need. Of each second a namespace saves a part, up to mostSaved. An attempt may use what is saved, and has freeTime in any case. Where
// that was too little the next one waits until twice as much is saved, so that what is hard comes to an end and is seldom tried. So however many
// hard pods a namespace has, they take no more of the loop than 1/savedPart, after the first mostSaved, beside what any pod takes.
type shares struct {
	now func() time.Time
	// evaluation is how long the CEL expressions of a pod may be evaluated in one attempt.
	evaluation time.Duration

	mutex    sync.Mutex
	accounts map[string]*account
}

const (
	// savedPart: one part in so many of the time is a namespace's. With more, long searches delay more than one in a hundred of the pods of
	// others, where the loop is busy half of the time.
	savedPart = 250
	// mostSaved is saved at first. It is enough for some hundred selectors on 5,000 nodes of 8 GPUs, which are all new after a restart.
	mostSaved  = 20 * time.Second
	leastSaved = 250 * time.Millisecond
	// freeTime is not counted. Without long searches an attempt takes about as much.
	freeTime = 10 * time.Millisecond
	// manyAccounts is when those are forgotten that are as if they were new.
	manyAccounts = 1000
)

func newShares(now func() time.Time) *shares {
	return &shares{now: now, evaluation: demand.EvaluationTime, accounts: map[string]*account{}}
}

// of returns the account of a pod's namespace.
func (s *shares) of(pod *v1.Pod) *account {
	s.mutex.Lock()
	defer s.mutex.Unlock()
	a := s.accounts[pod.Namespace]
	if a == nil {
		if len(s.accounts) >= manyAccounts {
			for namespace, other := range s.accounts {
				if other.update(); other.saved >= mostSaved && other.wanted == 0 {
					delete(s.accounts, namespace)
				}
			}
		}
		a = &account{shares: s, saved: max(mostSaved, s.evaluation), at: s.now()} // who lifts one bound means both
		s.accounts[pod.Namespace] = a
	}
	return a
}

// account is what a namespace has saved, guarded by the mutex of shares.
type account struct {
	shares *shares
	saved  time.Duration
	at     time.Time // up to which it has been saved
	// wanted is how much has to be saved until an attempt gets more than freeTime.
	wanted time.Duration
}

func (a *account) update() {
	now := a.shares.now()
	a.saved = min(a.saved+now.Sub(a.at)/savedPart, max(a.saved, mostSaved))
	a.at = now
}

// missing is how much has to be saved yet, with the mutex held.
func (a *account) missing() time.Duration {
	a.update()
	return max(0, max(a.wanted, leastSaved)-a.saved)
}

// grant returns how long an attempt may take.
func (a *account) grant() time.Duration {
	a.shares.mutex.Lock()
	defer a.shares.mutex.Unlock()
	if a.missing() > 0 {
		return freeTime
	}
	a.wanted = 0
	return a.saved + freeTime
}

// spend takes what an attempt has used.
func (a *account) spend(used time.Duration) {
	a.shares.mutex.Lock()
	defer a.shares.mutex.Unlock()
	a.update()
	a.saved -= used
}

// want notes that what was granted was not enough.
func (a *account) want(granted time.Duration) {
	a.shares.mutex.Lock()
	defer a.shares.mutex.Unlock()
	if granted > freeTime {
		a.wanted = max(a.wanted, min(2*granted, mostSaved))
	}
}

// wait returns when an attempt gets more than freeTime again, zero if it does now.
func (a *account) wait() time.Time {
	a.shares.mutex.Lock()
	defer a.shares.mutex.Unlock()
	missing := a.missing()
	if missing == 0 {
		return time.Time{}
	}
	return a.shares.now().Add(missing * savedPart)
}
