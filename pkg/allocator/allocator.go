// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"context"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/allocator/internal/answers"
	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/evaluation"
	"stowage.dev/stowage/pkg/allocator/internal/search"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

type (
	// Features are the optional parts of the API that claims may use.
	Features = compiled.Features
	// ClaimError says what is wrong with a claim, or with a class that it names, independent of any node.
	ClaimError = compiled.ClaimError
	// SelectorError is what CEL, or the comparison of capacities, failed at on one device.
	SelectorError = evaluation.SelectorError
	// Attempt is one attempt to schedule a pod, with the time that it has.
	Attempt = evaluation.Attempt
	// Policy says which of several valid allocations is chosen.
	Policy = search.Policy
)

// The policies.
const (
	FirstFit    = search.FirstFit
	SmallestFit = search.SmallestFit
)

// DefaultFeatures are those on by default in Kubernetes 1.37.
func DefaultFeatures() Features { return compiled.DefaultFeatures() }

// Requests are a pod's claims in the form in which nodes are judged: everything that does not depend on the
// node is decided. Immutable but for a cache, safe for concurrent use.
type Requests struct {
	compiled *compiled.Requests
	// answers are what was found on nodes for which that took long.
	answers answers.Table
}

// Compile compiles the unallocated claims of one pod, all of its namespace, against the classes of the view. The error is a
// [*ClaimError] that names claim, request and field: an unknown class, a selector that does not compile, a
// request type or a feature that is not known or disabled, more devices than an allocation can list.
func Compile(claims []*resourceapi.ResourceClaim, inv *inventory.View, features Features) (*Requests, error) {
	return CompileWithin(context.Background(), claims, inv, features)
}

// CompileWithin is Compile with a bound for the time: a CEL expression that was not compiled before takes up to some hundred
// milliseconds. The error wraps the cause of ctx if that ends before all are compiled. Those that are stay so, as far as the caches of
// the inventory have room for them.
func CompileWithin(ctx context.Context, claims []*resourceapi.ResourceClaim, inv *inventory.View, features Features) (*Requests, error) {
	requests, err := compiled.Compile(ctx, claims, inv, features)
	if err != nil {
		return nil, err
	}
	return &Requests{compiled: requests}, nil
}

// Claims returns the claims in the order of Result.Allocations.
func (r *Requests) Claims() []*resourceapi.ResourceClaim { return r.compiled.Objects }

// Input is everything a decision depends on.
type Input struct {
	// Requests are the pod's compiled claims.
	Requests *Requests
	// Node is the candidate.
	Node *v1.Node
	// Inventory and Usage are the views of one scheduling cycle.
	Inventory *inventory.View
	Usage     usage.View
	Policy    Policy
	Scoring   Scoring
	// Attempt bounds the time, besides the context; nil for no bound.
	Attempt Attempt
	// NewShareID makes the ID of one share of a device that allows multiple allocations. IDs must differ for all
	// shares of a device, also those of other pods. Nil means random UUIDs, as upstream's; they are all that is not
	// determined by the rest of the input.
	NewShareID func() types.UID

	// variant is how the search differs from what is best, as tests want it.
	variant   search.Variant
	evaluator evaluation.Evaluator
}

// Result is the answer for one node.
type Result struct {
	// Allocations holds one entry per claim, in the order given to Compile. Only Allocate fills it. The
	// entries share memory with the claims, classes and slices that they come from: copy before changing.
	// AllocationTimestamp is left to the writer.
	Allocations []resourceapi.AllocationResult
	// Score is the raw preference for this node: for each request with alternatives, 8 for the first
	// alternative down to 1 for the eighth (KEP-4816); with a Scoring other than NoScoring that times 10,000, and 0 to
	// 999 for how many of the matching devices are held. Higher is better; normalize over the nodes.
	Score int64
	// Size is how large the devices are that the claims take of this node, in sum of all requests: with SmallestFit and a Scoring
	// other than NoScoring, if it is known, and otherwise 0. Smaller is better, among nodes of equal preference and before
	// occupancy; the numbers can be compared, and mean nothing else.
	Size int64
	// Failure says why the node cannot be used. Nil means that the claims fit.
	Failure *Failure
}

// Fits tells whether the node satisfies the claims.
func (r Result) Fits() bool { return r.Failure == nil }

// Check decides whether the node can satisfy the requests, and with which preference. It keeps no
// allocation. If ctx ends or the attempt's time is over before the answer is known, the failure's reason is
// ReasonUndecided, which says nothing about other nodes but those that are alike.
func Check(ctx context.Context, in Input) Result {
	in.evaluator = evaluation.Evaluator{Ctx: ctx, Attempt: in.Attempt}
	return decide(&in, false)
}

// Allocate decides like Check and returns the allocations. With equal input it fits exactly when Check does.
func Allocate(ctx context.Context, in Input) Result {
	in.evaluator = evaluation.Evaluator{Ctx: ctx, Attempt: in.Attempt}
	return decide(&in, true)
}
