// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package extended

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/usage"
)

// Reasons why a node is refused for a pod with extended resources. The scheduler counts equal ones.
const (
	reasonClassGone     = "node(s) without a device plugin for an extended resource whose device class is gone"
	reasonPluginLeaving = "node(s) where pods still hold devices of an extended resource that the device plugin no longer provides"
	reasonClaimRecorded = "node(s) whose device plugin provides the extended resources, for which the pod's status already names a claim"
	ReasonUnseen        = "node(s) where pods have devices from a device plugin, and the node's agent has not told yet which these are"
	reasonGivenToClaims = "node(s) where claims have devices that the device plugin may give to the pod, too"
	reasonClaimOutdated = "node(s) where the claim of an earlier attempt is not what the pod's extended resources need"
)

// Plan is what PreFilter found out about a pod's extended resources (KEP-5004).
//
// A node either has a device plugin for a resource, seen by what it has of it in status.allocatable, or it gives
// its devices to claims, if a DeviceClass stands for the resource. A cluster may have both kinds of nodes. The pod
// needs a claim only on the latter, and what is in that claim depends on which of its resources the node's device
// plugins provide.
//
// NodeResourcesFit looks at the same node and asks the same resolver. What it leaves to claims must be decided
// here, or the pod would be bound without devices.
type Plan struct {
	Pod *v1.Pod
	// Names are what the pod asks for and a class may stand for, ordered.
	Names []v1.ResourceName
	// backed are the names for which a class stood in PreFilter.
	backed sets.Set[v1.ResourceName]
	// recorded tells that the pod's status names a claim, or may. It can be replaced and not be taken back, and a
	// kubelet that finds it does not start the pod without that claim.
	recorded bool

	// Adopted is the allocated claim of an earlier attempt, which the pod uses again if it can. It is also among the
	// plan's claims.
	Adopted *resourceapi.ResourceClaim
	// Leftovers are other claims of earlier attempts.
	Leftovers []*resourceapi.ResourceClaim

	// unborn is the claim to be made, without requests.
	unborn *resourceapi.ResourceClaim
	// requests are what the pod's claims without allocation ask for, nil if there are none.
	requests *allocator.Requests
	// compile compiles the pod's claims without allocation and one more claim, until the context ends.
	compile func(context.Context, *resourceapi.ResourceClaim) (*allocator.Requests, error)

	mutex    sync.Mutex
	variants map[string]*Variant // by the backings
}

// Variant is what one kind of nodes has to satisfy.
type Variant struct {
	// Claim is the claim to be made, nil if none is needed.
	Claim    *resourceapi.ResourceClaim
	mappings []v1.ContainerExtendedResourceRequest
	// Requests are the pod's claims without allocation, with the one to be made. Nil if there are none.
	Requests *allocator.Requests
	// err says why no node of this kind can be used, undecided that it is not known because there was no time to compile the claim.
	err       error
	undecided bool
}

// Plan begins the plan for a pod's extended resources. requests are what its claims without allocation ask for, and compile compiles them
// with one more claim, until the context ends.
func (r *Resources) Plan(
	pod *v1.Pod, names []v1.ResourceName, requests *allocator.Requests,
	compile func(context.Context, *resourceapi.ResourceClaim) (*allocator.Requests, error),
) *Plan {
	e := &Plan{
		Pod: pod, Names: names, requests: requests, compile: compile, backed: sets.New[v1.ResourceName](),
		recorded: r.Recorded.Has(pod),
		unborn:   unbornClaim(pod),
		variants: map[string]*Variant{},
	}
	for _, name := range names {
		if r.ClassOf(name) != nil {
			e.backed.Insert(name)
		}
	}
	for _, claim := range r.MadeFor(pod) {
		if e.Adopted == nil && mayAdopt(claim, pod) {
			e.Adopted = claim
		} else {
			e.Leftovers = append(e.Leftovers, claim)
		}
	}
	return e
}

// Question is what is asked about one node.
type Question struct {
	Node      fwk.NodeInfo
	Inventory *inventory.View
	// Usage returns who holds what.
	Usage func() usage.View
	// Evaluate bounds the time in which expressions are compiled.
	Evaluate func(context.Context) (context.Context, context.CancelFunc)
}

// Refusal says that a node cannot be used.
type Refusal struct {
	// Reason is the same for all such nodes.
	Reason string
	Cause  Cause
}

// Cause is what the pod waits for where a node is refused.
type Cause int

// Causes of refusals.
const (
	// OfNode is for the node itself.
	OfNode Cause = iota
	// OfClass is for a class: any node may do when it comes.
	OfClass
	// OfAgent is for the node's agent to tell which devices a device plugin has.
	OfAgent
	// OfTime is for time to compile the claim.
	OfTime
)

