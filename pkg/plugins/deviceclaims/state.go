package deviceclaims

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podmemory"
)

const stateKey fwk.StateKey = Name

// plan is what PreFilter found out about a pod. It does not change afterwards.
type plan struct {
	// claims are the pod's claims as they were in PreFilter, each once, ordered by name.
	claims []podclaims.Claim
	// base is what a node has to satisfy that has device plugins for all extended resources of the pod.
	base *extended.Variant
	// extended is about the pod's extended resources, nil if it asks for none that a DeviceClass may stand for.
	extended *extended.Plan
	// budget is the time that Filter has.
	budget *budget
	// failed is what could not be made ready for the pod in earlier attempts. Nil if there is nothing.
	failed *podmemory.Failures
}

// groupOf returns the group that a claim of the pod is reserved for, empty if that is the pod.
func (p *plan) groupOf(claim types.UID, pod *v1.Pod) types.UID {
	for i := range p.claims {
		if pc := &p.claims[i]; pc.Claim.UID == claim && pc.User.UID != pod.UID {
			return pc.User.UID
		}
	}
	return ""
}

// cycle is the plugin's part of the CycleState.
type cycle struct {
	*plan
	contention.Situation
	// placed tells that the pod has been given devices on trial.
	placed bool
	// nominees are the pods that devices were kept for on trial. They are the same in the end, though more are known then: the scheduling
	// queue says of a pod that is nominated what it needs while it has that pod, and it has none of those that are being tried.
	nominees []*v1.Pod
	results  *results
	// binding is what was done for the pod from Reserve on. One goroutine at a time uses it.
	binding *progress
}

// Clone implements [fwk.StateData]. Preemption tries nodes on clones, in parallel.
func (c *cycle) Clone() fwk.StateData {
	return &cycle{plan: c.plan, Situation: c.Situation, results: newResults(c.results), binding: c.binding}
}

// findings are where Filter notes what it finds out. What it finds out in a dry run stays in the clone. A clone that only has nominated
// pods added is how the framework asks for the node as it is.
func (c *cycle) findings() *results {
	r := c.results
	for !c.WhatIf.IsDryRun() && r.parent != nil {
		r = r.parent
	}
	return r
}

// readCycle returns the pod's state, nil if PreFilter found nothing to do or refused the pod.
func readCycle(state fwk.CycleState) (*cycle, error) {
	data, err := state.Read(stateKey)
	switch {
	case errors.Is(err, fwk.ErrNotFound):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("read the state of %s: %w", Name, err)
	}
	c, ok := data.(*cycle)
	if !ok {
		return nil, fmt.Errorf("the state of %s has type %T", Name, data)
	}
	return c, nil
}

// results are what Filter found out, by node. Safe for concurrent use.
type results struct {
	// parent has the results of the state of which this one's is a clone.
	parent *results

	mutex    sync.Mutex
	nodes    map[string]nodeResult
	unusable sets.Set[int]
	// failed tells that a node was refused because it only has what could not be made ready for the pod.
	failed bool
	// classless tells that a node was refused because what it has to satisfy cannot be said without a class.
	classless bool
	// unseen are the nodes that were refused because it is not known which devices a device plugin has.
	unseen []string
	// undecided tells that there was no time to find out whether others can be evicted from a node.
	undecided bool
	// leaving are the claims whose end the pod has to wait for, on the node that it is nominated to.
	leaving     []*contention.Holder
	leavingNode string
}

// nodeResult is the answer for one node.
type nodeResult struct {
	// variant is what the node had to satisfy.
	variant *extended.Variant
	// score and size are the allocator's.
	score, size int64
	failure     *allocator.Failure
	// unseen are devices that pods may have from device plugins, see extended.Resources.HeldUnseen.
	unseen *resourceapi.AllocationResult
	// evictable tells that a node that was refused would do without pods of lower priority.
	evictable bool
}

func newResults(parent *results) *results {
	return &results{parent: parent, nodes: map[string]nodeResult{}}
}

func (r *results) set(node string, result nodeResult) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.nodes[node] = result
}

func (r *results) get(node string) (nodeResult, bool) {
	for ; r != nil; r = r.parent {
		r.mutex.Lock()
		result, ok := r.nodes[node]
		r.mutex.Unlock()
		if ok {
			return result, true
		}
	}
	return nodeResult{}, false
}

// accepted returns the nodes that were not refused, in no order.
func (r *results) accepted() []string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	var nodes []string
	for name, result := range r.nodes {
		if result.failure == nil {
			nodes = append(nodes, name)
		}
	}
	return nodes
}

// evictable returns the nodes that would do without pods of lower priority, in no order.
func (r *results) evictable() []string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	var nodes []string
	for name, result := range r.nodes {
		if result.evictable {
			nodes = append(nodes, name)
		}
	}
	return nodes
}

