package allocator

import (
	"stowage.dev/stowage/pkg/inventory"
)

// Reason is why a node cannot be used, in one of few fixed strings: the scheduler counts equal strings over
// all nodes, so nothing that differs between nodes belongs into it.
type Reason string

// The reasons, in the order in which they take precedence when several apply.
const (
	ReasonUndecided     Reason = "undecided: timed out while searching for devices"
	ReasonSelectorError Reason = "a CEL selector failed at run time on a device of the node"
	ReasonPool          Reason = "a resource pool of the node is incomplete or invalid"
	ReasonNoMatch       Reason = "not enough devices match the claim"
	ReasonUnsupported   Reason = "matching devices need a feature that is not supported"
	ReasonTainted       Reason = "matching devices have taints that the claim does not tolerate"
	ReasonHeld          Reason = "matching devices are held by other claims"
	ReasonConstraints   Reason = "free devices do not satisfy all requests and constraints of the claims together"
	ReasonTooMany       Reason = "the claim would get more devices than one allocation can list"
)

// Failure is why a node was refused: the counts that the decision was made from.
type Failure struct {
	Reason Reason
	// Requests has the counts, one entry per request alternative and pool, in the order of the claims,
	// requests, alternatives and pools. Empty for ReasonUndecided.
	Requests []RequestCounts
	// Pools are the unusable pools of the node.
	Pools []*inventory.PoolProblem
	// SelectorErrors are the devices on which a CEL selector failed, at most a few.
	SelectorErrors []SelectorError
	// Err is why the search ended early, for ReasonUndecided.
	Err error
}

// Resolvable tells whether the release of devices by their present holders could make the node usable.
func (f *Failure) Resolvable() bool {
	return f.Reason == ReasonHeld || f.Reason == ReasonConstraints
}

// RequestCounts says how the devices of one pool of the node look to one request alternative. Every device
// that the node sees is counted in exactly one of FilteredByClass, FilteredBy, Errors and Matching.
type RequestCounts struct {
	// Claim, Request and Alternative are indexes into the compiled claims; Alternative is 0 for a request
	// without alternatives.
	Claim, Request, Alternative int
	// Pool is what was looked at; nodes that see the same devices of a pool have the same pointer.
	Pool *inventory.NodePool
	// Wanted is how many devices the request needs on this node, in all pools together. For a request for
	// all devices it is what matched.
	Wanted int
	// Devices is the number of devices that the node sees in the pool.
	Devices int
	// FilteredByClass were rejected by a selector of the class.
	FilteredByClass int
	// FilteredBy[k] were rejected by the request's own selector k, being the first to reject them.
	FilteredBy []int
	// Errors is the number of devices on which a selector failed at run time.
	Errors int
	// Matching passed all selectors; the following are parts of it, and may overlap.
	Matching int
	// Held have a holder. Always 0 for admin access.
	Held int
	// Tainted have a taint that is not tolerated; Taints counts by the first such taint's key.
	Tainted int
	Taints  map[string]int
	// Unsupported need a feature that is not supported.
	Unsupported int
	// Free is Matching without Held, Tainted and Unsupported.
	Free int
}

// SelectorError is a CEL selector that failed at run time on one device.
type SelectorError struct {
	// Namespace, Claim and Request name what asked.
	Namespace, Claim, Request string
	// Class is the DeviceClass if the selector is the class's; empty if it is the request's own.
	Class string
	// Expression is the selector.
	Expression string
	// Driver, Pool and Device name the device.
	Driver, Pool, Device string
	// Err is what CEL said.
	Err error
}
