// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"iter"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
)

// Options configure a Room. The zero value of each means its default.
type Options struct {
	// Patience is how long a woken pod may take until it has been tried. After that the next one is woken, and it is woken
	// once more itself. Default 10 s.
	Patience time.Duration
	// RetryAfter is when a pod is tried again whose attempt ended without an answer, see [Refusal]; it doubles with each such attempt, up to
	// 32 times as long. One that found a node which did not do after all is tried again at once, then after a 32nd of RetryAfter, which
	// doubles up to as long as well. Default 5 s.
	RetryAfter time.Duration
	// Budget bounds how long the allocator is asked for one pod in one pass; all pods of a namespace have four times as much. What is not
	// known then wakes the pod, unless its last attempt had no answer either: it waits for RetryAfter then. Default 50 ms.
	Budget time.Duration
	// OnOutcome is called for each wake-up once it is known whether it led to a placement. It must not call the room.
	OnOutcome func(cause Cause, placed bool)
	// OnSize is called when the number of waiting pods has changed. It must not call the room.
	OnSize func(waiting int)
}

// Room is where pods wait. All methods may be called by any goroutine, Pass by one at a time.
//
// An attempt to schedule a pod begins with Note and Judged, and ends with Refused, NotRefused, Failed or Placed, which may be missing.
// Other methods tell of what has changed. After each of them Wanted may have a token, and then Pass says whom to wake.
type Room[T, K any] struct {
	options Options
	wanted  chan struct{}

	mutex   sync.Mutex
	waiters map[types.UID]*waiter[T, K]
	byClaim map[types.NamespacedName]sets.Set[types.UID]
	// woken are the waiters with a wake-up that has not led to anything yet.
	woken map[types.UID]*waiter[T, K]
	// attempts counts.
	attempts uint64
	nodes    nodeTable
	news     news
	// resolved tells that a woken pod has been tried or is gone, so that the next ones are to be looked at.
	resolved bool
	placed   int // how many of waiters are
}

// New returns an empty room.
func New[T, K any](options Options) *Room[T, K] {
	if options.Patience <= 0 {
		options.Patience = 10 * time.Second
	}
	if options.RetryAfter <= 0 {
		options.RetryAfter = 5 * time.Second
	}
	if options.Budget == 0 {
		options.Budget = 50 * time.Millisecond
	}
	if options.OnOutcome == nil {
		options.OnOutcome = func(Cause, bool) {}
	}
	if options.OnSize == nil {
		options.OnSize = func(int) {}
	}
	return &Room[T, K]{
		options: options,
		wanted:  make(chan struct{}, 1),
		waiters: map[types.UID]*waiter[T, K]{},
		byClaim: map[types.NamespacedName]sets.Set[types.UID]{},
		woken:   map[types.UID]*waiter[T, K]{},
		nodes:   nodeTable{index: map[string]int{}},
		news:    newNews(),
	}
}

// Wanted has a token when Pass has something to do.
func (r *Room[T, K]) Wanted() <-chan struct{} { return r.wanted }

func (r *Room[T, K]) want() {
	select {
	case r.wanted <- struct{}{}:
	default: // there is a token already
	}
}

// Note begins an attempt: the pod is about to look at its claims, which are named, and at the devices. Whatever is told from now
// on and is not in what it sees, see Judged, is looked at for it. tag is given back with the pod's wake-ups.
func (r *Room[T, K]) Note(pod *v1.Pod, claims []types.NamespacedName, tag T) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	next := &waiter[T, K]{pod: pod, tag: tag, claims: claims, current: current{trying: true}, lacks: lacks{everyone: true}}
	known := r.waiters[pod.UID]
	if known != nil {
		next.told, next.woken, next.retries, next.losses = known.told, known.woken, known.retries, known.losses
		next.nominated = known.nominated
		if next.woken != nil {
			next.woken.during = false
		}
		r.forget(pod.UID)
	}
	r.attempts++
	next.number, next.arrival = r.attempts, r.attempts
	if known != nil {
		next.arrival = known.arrival
	}
	r.waiters[pod.UID] = next
	if next.woken != nil {
		r.woken[pod.UID] = next
	}
	for _, claim := range claims {
		if r.byClaim[claim] == nil {
			r.byClaim[claim] = sets.New[types.UID]()
		}
		r.byClaim[claim].Insert(pod.UID)
	}
	r.sized()
}

// Judged tells what the pod asks for and the state at which it looked, which was taken after Note.
func (r *Room[T, K]) Judged(pod types.UID, question *Question, seen Seen) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[pod]
	if w == nil || w.stage != unjudged {
		return
	}
	w.stage, w.question, w.seen = judged, question, seen
	if question.Err != nil {
		// The attempt ends here.
		r.tried(w)
	}
	if len(w.missed) > 0 || w.isTriggered() {
		r.want()
	}
}

// Refusal is what an attempt has found in which devices were missing.
type Refusal struct {
	// Nodes are those on which devices were missing, nil for none. On all others something else was missing, which is for others to watch.
	Nodes iter.Seq[string]
	// Evictable are those among the nodes that would do if others were evicted.
	Evictable []string
	// Undecided tells that for some nodes there was no answer. The pod is then tried again after a while, and Again tells that it is although
	// there was one. In either case that is not before NotBefore. A pod that has not been looked at is only told NotBefore, and is tried then.
	Undecided, Again bool
	NotBefore        time.Time
}