// On says what a node has to satisfy: what the plan says of such nodes.
func (r *Resources) On(e *Plan, q Question) (*Variant, *Refusal) {
	var backings []backing
	scalars := q.Node.GetAllocatable().GetScalarResources()
	for _, name := range e.Names {
		if scalars[name] > 0 { // there is a device plugin, and NodeResourcesFit counts
			if r.mayBeClaimed(q, name) {
				return nil, &Refusal{reasonGivenToClaims, OfAgent}
			}
			continue
		}
		class := r.ClassOf(name)
		switch {
		case class == nil && e.backed.Has(name):
			// NodeResourcesFit may have seen the class just before it went.
			return nil, &Refusal{reasonClassGone, OfClass}
		case class == nil:
			continue // nobody's, or one that NodeResourcesFit was told to ignore
		case r.pluginIsLeaving(q.Node, name):
			return nil, &Refusal{reasonPluginLeaving, OfNode}
		}
		backings = append(backings, backing{name, class.Name})
	}
	if e.recorded && len(backings) == 0 {
		return nil, &Refusal{reasonClaimRecorded, OfNode}
	}
	v := e.variant(q.Evaluate, backings)
	switch {
	case v.undecided:
		return nil, &Refusal{explain.ReasonUndecided.OfNodes(), OfTime}
	case v.err != nil:
		return nil, &Refusal{"node(s) refused: " + v.err.Error(), OfClass}
	case e.Adopted == nil:
		return v, nil
	case v.Claim == nil || !amount.Semantic.DeepEqual(v.Claim.Spec, e.Adopted.Spec):
		return nil, &Refusal{reasonClaimOutdated, OfNode}
	}
	// What the extended resources need is allocated already.
	return &Variant{Requests: e.requests, mappings: v.mappings}, nil
}

// Made returns the claims that earlier attempts made.
func (e *Plan) Made() []*resourceapi.ResourceClaim {
	if e == nil {
		return nil
	}
	if e.Adopted == nil {
		return e.Leftovers
	}
	return append(slices.Clip(e.Leftovers), e.Adopted)
}

// Asked says what the pod waits for where claims provide its extended resources. It is nil if that is nothing, or
// opaque if it cannot be said for all such nodes at once: on some of them a device plugin may provide a part of it.
func (r *Resources) Asked(ctx context.Context, e *Plan) (v *Variant, opaque bool) {
	if e.Adopted != nil || len(e.backed) == 0 {
		return nil, false
	}
	if e.requests != nil || len(e.backed) > 1 {
		return nil, true
	}
	name := sets.List(e.backed)[0]
	class := r.ClassOf(name)
	if class == nil {
		return nil, true // it has gone just now
	}
	within := func(context.Context) (context.Context, context.CancelFunc) { return ctx, func() {} }
	if v = e.variant(within, []backing{{name, class.Name}}); v.err != nil {
		return nil, v.undecided // else no node will do
	}
	return v, false
}

// variant returns what nodes have to satisfy on which claims provide the given resources. What is new is compiled in the time that evaluate
// gives. If that is not enough, nothing is kept, and the variant is undecided.
func (e *Plan) variant(evaluate func(context.Context) (context.Context, context.CancelFunc), backings []backing) *Variant {
	var key strings.Builder
	for _, b := range backings {
		fmt.Fprintf(&key, "%s=%s\n", b.resource, b.class)
	}
	e.mutex.Lock()
	defer e.mutex.Unlock()
	v := e.variants[key.String()]
	if v == nil {
		ctx, done := evaluate(context.Background())
		defer done()
		if v = e.newVariant(ctx, backings); !v.undecided {
			e.variants[key.String()] = v
		}
	}
	return v
}

func (e *Plan) newVariant(ctx context.Context, backings []backing) *Variant {
	if len(backings) == 0 {
		return &Variant{Requests: e.requests}
	}
	l := layOut(e.Pod, backings)
	if n := l.devices(); n > resourceapi.AllocationResultsMaxSize {
		return &Variant{err: fmt.Errorf(
			"the pod needs %d devices for its extended resources, and one claim, which all of them come from, can get %d",
			n, resourceapi.AllocationResultsMaxSize)}
	}
	v := &Variant{Claim: e.unborn.DeepCopy(), mappings: l.mappings}
	v.Claim.Spec.Devices.Requests = l.requests
	v.Requests, v.err = e.compile(ctx, v.Claim)
	cause := context.Cause(ctx)
	v.undecided = cause != nil && errors.Is(v.err, cause) // any other error is no matter of time
	if err, ok := errors.AsType[*allocator.ClaimError](v.err); ok && IsUnborn(err.Claim) {
		named := *err
		named.Subject = v.Subject(err.Request)
		v.err = &named
	}
	return v
}

// Subject names the containers that a request of the claim to be made is for, and what they ask for. Nobody has written that request.
func (v *Variant) Subject(request string) string {
	var containers []string
	var asked string
	for _, m := range v.mappings {
		if m.RequestName == request {
			containers, asked = append(containers, strconv.Quote(m.ContainerName)), m.ResourceName
		}
	}
	switch len(containers) {
	case 0:
		return "the pod's extended resources"
	case 1:
		return fmt.Sprintf("container %s, %s", containers[0], asked)
	}
	return fmt.Sprintf("containers %s, %s", strings.Join(containers, " and "), asked)
}
