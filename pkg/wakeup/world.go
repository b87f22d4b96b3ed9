// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package wakeup

import (
	"iter"
	"time"

	v1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// World is what a pass decides on. T is what the owner of a waiter gives with it, and K a place in the order of the scheduling queue.
type World[T, K any] struct {
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
	Suitable func(pod *v1.Pod, tag T) func(*v1.Node) bool
	// Evicted returns what the usage would be on a node without those holders that the pod may have evicted, as a function of the usage. It is
	// nil where there are none. What a holder is follows from what is in use, which is given.
	Evicted func(pod *v1.Pod, tag T, node *v1.Node, inv *inventory.View, inUse usage.View) func(usage.View) usage.View
	// Look says what the pod asks for now, with these classes.
	Look func(pod *v1.Pod, tag T, inv *inventory.View) *Question
	// Key and Before are the order of the scheduling queue.
	Key    func(pod *v1.Pod, tag T) K
	Before func(tag T, a, b K) bool
}

// Wake is a pod to be woken.
type Wake[T any] struct {
	Pod   *v1.Pod
	Tag   T
	Cause Cause
}

// allOf are all nodes on which devices were missing.
func (p *pass[T, K]) allOf(j *job[T, K]) nodeSet {
	if j.interest != nil {
		return j.interest.clone()
	}
	return p.every()
}

// every are all nodes.
func (p *pass[T, K]) every() nodeSet {
	var all nodeSet
	_, numbers := p.allNodes()
	for _, number := range numbers {
		all.add(number)
	}
	return all
}

// allNodes returns all nodes and their numbers.
func (p *pass[T, K]) allNodes() ([]*v1.Node, []int) {
	if p.all == nil {
		nodes := p.world.Nodes()
		p.all = &nodeList{nodes, p.numbersOf(func(yield func(string) bool) {
			for _, node := range nodes {
				if !yield(node.Name) {
					return
				}
			}
		})}
	}
	return p.all.nodes, p.all.numbers
}

// numbersOf returns the numbers of nodes.
func (p *pass[T, K]) numbersOf(names iter.Seq[string]) []int {
	p.room.mutex.Lock()
	defer p.room.mutex.Unlock()
	var numbers []int
	for name := range names {
		numbers = append(numbers, p.room.nodes.number(name))
	}
	return numbers
}

// nameOf returns the name of a node.
func (p *pass[T, K]) nameOf(i int) string {
	p.room.mutex.Lock()
	defer p.room.mutex.Unlock()
	return p.room.nodes.names[i]
}
