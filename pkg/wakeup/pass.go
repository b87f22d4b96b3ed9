// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"cmp"
	"context"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// job is one waiter to be looked at in a pass: a copy of what matters, because the pass takes time.
type job[T, K any] struct {
	uid      types.UID
	pod      *v1.Pod
	tag      T
	key      K
	attempt  uint64
	arrival  uint64
	question *Question

	ownChanges
	classChanged bool
	// undecided tells that its last attempt had no answer and that it is not yet time for the next one.
	undecided bool
	targets
	decision
}

// targets are the nodes that matter to a waiter.
type targets struct {
	// changed are nodes that were touched by changes, or that may do if those woken earlier do not take them; next are the
	// latter.
	changed, next nodeSet
	// interest are the nodes on which devices were missing; nil for all.
	interest *nodeSet
	// evictable are nodes on which others could have been evicted for it in its last attempt.
	evictable nodeSet
	// nominated is the node from which others are being evicted for it, -1 if there is none.
	nominated int
}

// decision is what a pass has come to about a waiter.
type decision struct {
	// vain tells that others are evicted for it in vain.
	vain bool
	// skipped are those among evictable that were touched by changes and not looked at.
	skipped nodeSet
	asks    *Question // instead of question, if that has changed
	// anew tells that its claims have changed so that any node may do, also such as were not of interest.
	anew  bool
	wake  Cause // empty if the pod is not to be woken
	holds []hold
	later nodeSet // the next next
	// queued tells that it is not woken because others are expected to take all places at a claim.
	queued bool
	places map[types.UID]int
}

// Pass looks at what has changed and has the pods woken that this may help, each as soon as that is known, in the order of the queue. It
// returns when to call it again even if Wanted has no token; zero if there is no need.
func (r *Room[T, K]) Pass(ctx context.Context, world World[T, K], send func(Wake[T])) (again time.Time) {
	p := &pass[T, K]{
		ctx: ctx, room: r, world: &world, verdicts: map[string]*verdicts{}, coming: map[types.UID]int{},
		used: map[string]time.Duration{},
	}
	for _, wake := range r.begin(p) {
		send(wake)
	}
	for _, j := range p.jobs {
		if ctx.Err() != nil {
			return time.Time{}
		}
		p.decide(j)
		if r.finish(p, j) {
			send(Wake[T]{Pod: j.pod, Tag: j.tag, Cause: j.wake})
		}
	}
	return r.deadline()
}

// pass is one run over the waiters.
type pass[T, K any] struct {
	ctx   context.Context
	room  *Room[T, K]
	world *World[T, K]
	// inventory and usage are what all is decided on.
	inventory *inventory.View
	usage     usage.View
	changes   []change
	// unseen are the nodes of those changes that no waiter has seen, which are nearly all; seenBySome are the other changes.
	unseen     nodeSet
	seenBySome []change
	jobs       []*job[T, K]
	// expected is the usage with what woken pods are expected to take. held tells whether that differs from the usage.
	expected usage.View
	held     bool
	// coming are how many woken pods are expected to become users of a claim.
	coming map[types.UID]int
	// used is the time that the pods of a namespace have taken.
	used map[string]time.Duration
	// verdicts are what the allocator has said in this pass, by shape.
	verdicts map[string]*verdicts

	// all are all nodes, nil until somebody asks.
	all *nodeList
}

// nodeList is nodes and their numbers.
type nodeList struct {
	nodes   []*v1.Node
	numbers []int
}