// leavingFor returns the node that the pod is nominated to and the claims there whose end it has to wait for.
func (r *results) leavingFor() (string, []*contention.Holder) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.leavingNode, r.leaving
}

func (r *results) setLeaving(node string, leaving []*contention.Holder) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.leavingNode, r.leaving = node, leaving
}

// setUnusable notes that the allocation of a claim, by its index, rules out a node.
func (r *results) setUnusable(claim int) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	if r.unusable == nil {
		r.unusable = sets.New[int]()
	}
	r.unusable.Insert(claim)
}

// setFailed notes that a node was refused because it only has what could not be made ready for the pod.
func (r *results) setFailed() {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.failed = true
}

// setClassless notes that a node was refused because what it has to satisfy cannot be said without a class.
func (r *results) setClassless() {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.classless = true
}

// setUnseen notes that a node was refused because it is not known which devices a device plugin has.
func (r *results) setUnseen(node string) {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.unseen = append(r.unseen, node)
}

func (r *results) unseenOn() []string {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return slices.Clone(r.unseen)
}

func (r *results) isClassless() bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.classless
}

func (r *results) haveFailed() bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.failed
}

// setUndecided notes that there was no time to find out whether others can be evicted from a node.
func (r *results) setUndecided() {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	r.undecided = true
}

// isUndecided tells whether the time was not enough for some node.
func (r *results) isUndecided() bool {
	r.mutex.Lock()
	undecided := r.undecided
	r.mutex.Unlock()
	if undecided {
		return true
	}
	for _, failure := range r.failures() {
		if failure.Reason == explain.ReasonUndecided {
			return true
		}
	}
	return false
}

func (r *results) isUnusable(claim int) bool {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	return r.unusable.Has(claim)
}

// mostRefused returns what most nodes do not satisfy, nil if all do. It differs between nodes only for
// pods with extended resources, where nodes of several kinds are in one cluster.
func (r *results) mostRefused() *extended.Variant {
	r.mutex.Lock()
	defer r.mutex.Unlock()
	nodes := map[*allocator.Requests]int{}
	first := map[*allocator.Requests]string{} // for a result that does not depend on the order
	variants := map[*allocator.Requests]*extended.Variant{}
	for name, result := range r.nodes {
		if result.failure == nil {
			continue
		}
		requests := result.variant.Requests
		variants[requests] = result.variant
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

// failures iterates over the nodes on which no allocation was found, in no particular order.
func (r *results) failures() iter.Seq2[string, *allocator.Failure] {
	return r.failuresOf(func(nodeResult) bool { return true })
}

// failuresFor is failures of nodes that had to satisfy the given requests.
func (r *results) failuresFor(requests *allocator.Requests) iter.Seq2[string, *allocator.Failure] {
	return r.failuresOf(func(result nodeResult) bool { return result.variant.Requests == requests })
}

func (r *results) failuresOf(wanted func(nodeResult) bool) iter.Seq2[string, *allocator.Failure] {
	r.mutex.Lock()
	nodes := maps.Clone(r.nodes)
	r.mutex.Unlock()
	return func(yield func(string, *allocator.Failure) bool) {
		for node, result := range nodes {
			if result.failure != nil && wanted(result) && !yield(node, result.failure) {
				return
			}
		}
	}
}

// groupCycle is what is known of the pods of a group in one cycle of the group. One goroutine uses it.
type groupCycle struct {
	pods map[types.UID]*cycle
}

// Clone implements [fwk.StateData].
func (g *groupCycle) Clone() fwk.StateData { return g }

// claims are those of the pods, by UID.
func (g *groupCycle) claims() sets.Set[types.UID] {
	claims := sets.New[types.UID]()
	for _, c := range g.pods {
		for _, pc := range c.claims {
			claims.Insert(pc.Claim.UID)
		}
	}
	return claims
}

// readGroupCycle returns what is known of the group's pods. It is empty if none of them needs devices.
func readGroupCycle(state fwk.PodGroupCycleState) (*groupCycle, error) {
	data, err := state.Read(stateKey)
	if errors.Is(err, fwk.ErrNotFound) {
		return &groupCycle{pods: map[types.UID]*cycle{}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the state of %s: %w", Name, err)
	}
	g, ok := data.(*groupCycle)
	if !ok {
		return nil, fmt.Errorf("the state of %s has type %T", Name, data)
	}
	return g, nil
}

// noteInGroup notes what PreFilter found out about a pod in a cycle of its group.
func noteInGroup(state fwk.CycleState, pod *v1.Pod, c *cycle) error {
	group := state.GetPodGroupSchedulingCycle()
	g, err := readGroupCycle(group)
	if err != nil {
		return err
	}
	g.pods[pod.UID] = c
	group.Write(stateKey, g)
	return nil
}
