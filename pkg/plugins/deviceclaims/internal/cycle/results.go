// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cycle

import (
	"iter"
	"maps"
	"slices"
	"sync"
	"sync/atomic"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
)

// Results are what Filter found out, by node. Safe for concurrent use.
type Results struct {
	// parent has the results of the state of which this one's is a clone.
	parent *Results

	// Failed tells that a node was refused because it only has what could not be made ready for the pod.
	Failed atomic.Bool
	// Classless tells that a node was refused because what it has to satisfy cannot be said without a class.
	Classless atomic.Bool
	// Undecided tells that there was no time to find out whether others can be evicted from a node.
	Undecided atomic.Bool

	mutex    sync.Mutex
	nodes    map[string]NodeResult
	unusable sets.Set[int]
	// unseen are the nodes that were refused because it is not known which devices a device plugin has.
	unseen []string
	// leaving are the claims whose end the pod has to wait for, on the node that it is nominated to.
	leaving     []*contention.Holder
	leavingNode string
}

// NodeResult is the answer for one node.
type NodeResult struct {
	// Variant is what the node had to satisfy.
	Variant *extended.Variant
	// Score and Size are the allocator's.
	Score, Size int64
	Failure     *allocator.Failure
	// Unseen are devices that pods may have from device plugins, see extended.Resources.HeldUnseen.
	Unseen *resourceapi.AllocationResult
	// Evictable tells that a node that was refused would do without pods of lower priority.
	Evictable bool
}

// NewResults returns those of a clone of the state that has the others, or the first ones.
func NewResults(parent *Results) *Results {
	return &Results{parent: parent, nodes: map[string]NodeResult{}, unusable: sets.New[int]()}
}

// Set notes the answer for a node.
func (r *Results) Set(node string, result NodeResult) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.nodes[node] = result
}

// Get returns the answer for a node, also of the state of which this one's is a clone.
func (r *Results) Get(node string) (NodeResult, bool) {
	for ; r != nil; r = r.parent {
		r.mutex.Lock()
		result, ok := r.nodes[node]
		r.mutex.Unlock()
		if ok {
			return result, true
		}
	}
	return NodeResult{}, false
}

// Accepted returns the nodes that were not refused, in no order.
func (r *Results) Accepted() []string {
	return r.nodesWith(func(result NodeResult) bool { return result.Failure == nil })
}

// Evictable returns the nodes that would do without pods of lower priority, in no order.
func (r *Results) Evictable() []string {
	return r.nodesWith(func(result NodeResult) bool { return result.Evictable })
}

func (r *Results) nodesWith(is func(NodeResult) bool) []string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	var nodes []string
	for name, result := range r.nodes {
		if is(result) {
			nodes = append(nodes, name)
		}
	}
	return nodes
}

// LeavingFor returns the node that the pod is nominated to and the claims there whose end it has to wait for.
func (r *Results) LeavingFor() (string, []*contention.Holder) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.leavingNode, r.leaving
}

// SetLeaving notes the node that the pod is nominated to and the claims there whose end it has to wait for.
func (r *Results) SetLeaving(node string, leaving []*contention.Holder) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.leavingNode, r.leaving = node, leaving
}

// SetUnusable notes that the allocation of a claim, by its index, rules out a node.
func (r *Results) SetUnusable(claim int) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.unusable.Insert(claim)
}

// SetUnseen notes that a node was refused because it is not known which devices a device plugin has.
func (r *Results) SetUnseen(node string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.unseen = append(r.unseen, node)
}

// UnseenOn returns the nodes that SetUnseen was told of.
func (r *Results) UnseenOn() []string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return slices.Clone(r.unseen)
}

// IsUndecided tells whether the time was not enough for some node.
func (r *Results) IsUndecided() bool {
	if r.Undecided.Load() {
		return true
	}
	for _, failure := range r.Failures() {
		if failure.Reason == explain.ReasonUndecided {
			return true
		}
	}
	return false
}

// IsUnusable tells whether SetUnusable was told of the claim.
func (r *Results) IsUnusable(claim int) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.unusable.Has(claim)
}

// MostRefused returns what most nodes do not satisfy, nil if all do. It differs between nodes only for
// pods with extended resources, where nodes of several kinds are in one cluster.
func (r *Results) MostRefused() *extended.Variant {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	nodes := map[*allocator.Requests]int{}
	first := map[*allocator.Requests]string{} // for a result that does not depend on the order
	variants := map[*allocator.Requests]*extended.Variant{}
	for name, result := range r.nodes {
		if result.Failure == nil {
			continue
		}
		requests := result.Variant.Requests
		variants[requests] = result.Variant
		nodes[requests]++
		if known, ok := first[requests]; !ok || name < known {
			first[requests] = name
		}
	}
	var most *allocator.Requests
	for requests, n := range nodes {
		if most == nil || n > nodes[most] || n == nodes[most] && first[requests] < first[most] {
			most = requests
		}
	}
	return variants[most]
}

// Failures iterates over the nodes on which no allocation was found, in no particular order.
func (r *Results) Failures() iter.Seq2[string, *allocator.Failure] {
	return r.failuresOf(func(NodeResult) bool { return true })
}

// FailuresFor is Failures of nodes that had to satisfy the given requests.
func (r *Results) FailuresFor(requests *allocator.Requests) iter.Seq2[string, *allocator.Failure] {
	return r.failuresOf(func(result NodeResult) bool { return result.Variant.Requests == requests })
}

func (r *Results) failuresOf(wanted func(NodeResult) bool) iter.Seq2[string, *allocator.Failure] {
	r.mutex.Lock()
	nodes := maps.Clone(r.nodes)
	r.mutex.Unlock()
	return func(yield func(string, *allocator.Failure) bool) {
		for node, result := range nodes {
			if result.Failure != nil && wanted(result) && !yield(node, result.Failure) {
				return
			}
		}
	}
}
