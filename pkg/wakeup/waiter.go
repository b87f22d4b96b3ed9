// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
	"stowage.dev/stowage/pkg/usage"
)

// Cause is what made a pod worth another attempt.
type Cause string

// The causes.
const (
	// CauseDevice: devices were freed.
	CauseDevice Cause = "device"
	// CauseSlice: a ResourceSlice came, went or changed, be it only by a taint or a DeviceTaintRule.
	CauseSlice Cause = "slice"
	// CauseClass: a DeviceClass came, went or changed.
	CauseClass Cause = "class"
	// CauseClaim: the pod's own claims changed.
	CauseClaim Cause = "claim"
	// CauseNode: a node came or changed, or is not kept any more for a pod that was nominated to it.
	CauseNode Cause = "node"
	// CausePod: the pod itself changed.
	CausePod Cause = "pod"
	// CauseNext: a pod that was woken before this one did not take what both could use.
	CauseNext Cause = "next"
	// CauseRetry: the last attempt ended without an answer.
	CauseRetry Cause = "retry"
)

// Question is what a pod asks of a node.
type Question struct {
	// Err is why there is nothing to ask: the pod's claims cannot be used or not be compiled. Such a pod waits for its
	// claims and classes, not for devices.
	Err error
	// Undecided tells that Err is no more than that the time was not enough to compile the claims.
	Undecided bool
	// Requests are the compiled claims without allocation, nil if there are none.
	Requests *allocator.Requests
	// OnNode tells whether the claims that are allocated can be used on a node. Nil means on all.
	OnNode func(*v1.Node) bool
	// Movable tells that where OnNode is false the allocations may be given up if the node would do then. It needs Elsewhere at least
	// for that; nil means that this is not known.
	Movable   bool
	Elsewhere *allocator.Requests
	// Evicts tells apart which holders of devices the pod may have evicted: pods with an equal one may have the same ones evicted. Empty if it
	// must not have any evicted.
	Evicts string
	// Uncertain tells that the pod need not be tried when it is woken, because it is not tried alone. Nothing is kept for it meanwhile.
	Uncertain bool
	// Opaque tells that the pod also needs devices that Requests does not say, so that the allocator cannot answer here.
	Opaque bool
	// Classes are the DeviceClasses that the claims without allocation name, as they were; nil for one that did not exist.
	Classes map[string]*inventory.Class
	// Places are how many more pods can become users of claims that the pod shares with others, this one among them. Claims without
	// a limit are not among them.
	Places map[types.UID]int
	// Claims tells apart in which state the claims are. As long as it is equal nothing has changed for the pod.
	Claims string
	// ChangesAt is when they are in another one although nothing happens, zero if they stay as they are.
	ChangesAt time.Time

	shape string // of Requests; made when first needed
}

// onNode tells whether the claims that are allocated can be used on the node.
func (q *Question) onNode(node *v1.Node) bool { return q.OnNode == nil || q.OnNode(node) }

// isOutdated tells whether a class has changed since. Its event may still be under way.
func (q *Question) isOutdated(inv *inventory.View) bool {
	for name, class := range q.Classes {
		if inv.Class(name) != class {
			return true
		}
	}
	return false
}

// knowsMoreThan tells whether a class is there now that an earlier question did not find.
func (q *Question) knowsMoreThan(earlier *Question) bool {
	for name, class := range q.Classes {
		if was, asked := earlier.Classes[name]; asked && was == nil && class != nil {
			return true
		}
	}
	return false
}

// shapeOf tells apart what different requests of one namespace ask for. With one inventory, requests of equal shape fit the same nodes. It
// is made from the claims and not from what was compiled, so that it cannot lack what the compiler learns later.
func (q *Question) shapeOf() string {
	if q.shape == "" {
		var key []byte
		for _, claim := range q.Requests.Claims() {
			devices := claim.Spec.Devices
			devices.Config = nil // does not matter for where a claim fits
			content, err := devices.Marshal()
			if err != nil {
				content = []byte(claim.UID) // like no other
			}
			key = fmt.Appendf(key, "%d:", len(content))
			key = append(key, content...)
		}
		q.shape = string(key)
	}
	return q.shape
}

// Seen is the state that an attempt looked at.
type Seen struct {
	// Usage is the claim tracker's revision.
	Usage uint64
	// Inventory is the generation of the inventory's view.
	Inventory uint64
}

// stage is how far a pod's present attempt has come.
type stage int

const (
	// unjudged: noted, about to look. What it asks is not known yet.
	unjudged stage = iota
	// judged: what it asks is known. It is being tried, or sleeps.
	judged
	// placed: has devices and is being bound. It waits for nothing.
	placed
)

// place is a pod's place in the order of the scheduling queue, and the object that it was made of.
type place[K any] struct {
	key K
	of  *v1.Pod
}

// waiter is one pod in the room.
type waiter[T, K any] struct {
	pod    *v1.Pod
	tag    T
	claims []types.NamespacedName
	// told is the last reason of which the pod's user was told.
	told  string
	place place[K]
	// arrival is the attempt with which it came; of equals in the queue's order who came first is first.
	arrival uint64
	// nominated is the node from which others are evicted for it, as long as the API may not show that.
	nominated string
	woken     *wakeUp

	current
	lacks
	unseen
	tries
}