// begin takes what has changed, and returns those that have to be woken once more because nothing has happened since they were woken.
func (r *Room[T, K]) begin(p *pass[T, K]) (again []Wake[T]) {
	p.changes = p.takeNews()
	r.mutex.Lock()
	defer r.mutex.Unlock()
	now := p.world.Now()
	// Now, because what was told since the news were taken, of claims and classes for one, is looked at in this pass, too.
	p.inventory, p.usage = p.world.State()
	r.sortOut(p)

	for uid, w := range r.woken {
		if w.woken.until.After(now) || w.stage == placed {
			continue
		}
		pod := p.world.Pod(w.pod)
		if pod == nil || pod.Spec.NodeName != "" {
			r.outcome(w, pod != nil)
			r.forget(uid)
			continue
		}
		w.woken.holds, w.woken.places, w.woken.until = nil, nil, now.Add(r.options.Patience)
		r.resolved = true
		again = append(again, Wake[T]{Pod: pod, Tag: w.tag, Cause: w.woken.cause})
	}
	resolved := r.resolved
	r.resolved = false

	p.expected = p.usage
	for _, w := range r.woken {
		p.expect(w.woken.holds)
		p.expectUsers(w.woken.places)
	}
	for uid, w := range r.waiters {
		if j := r.job(p, uid, w, resolved, now); j != nil {
			p.jobs = append(p.jobs, j)
		}
	}
	slices.SortFunc(p.jobs, func(a, b *job[T, K]) int {
		switch {
		case p.world.Before(a.tag, a.key, b.key):
			return -1
		case p.world.Before(a.tag, b.key, a.key):
			return 1
		}
		return cmp.Compare(a.arrival, b.arrival)
	})
	r.sized()
	return again
}

// sortOut tells changes that nobody has seen from others, so that thousands of them need not be looked at for each of a thousand
// waiters.
func (r *Room[T, K]) sortOut(p *pass[T, K]) {
	var newest Seen
	for _, w := range r.waiters {
		newest.Usage, newest.Inventory = max(newest.Usage, w.seen.Usage), max(newest.Inventory, w.seen.Inventory)
	}
	for i := range p.changes {
		c := &p.changes[i]
		if c.usage > newest.Usage || c.inventory > newest.Inventory {
			c.addTo(&p.unseen, nil)
		} else {
			p.seenBySome = append(p.seenBySome, *c)
		}
	}
}

// job returns what there is to look at for a waiter, nil if nothing, and takes it from the waiter.
func (r *Room[T, K]) job(p *pass[T, K], uid types.UID, w *waiter[T, K], resolved bool, now time.Time) *job[T, K] {
	switch {
	case w.stage == placed, w.woken != nil && !w.isAnswering():
		return nil // sees everything in its next attempt, which is certain
	case w.stage == unjudged, w.woken != nil:
		// To be looked at when it is known what the attempt has seen and, if it is the one that a wake-up led to, has come to.
		w.missed = append(w.missed, p.changes...)
		return nil
	}
	j := &job[T, K]{uid: uid, attempt: w.number, arrival: w.arrival, ownChanges: w.ownChanges}
	if !w.everyone {
		j.interest = &w.nodes
	}
	w.evictable.without(&w.keptNoMore)
	w.keptNoMore.clear()
	j.evictable, j.nominated = w.evictable.clone(), -1
	for name, generation := range w.classes {
		if _, uses := w.question.Classes[name]; uses && generation > w.seen.Inventory {
			j.classChanged = true
		}
	}
	if at := w.question.ChangesAt; !at.IsZero() && !at.After(now) && at.After(w.lookedAt) {
		j.claimsChanged, w.lookedAt = true, now
	}
	j.retry = w.takeDue(now) || j.retry
	j.undecided = w.undecided && !w.retryAt.IsZero()
	if j.interest == nil {
		j.changed.or(&p.unseen)
	} else {
		j.changed.orCommon(&p.unseen, j.interest)
	}
	for _, changes := range [][]change{w.missed, p.seenBySome} {
		for i := range changes {
			if c := &changes[i]; !c.isSeen(w.seen) {
				c.addTo(&j.changed, j.interest)
			}
		}
	}
	if len(w.missed) > 0 {
		p.changes = append(slices.Clip(p.changes), w.missed...) // for their causes
	}
	if resolved && !w.next.empty() {
		j.next = w.next
		j.changed.or(&j.next)
		w.next.clear()
	}
	if !w.changedNodes.empty() {
		j.changed.or(&w.changedNodes)
		w.nodes.or(&w.changedNodes)
	}
	if resolved && w.queued {
		j.claimsChanged, j.podChanged, w.queued = true, true, false // as if everything had changed
	}
	w.ownChanges, w.classes, w.missed = ownChanges{}, nil, nil
	nodeChanges := w.changedNodes
	w.changedNodes.clear()
	if !j.claimsChanged && !j.podChanged && !j.retry && !j.classChanged && j.changed.empty() {
		return nil
	}
	if !nodeChanges.empty() {
		c := change{cause: CauseNode, many: nodeChanges}
		p.changes = append(slices.Clip(p.changes), c)
	}
	if j.pod = p.world.Pod(w.pod); j.pod == nil || j.pod.Spec.NodeName != "" {
		r.outcome(w, j.pod != nil)
		r.forget(uid)
		return nil
	}
	if w.place.of != j.pod {
		w.place = place[K]{p.world.Key(j.pod, w.tag), j.pod}
	}
	w.pod = j.pod
	j.tag, j.key, j.question = w.tag, w.place.key, w.question
	if name := cmp.Or(j.pod.Status.NominatedNodeName, w.nominated); name != "" {
		j.nominated = r.nodes.number(name)
	}
	if j.interest != nil {
		shared := w.nodes // nobody changes what is in it but this goroutine
		j.interest = &shared
	}
	return j
}

