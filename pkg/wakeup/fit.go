// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/usage"
)

// answer is what is known of whether a pod fits a node.
type answer int

const (
	unknown answer = iota
	yes
	no
)

// verdicts are what the allocator has said about requests of one shape in one pass.
type verdicts struct {
	// refused are the nodes that do not do, be it that a woken pod is expected to take what there was. Within a pass more and
	// more is expected to be taken, so they stay refused.
	refused nodeSet
	// spare are those among them that do, or may do, if no woken pod takes anything.
	spare nodeSet
}

// firstFit returns the first of the nodes that the pod fits, having noted what it would take there, or the first for which there is no
// answer. If there is neither, it notes on which it would fit were it not for those woken before it.
func (p *pass[T, K]) firstFit(j *job[T, K], asks *Question, nodes *nodeSet) (at int, a answer) {
	suitable := p.world.Suitable(j.pod, j.tag)
	began, options := p.world.Now(), &p.room.options
	ctx := &budget{Context: p.ctx, now: p.world.Now, until: began.Add(min(options.Budget, p.left(j)))}
	defer func() { p.used[j.pod.Namespace] += p.world.Now().Sub(began) }()
	if asks.Requests == nil || asks.Opaque {
		for i := nodes.bits.Next(0); i >= 0; i = nodes.bits.Next(i + 1) {
			if node := p.world.Node(p.nameOf(i)); node != nil && suitable(node) && (asks.onNode(node) || p.mayMoveTo(ctx, asks, node)) {
				return i, unknown
			}
		}
		return -1, no
	}
	if at, a := p.firstFree(ctx, j, asks, nodes, suitable); a != no {
		return at, a
	}
	return p.firstEvictable(ctx, j, asks, nodes, suitable)
}

// firstFree looks for a node on which the devices are free.
func (p *pass[T, K]) firstFree(ctx *budget, j *job[T, K], asks *Question, among *nodeSet, suitable func(*v1.Node) bool) (at int, a answer) {
	v := p.verdictsOn(p.shapeOf(asks))
	if p.held {
		j.later.orCommon(among, &v.spare)
	}
	nodes := among.clone()
	nodes.without(&v.refused)
	for i := nodes.bits.Next(0); i >= 0; i = nodes.bits.Next(i + 1) {
		node := p.world.Node(p.nameOf(i))
		if node == nil || !suitable(node) {
			continue
		}
		if !asks.onNode(node) {
			if p.mayMoveTo(ctx, asks, node) {
				return i, unknown
			}
			continue
		}
		switch p.check(ctx, asks, node, p.expected) {
		case unknown:
			return i, unknown
		case yes:
			p.take(ctx, j, asks, node, p.expected)
			return i, yes
		case no:
		}
		v.refused.add(i)
		if p.held && p.check(ctx, asks, node, p.usage) != no {
			v.spare.add(i)
			j.later.add(i)
		}
	}
	return -1, no
}

// firstEvictable looks for a node on which the devices would be free if others were evicted for the pod. Where that was so in the pod's
// last attempt it is no news: either they are being evicted, see Nominated, or something besides devices keeps them from it.
func (p *pass[T, K]) firstEvictable(ctx *budget, j *job[T, K], asks *Question, among *nodeSet,
	suitable func(*v1.Node) bool,
) (at int, a answer) {
	if asks.Evicts == "" {
		return -1, no
	}
	v := p.verdictsOn(asks.Evicts + "/" + p.shapeOf(asks))
	nodes := among.clone()
	if j.asks == nil {
		j.skipped.orCommon(&nodes, &j.evictable)
		nodes.without(&j.evictable)
	}
	if p.held {
		j.later.orCommon(&nodes, &v.spare)
	}
	nodes.without(&v.refused)
	for i := nodes.bits.Next(0); i >= 0; i = nodes.bits.Next(i + 1) {
		node := p.world.Node(p.nameOf(i))
		if node == nil || !suitable(node) || !asks.onNode(node) {
			continue
		}
		if ctx.Err() != nil {
			return i, unknown
		}
		evicted := p.world.Evicted(j.pod, j.tag, node, p.inventory, p.usage)
		if evicted == nil {
			v.refused.add(i)
			continue
		}
		switch free := evicted(p.expected); p.check(ctx, asks, node, free) {
		case unknown:
			return i, unknown
		case yes:
			p.take(ctx, j, asks, node, free)
			return i, yes
		case no:
		}
		v.refused.add(i)
		if p.held && p.check(ctx, asks, node, evicted(p.usage)) != no {
			v.spare.add(i)
			j.later.add(i)
		}
	}
	return -1, no
}

// shapeOf tells apart requests that may fit different nodes.
func (p *pass[T, K]) shapeOf(asks *Question) string {
	if !p.inventory.MindsNamespaces() {
		return asks.shapeOf()
	}
	return asks.Requests.Claims()[0].Namespace + "/" + asks.shapeOf()
}

func (p *pass[T, K]) verdictsOn(shape string) *verdicts {
	v := p.verdicts[shape]
	if v == nil {
		v = &verdicts{}
		p.verdicts[shape] = v
	}
	return v
}

// mayMoveTo tells whether the pod's allocations may be given up for a node on which they cannot be used. What other woken pods are expected
// to take is not looked at.
func (p *pass[T, K]) mayMoveTo(ctx *budget, asks *Question, node *v1.Node) bool {
	if !asks.Movable {
		return false
	}
	return asks.Elsewhere == nil || p.check(ctx, &Question{Requests: asks.Elsewhere}, node, p.usage) != no
}

func (p *pass[T, K]) check(ctx *budget, asks *Question, node *v1.Node, view usage.View) answer {
	switch result := allocator.Check(ctx, p.input(ctx, asks, node, view)); {
	case ctx.Err() != nil:
		return unknown
	case result.Fits():
		return yes
	case result.Failure.Reason == explain.ReasonUndecided:
		return unknown
	}
	return no
}

// take notes what the pod would take on the node with that usage. If it cannot be told, or is not certain to
// be tried, it is expected to take nothing.
func (p *pass[T, K]) take(ctx *budget, j *job[T, K], asks *Question, node *v1.Node, view usage.View) {
	if asks.Uncertain {
		return
	}
	result := allocator.Allocate(ctx, p.input(ctx, asks, node, view))
	if !result.Fits() {
		return
	}
	for i, claim := range asks.Requests.Claims() {
		j.holds = append(j.holds, hold{usage.RefOf(claim), &result.Allocations[i]})
	}
	p.expect(j.holds)
}

func (p *pass[T, K]) input(ctx *budget, asks *Question, node *v1.Node, view usage.View) allocator.Input {
	return allocator.Input{
		Requests: asks.Requests, Node: node, Inventory: p.inventory, Usage: view, Policy: allocator.FirstFit,
		Attempt: &evaluation{ctx},
	}
}

// budget is a context that ends at a time, without a timer: it is made for each pod, and the allocator looks at nothing but Err. It has no
// Deadline: who makes a context with a timer of it, see evaluation, would get one without.
type budget struct {
	context.Context

	now   func() time.Time
	until time.Time
}

func (b *budget) Err() error {
	if err := b.Context.Err(); err != nil {
		return err
	}
	if b.now().After(b.until) {
		return context.DeadlineExceeded
	}
	return nil
}

// hasPlaces tells whether all of the pod's claims have a place for it besides those for pods woken before.
func (p *pass[T, K]) hasPlaces(asks *Question) bool {
	for claim, left := range asks.Places {
		if p.coming[claim] >= left {
			return false
		}
	}
	return true
}