// current is the present attempt to schedule a pod, or the last one.
type current struct {
	// number tells attempts apart.
	number   uint64
	stage    stage
	trying   bool // until the attempt is known to have ended
	seen     Seen
	question *Question
	// lookedAt is up to when changes that need no event have been looked at.
	lookedAt time.Time
}

// lacks are the nodes on which a pod lacked devices in its last attempt.
type lacks struct {
	// nodes are those on which devices were missing; all until that is known.
	nodes    nodeSet
	everyone bool
	// evictable are those among them on which others could have been evicted for it in the last attempt. It has been decided whether they are.
	evictable nodeSet
	// skipped are those of which a change since was not looked at because of that.
	skipped nodeSet
}

// unseen is what has happened since the last attempt and has not been looked at.
type unseen struct {
	ownChanges
	classes      map[string]uint64 // changed ones, with the inventory's generation
	changedNodes nodeSet
	// keptNoMore are nodes whose devices are not kept for a nominated pod any more: who can be evicted there is to be decided anew.
	keptNoMore nodeSet
	missed     []change // while unjudged
	// next are the nodes on which the pod would fit were it not for pods that were woken before it.
	next nodeSet
	// queued tells that those woken before it are expected to take all places at a claim of its own.
	queued bool
}

// ownChanges are what concerns one pod alone.
type ownChanges struct{ claimsChanged, podChanged, retry bool }

// tries says when a pod is tried again although nothing has changed.
type tries struct {
	// retries counts attempts after which it is tried again by and by, and losses those in which it lost its node, in a row. retryAt is when
	// to try again; zero if there is no need. undecided tells that the last attempt had no answer.
	retries, losses int
	retryAt         time.Time
	undecided       bool
}

// refused ends an attempt in which devices were missing.
func (t *tries) refused(refusal *Refusal, now time.Time, after time.Duration) {
	t.retryAt, t.losses, t.undecided = refusal.NotBefore, 0, refusal.Undecided
	switch {
	case refusal.Undecided || refusal.Again:
		if at := now.Add(after << min(t.retries, 5)); at.After(t.retryAt) {
			t.retryAt = at
		}
		t.retries++
	case refusal.NotBefore.IsZero():
		t.retries = 0
	}
}

// lost ends an attempt in which a node was lost, and tells whether the next one is at once.
func (t *tries) lost(now time.Time, after time.Duration) (atOnce bool) {
	if atOnce = t.losses == 0; !atOnce {
		t.retryAt = now.Add(after >> 5 << min(t.losses-1, 10))
	}
	t.losses++
	t.retries = 0
	return atOnce
}

// takeDue tells whether it is time for the next attempt, once.
func (t *tries) takeDue(now time.Time) bool {
	if t.retryAt.IsZero() || t.retryAt.After(now) {
		return false
	}
	t.retryAt = time.Time{}
	return true
}

// skip notes nodes of which a change was not looked at. That of a node to which the pod has been nominated meanwhile is.
func (w *waiter[T, K]) skip(nodes *nodeSet) {
	w.skipped.or(nodes)
	again := nodes.clone()
	again.without(&w.evictable)
	w.changedNodes.or(&again)
}

// wakeUp is one that has not led to anything yet.
type wakeUp struct {
	cause Cause
	// holds are what the pod is expected to take, none if that is not known or has taken too long.
	holds []hold
	// places are the claims that the pod is expected to become a user of, as long as it is expected to take anything.
	places map[types.UID]int
	// until is when it has taken too long.
	until time.Time
	// during tells that the pod was being tried when it was woken: the outcome is not that attempt's but the next one's.
	during bool
}

// hold is what one claim is expected to get.
type hold struct {
	claim      usage.ClaimRef
	allocation *resourceapi.AllocationResult
}

// nodeSet is a set of nodes by their numbers in the room's table. It grows as needed. A copy shares the members until either is
// cleared.
type nodeSet struct{ bits bitset.Set }

func (s *nodeSet) add(i int) {
	s.grow(i>>6 + 1)
	s.bits.Add(i)
}

// grow makes room for so many words.
func (s *nodeSet) grow(words int) {
	if n := len(s.bits); n < words {
		s.bits = append(s.bits, make(bitset.Set, words-n)...)
	}
}

func (s *nodeSet) has(i int) bool { return i>>6 < len(s.bits) && s.bits.Has(i) }

func (s *nodeSet) empty() bool { return s.bits.Empty() }

func (s *nodeSet) clear() { s.bits = nil }

// or adds the members of o.
func (s *nodeSet) or(o *nodeSet) {
	s.grow(len(o.bits))
	for w, word := range o.bits {
		s.bits[w] |= word
	}
}

// orCommon adds what a and b have in common.
func (s *nodeSet) orCommon(a, b *nodeSet) {
	n := min(len(a.bits), len(b.bits))
	for n > 0 && a.bits[n-1]&b.bits[n-1] == 0 {
		n--
	}
	s.grow(n)
	for w := range n {
		s.bits[w] |= a.bits[w] & b.bits[w]
	}
}

func (s *nodeSet) clone() nodeSet { return nodeSet{bits: s.bits.Clone()} }

// without removes the members of o.
func (s *nodeSet) without(o *nodeSet) {
	for w := range min(len(s.bits), len(o.bits)) {
		s.bits[w] &^= o.bits[w]
	}
}
