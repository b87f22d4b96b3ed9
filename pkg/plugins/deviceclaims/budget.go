package deviceclaims

import (
	"math"
	"sync"
	"time"
)

// budget is the time that Filter has for one pod: on each node the timeout, and on all nodes together podTimeouts times
// that, from the first long search on. After that each node has leastTimeout, in which all but hard searches end: a pod
// for which the search is hard on many different nodes must not keep the scheduler from all others.
type budget struct {
	timeout time.Duration // for one node; none if it is 0
	now     func() time.Time

	mutex sync.Mutex
	first time.Time // when the first long search began; zero before
}

const (
	podTimeouts  = 2
	leastTimeout = 20 * time.Millisecond
)

func newBudget(timeout time.Duration) *budget { return &budget{timeout: timeout, now: time.Now} }

// Begin implements [allocator.Attempt]. The end is counted from the first long search on.
func (b *budget) Begin() (end int64) {
	if b.timeout <= 0 {
		return math.MaxInt64
	}
	now := b.now()
	b.mutex.Lock()
	defer b.mutex.Unlock()
	if b.first.IsZero() {
		b.first = now
	}
	passed := now.Sub(b.first)
	return int64(passed + min(b.timeout, max(podTimeouts*b.timeout-passed, leastTimeout)))
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