// Refused ends an attempt in which devices were missing.
func (r *Room[T, K]) Refused(pod types.UID, refusal Refusal, now time.Time) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[pod]
	if w == nil || w.stage == placed {
		return
	}
	w.everyone = false
	w.nodes.clear()
	if refusal.Nodes != nil {
		for name := range refusal.Nodes {
			w.nodes.add(r.nodes.number(name))
		}
	}
	w.evictable.clear()
	w.skipped.clear()
	for _, name := range refusal.Evictable {
		w.evictable.add(r.nodes.number(name))
	}
	// What was offered to others while this attempt ran may still become free, wherever devices are all that is missing.
	var next nodeSet
	next.orCommon(&w.next, &w.nodes)
	w.next = next
	w.refused(&refusal, now, r.options.RetryAfter)
	r.tried(w)
	r.want()
}

// NotRefused ends an attempt that failed without the claims having anything to do with it. What is known of the one before stays true if
// this one was never noted, or has ended without an answer.
func (r *Room[T, K]) NotRefused(pod types.UID, now time.Time) {
	if !r.hasEnded(pod) {
		r.Refused(pod, Refusal{}, now)
	}
}

// hasEnded tells whether the last attempt that was noted has ended, and takes that for the answer to a wake-up.
func (r *Room[T, K]) hasEnded(pod types.UID) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[pod]
	if w == nil || w.stage == placed || w.trying {
		return false
	}
	r.tried(w)
	r.want()
	return true
}

// Failed ends an attempt in which a node was found that turned out not to do any more. There may be others, so the pod is tried
// again: at once, because the change that took the node away is known now. If it goes on failing, that is not what it fails for.
func (r *Room[T, K]) Failed(pod types.UID, now time.Time) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[pod]
	if w == nil || w.stage == placed {
		return
	}
	r.tried(w)
	w.retry = w.lost(now, r.options.RetryAfter) || w.retry
	r.want()
}

// Placed ends an attempt: the pod has devices. It stays known until it is gone, which is when it is bound.
func (r *Room[T, K]) Placed(pod types.UID) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[pod]
	if w == nil || w.stage == placed {
		return
	}
	w.stage = placed
	r.placed++
	if w.woken != nil {
		// What it took is held now, and what it was expected to take and did not is for others.
		w.woken.holds, w.woken.places = nil, nil
		r.resolved = true
		r.want()
	}
	w.missed, w.retries, w.losses = nil, 0, 0
	w.nodes.clear()
	w.next.clear()
	r.sized()
}

// Unplaced tells that a pod has given its devices back. Whoever made it do so tries it again, so it does not wait for anything.
func (r *Room[T, K]) Unplaced(pod types.UID) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[pod]
	if w == nil || w.stage != placed {
		return
	}
	r.outcome(w, false)
	r.forget(pod)
	r.sized()
}

// Gone tells that a pod waits no longer: it is bound, or does not exist any more.
func (r *Room[T, K]) Gone(pod types.UID, bound bool) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[pod]
	if w == nil {
		return
	}
	r.outcome(w, bound)
	r.forget(pod)
	r.sized()
}

// IsNews tells whether the reason why a waiting pod is kept out differs from the one at the last call.
func (r *Room[T, K]) IsNews(pod types.UID, reason string) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[pod]
	if w == nil || w.told == reason {
		return false
	}
	w.told = reason
	return true
}

// IsWaiting tells whether the pod is known and not placed.
func (r *Room[T, K]) IsWaiting(pod types.UID) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[pod]
	return w != nil && w.stage != placed
}

// isAnswering tells whether the present attempt is the one that the pod was woken for. It may have looked already.
func (w *waiter[T, K]) isAnswering() bool { return w.woken != nil && w.trying && !w.woken.during }

// tried ends the wake-up that led to the present attempt, if one did.
func (r *Room[T, K]) tried(w *waiter[T, K]) {
	w.trying = false
	switch {
	case w.woken == nil:
	case w.woken.during:
		w.woken.during = false
	default:
		r.outcome(w, false)
	}
}

// outcome ends a wake-up.
func (r *Room[T, K]) outcome(w *waiter[T, K], placed bool) {
	if w.woken == nil {
		return
	}
	r.options.OnOutcome(w.woken.cause, placed)
	w.woken = nil
	delete(r.woken, w.pod.UID)
	r.resolved = true
	r.want()
}

// forget drops all that is kept by pod.
func (r *Room[T, K]) forget(pod types.UID) {
	w := r.waiters[pod]
	delete(r.waiters, pod)
	delete(r.woken, pod)
	if w.stage == placed {
		r.placed--
	}
	for _, claim := range w.claims {
		r.byClaim[claim].Delete(pod)
		if len(r.byClaim[claim]) == 0 {
			delete(r.byClaim, claim)
		}
	}
}

func (r *Room[T, K]) sized() { r.options.OnSize(len(r.waiters) - r.placed) }

// isTriggered tells whether something concerns this waiter alone.
func (w *waiter[T, K]) isTriggered() bool {
	return w.claimsChanged || w.podChanged || len(w.classes) > 0 || w.retry || !w.changedNodes.empty()
}