// expect adds what a woken pod is expected to take.
func (p *pass[T, K]) expect(holds []hold) {
	for _, h := range holds {
		p.expected = p.expected.With(h.claim, h.allocation)
		p.held = true
	}
}

// expectUsers adds the places that a woken pod is expected to take.
func (p *pass[T, K]) expectUsers(places map[types.UID]int) {
	for claim := range places {
		p.coming[claim]++
	}
}

// finish notes what was decided about a pod and tells whether it is to be woken. One that has begun another attempt since sees
// everything itself.
func (r *Room[T, K]) finish(p *pass[T, K], j *job[T, K]) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	w := r.waiters[j.uid]
	if w == nil || w.number != j.attempt || w.stage == placed {
		if len(j.holds)+len(j.places) > 0 {
			r.resolved = true
			r.want()
		}
		return false
	}
	if j.vain {
		w.evictable.clear()
	}
	w.skip(&j.skipped)
	if !w.changedNodes.empty() {
		r.want()
	}
	if j.queued {
		w.queued = true // and keeps its question, so that it is looked at again as now
		w.next.or(&j.changed)
		return false
	}
	if j.asks != nil {
		w.question = j.asks
	}
	w.everyone = w.everyone || j.anew
	if j.wake == "" {
		w.next.or(&j.later)
		return false
	}
	w.woken = &wakeUp{cause: j.wake, holds: j.holds, places: j.places, until: p.world.Now().Add(r.options.Patience), during: w.trying}
	w.retryAt = time.Time{}
	w.next.clear()
	w.queued = false
	r.woken[j.uid] = w
	return true
}

// deadline is when something has to be done without any news.
func (r *Room[T, K]) deadline() time.Time {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	var first time.Time
	sooner := func(t time.Time) {
		if !t.IsZero() && (first.IsZero() || t.Before(first)) {
			first = t
		}
	}
	for _, w := range r.waiters {
		switch {
		case w.stage == placed:
		case w.woken != nil:
			sooner(w.woken.until) // is tried by then, or woken once more
		default:
			sooner(w.retryAt)
			if w.stage == judged && w.question.ChangesAt.After(w.lookedAt) {
				sooner(w.question.ChangesAt)
			}
		}
	}
	return first
}

// causeAt is why a node is looked at.
func (p *pass[T, K]) causeAt(j *job[T, K], node int) Cause {
	if j.next.has(node) {
		return CauseNext
	}
	for i := range p.changes {
		if c := &p.changes[i]; c.has(node) {
			return c.cause
		}
	}
	return CauseNext
}

