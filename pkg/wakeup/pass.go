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

// World is what a pass decides on.
type World struct {
	Now func() time.Time
	// State returns what exists and who holds what, at least as new as everything that the room has been told.
	State func() (*inventory.View, usage.View)
	// Node returns the node of that name, nil if there is none.
	Node func(name string) *v1.Node
	// Nodes returns all nodes.
	Nodes func() []*v1.Node
	// Pod returns the newest object of a pod, nil if it is gone.
	Pod func(*v1.Pod) *v1.Pod
	// Suitable returns what is known of whether the pod may be on a node, leaving devices aside; false must be certain, and the
	// room must be told when it may have become true.
	Suitable func(pod *v1.Pod, tag any) func(*v1.Node) bool
	// Look says what the pod asks for now, with these classes.
	Look func(pod *v1.Pod, tag any, inv *inventory.View) *Question
	// Key and Before are the order of the scheduling queue.
	Key    func(pod *v1.Pod, tag any) any
	Before func(tag, a, b any) bool

	inventory *inventory.View
	usage     usage.View
	nodes     []*v1.Node
}

func (w *World) allNodes() []*v1.Node {
	if w.nodes == nil {
		w.nodes = w.Nodes()
	}
	return w.nodes
}

// Wake is a pod to be woken.
type Wake struct {
	Pod   *v1.Pod
	Tag   any
	Cause Cause
}

// job is one waiter to be looked at in a pass: a copy of what matters, because the pass takes time.
type job struct {
	uid      types.UID
	pod      *v1.Pod
	tag      any
	key      any
	attempt  uint64
	arrival  uint64
	question *Question

	claimsChanged, podChanged, retry bool
	classChanged                     bool
	// changed are nodes that were touched by changes, or that may do if those woken earlier do not take them; next are the
	// latter.
	changed, next nodeSet
	// interest are the nodes on which devices were missing; nil for all.
	interest *nodeSet

	// What was decided.
	asks  *Question // instead of question, if that has changed
	wake  Cause     // empty if the pod is not to be woken
	holds []hold
	later nodeSet // the next next
}

// Pass looks at what has changed and returns the pods to be woken, in the order of the queue, and when to call it again even if Wanted
// has no token; zero if there is no need.
func (r *Room) Pass(ctx context.Context, world World) (wakes []Wake, again time.Time) {
	p := &pass{ctx: ctx, room: r, world: &world, verdicts: map[string]*verdicts{}}
	wakes = r.begin(p)
	for _, j := range p.jobs {
		if ctx.Err() != nil {
			return nil, time.Time{}
		}
		p.decide(j)
	}
	return append(wakes, r.finish(p)...), r.deadline()
}

// pass is one run over the waiters.
type pass struct {
	ctx     context.Context
	room    *Room
	world   *World
	changes []change
	// unseen are the nodes of those changes that no waiter has seen, which are nearly all; seenBySome are the other changes.
	unseen     nodeSet
	seenBySome []change
	jobs       []*job
	// expected is the usage with what woken pods are expected to take. held tells whether that differs from the usage.
	expected usage.View
	held     bool
	// verdicts are what the allocator has said in this pass, by shape.
	verdicts map[string]*verdicts
}

