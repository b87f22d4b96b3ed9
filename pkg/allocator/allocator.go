package allocator

import (
	"context"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// Policy says which of several valid allocations is chosen.
type Policy int

const (
	// FirstFit takes the first devices in the order of pools, slices and devices, exactly as upstream's
	// allocator does.
	FirstFit Policy = iota
	// SmallestFit takes the smallest devices that fit: those with the least capacity, of shared ones those with the least
	// left, then those that take the least of shared counters and leave the least of them. It does not take any that
	// FirstFit could not take, and it takes the first of those that are equal.
	SmallestFit
)

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
	variant variant
	// ctx is what Check and Allocate were called with, and interrupted why CEL could not say everything that was asked before its
	// time was over: nothing that was found since is true.
	ctx         context.Context
	interrupted error
}

// variant is a search that finds the same in another way. The zero value is the usual one.
type variant struct {
	// shareAll makes nodes share also what is found at once.
	shareAll bool
	// hurried ends the short attempt after one step.
	hurried bool
}

// match returns what the alternative says about the devices of a pool. If there is no time to evaluate its selectors no device
// matches, and the input is interrupted.
func (in *Input) match(a *alternative, p *inventory.NodePool) *inventory.PoolMatch {
	if known := a.matcher.Known(p); known != nil {
		return known
	}
	var match *inventory.PoolMatch
	in.evaluate(func(ctx context.Context) (err error) {
		match, err = a.matcher.On(ctx, p)
		return err
	})
	return match
}

// evaluate calls what evaluates CEL, with the time that is left for that.
func (in *Input) evaluate(fn func(context.Context) error) {
	ctx := in.ctx
	if in.Attempt != nil {
		var done context.CancelFunc
		ctx, done = in.Attempt.Evaluate(ctx)
		defer done()
	}
	if err := fn(ctx); err != nil && in.interrupted == nil {
		in.interrupted = err
	}
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
	in.ctx, in.interrupted = ctx, nil
	return decide(ctx, &in, false)
}

// Allocate decides like Check and returns the allocations. With equal input it fits exactly when Check does.
func Allocate(ctx context.Context, in Input) Result {
	in.ctx, in.interrupted = ctx, nil
	return decide(ctx, &in, true)
}