// decide says whether a waiter is to be woken:
//
//  1. What concerns it alone: it is to be tried anyway, or its claims or classes have changed so that it can be tried.
//  2. Whether its claims have places for it if those woken before it take theirs.
//  3. On which nodes it may fit now that did not do before.
//  4. Whether it fits one of them if those woken before it take what they are expected to take.
func (p *pass[T, K]) decide(j *job[T, K]) {
	p.choose(j)
	if j.wake != "" {
		asks := j.question
		if j.asks != nil {
			asks = j.asks
		}
		j.places = asks.Places
		p.expectUsers(j.places)
	}
}

func (p *pass[T, K]) choose(j *job[T, K]) {
	if j.retry {
		j.wake = CauseRetry
		return
	}
	if p.left(j) <= 0 {
		if !j.undecided {
			j.wake = CauseRetry
		}
		return
	}
	asks, everywhere := j.question, false
	var cause Cause
	if j.claimsChanged || j.classChanged || j.podChanged {
		asks = p.look(j)
		if asks.Undecided && !j.undecided {
			j.wake = CauseRetry
		}
		if asks.Err != nil {
			return // waits for its claims or classes
		}
		if (j.question.Err != nil || asks.Claims != j.question.Claims) && !p.hasPlaces(asks) {
			j.queued = true
			return
		}
		switch {
		case j.question.Err != nil:
			// It has never been tried on nodes like this.
			j.wake = CauseClass
			if j.claimsChanged && asks.Claims != j.question.Claims {
				j.wake = CauseClaim
			}
			return
		case asks.Claims != j.question.Claims:
			if asks.Requests == nil || asks.Opaque {
				j.wake = CauseClaim
				return
			}
			everywhere, cause = true, CauseClaim
		case asks.Movable && !j.question.Movable:
			everywhere, cause = true, CauseClaim
		case j.classChanged:
			everywhere, cause = true, CauseClass
		case j.podChanged:
			everywhere, cause = true, CausePod
		}
	}
	if asks.Err == nil && asks.isOutdated(p.inventory) {
		asks = p.look(j)
	}
	if asks.Err != nil {
		return
	}
	if asks != j.question && asks.knowsMoreThan(j.question) {
		j.wake = CauseClass // it was told that there is no such class, which is not true any more even if the pod fits nowhere
		return
	}
	nodes := j.changed
	if everywhere {
		nodes = p.allOf(j)
		if cause == CauseClaim {
			nodes, j.anew = p.every(), true
		}
	}
	if nodes.empty() {
		return
	}
	at, answer := p.firstFit(j, asks, &nodes)
	if answer == no && j.isInVain(&nodes) {
		j.vain = true
		j.evictable.clear()
		j.skipped.clear()
		cause, nodes = p.causeAt(j, j.nominated), p.allOf(j)
		at, answer = p.firstFit(j, asks, &nodes)
	}
	if answer == no || answer == unknown && j.undecided && !everywhere {
		return
	}
	if j.wake = cause; cause == "" || j.changed.has(at) {
		j.wake = p.causeAt(j, at)
	}
}

// isInVain tells whether the pod waits in vain for those that are being evicted for it: it was found to fit none of the nodes, even without
// holders of lower priority, and the one that it is nominated to is among them. It may evict others
// elsewhere then, which had no sense before.
func (j *job[T, K]) isInVain(nodes *nodeSet) bool {
	return j.nominated >= 0 && nodes.has(j.nominated) && !j.later.has(j.nominated) && !j.evictable.has(j.nominated)
}

// left is the time that is left for a pod. Those that had no answer in their last attempt have less of the namespace's, so that the
// others are looked at, and not woken unseen.
func (p *pass[T, K]) left(j *job[T, K]) time.Duration {
	budgets := time.Duration(namespaceBudgets)
	if j.undecided {
		budgets = 1
	}
	return budgets*p.room.options.Budget - p.used[j.pod.Namespace]
}

// look asks what the pod asks for now.
func (p *pass[T, K]) look(j *job[T, K]) *Question {
	began := p.world.Now()
	j.asks = p.world.Look(j.pod, j.tag, p.inventory)
	p.used[j.pod.Namespace] += p.world.Now().Sub(began)
	return j.asks
}