// begin takes what has changed, and returns those that have to be woken once more because nothing has happened since they were woken.
func (r *Room) begin(p *pass) (again []Wake) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	now := p.world.Now()
	p.world.inventory, p.world.usage = p.world.State() // after the last of the news
	r.tidy(p.world)
	p.changes = r.changes(r.news, p.world)
	r.news = newNews()
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
		w.woken.holds, w.woken.until = nil, now.Add(r.options.Patience)
		r.resolved = true
		again = append(again, Wake{Pod: pod, Tag: w.tag, Cause: w.woken.cause})
	}
	resolved := r.resolved
	r.resolved = false

	p.expected = p.world.usage
	for _, w := range r.woken {
		p.expect(w.woken.holds)
	}
	for uid, w := range r.waiters {
		if j := r.job(p, uid, w, resolved, now); j != nil {
			p.jobs = append(p.jobs, j)
		}
	}
	slices.SortFunc(p.jobs, func(a, b *job) int {
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
func (r *Room) sortOut(p *pass) {
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
func (r *Room) job(p *pass, uid types.UID, w *waiter, resolved bool, now time.Time) *job {
	switch {
	case w.stage == placed, w.woken != nil && !w.isAnswering():
		return nil // sees everything in its next attempt, which is certain
	case w.stage == unjudged, w.woken != nil:
		// To be looked at when it is known what the attempt has seen and, if it is the one that a wake-up led to, has come to.
		w.missed = append(w.missed, p.changes...)
		return nil
	}
	j := &job{uid: uid, attempt: w.attempt, arrival: w.arrival, claimsChanged: w.claimsChanged, podChanged: w.podChanged, retry: w.retry}
	if !w.everyone {
		j.interest = &w.nodes
	}
	for name, generation := range w.classes {
		if _, uses := w.question.Classes[name]; uses && generation > w.seen.Inventory {
			j.classChanged = true
		}
	}
	if !w.retryAt.IsZero() && !w.retryAt.After(now) {
		j.retry, w.retryAt = true, time.Time{}
	}
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
	w.claimsChanged, w.podChanged, w.retry, w.classes, w.missed = false, false, false, nil, nil
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
	if w.key == nil || j.pod != w.pod {
		w.key = p.world.Key(j.pod, w.tag)
	}
	w.pod = j.pod
	j.tag, j.key, j.question = w.tag, w.key, w.question
	if j.interest != nil {
		shared := w.nodes // nobody changes what is in it but this goroutine
		j.interest = &shared
	}
	return j
}

// expect adds what a woken pod is expected to take.
func (p *pass) expect(holds []hold) {
	for _, h := range holds {
		p.expected = p.expected.With(h.claim, h.allocation)
		p.held = true
	}
}

// finish notes what was decided and returns the pods to be woken. A pod that has begun another attempt since sees everything itself.
func (r *Room) finish(p *pass) []Wake {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	now := p.world.Now()
	var wakes []Wake
	for _, j := range p.jobs {
		w := r.waiters[j.uid]
		if w == nil || w.attempt != j.attempt || w.stage == placed {
			if len(j.holds) > 0 {
				r.resolved = true
				r.want()
			}
			continue
		}
		if j.asks != nil {
			w.question = j.asks
		}
		if j.wake == "" {
			w.next.or(&j.later)
			continue
		}
		w.woken = &wakeUp{cause: j.wake, holds: j.holds, until: now.Add(r.options.Patience), during: w.trying}
		w.retryAt = time.Time{}
		w.next.clear()
		r.woken[j.uid] = w
		wakes = append(wakes, Wake{Pod: j.pod, Tag: j.tag, Cause: j.wake})
	}
	return wakes
}

// deadline is when something has to be done without any news.
func (r *Room) deadline() time.Time {
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
		}
	}
	return first
}

// causeAt is why a node is looked at.
func (p *pass) causeAt(j *job, node int) Cause {
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
//  2. On which nodes it may fit now that did not do before.
//  3. Whether it fits one of them if those woken before it take what they are expected to take.
func (p *pass) decide(j *job) {
	if j.retry {
		j.wake = CauseRetry
		return
	}
	asks, everywhere := j.question, false
	var cause Cause
	if j.claimsChanged || j.classChanged || j.podChanged {
		asks = p.world.Look(j.pod, j.tag, p.world.inventory)
		j.asks = asks
		if asks.Err != nil {
			return // waits for its claims or classes
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
		case j.classChanged:
			everywhere, cause = true, CauseClass
		case j.podChanged:
			everywhere, cause = true, CausePod
		}
	}
	if asks.Err == nil && asks.isOutdated(p.world.inventory) {
		asks = p.world.Look(j.pod, j.tag, p.world.inventory)
		j.asks = asks
	}
	if asks.Err != nil {
		return
	}
	nodes := j.changed
	if everywhere {
		nodes = p.allOf(j)
		if cause == CauseClaim {
			nodes = p.every()
		}
	}
	if nodes.empty() {
		return
	}
	at, answer := p.firstFit(j, asks, &nodes)
	if answer == no {
		return
	}
	if j.wake = cause; cause == "" || j.changed.has(at) {
		j.wake = p.causeAt(j, at)
	}
}

// allOf are all nodes on which devices were missing.
func (p *pass) allOf(j *job) nodeSet {
	if j.interest != nil {
		return nodeSet{bits: j.interest.bits.Clone()}
	}
	return p.every()
}

// every are all nodes.
func (p *pass) every() nodeSet {
	p.room.mutex.Lock()
	defer p.room.mutex.Unlock()
	var all nodeSet
	for _, node := range p.world.allNodes() {
		all.add(p.room.nodes.number(node.Name))
	}
	return all
}

// nameOf returns the name of a node.
func (p *pass) nameOf(i int) string {
	p.room.mutex.Lock()
	defer p.room.mutex.Unlock()
	return p.room.nodes.names[i]
}
