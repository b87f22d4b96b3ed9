// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package explain

// Reason is why a node cannot be used, in one of few fixed strings: the scheduler counts equal strings over
// all nodes, so nothing that differs between nodes belongs into it.
type Reason string

// The reasons.
const (
	ReasonUndecided     Reason = "undecided: timed out while searching for devices"
	ReasonSelectorError Reason = "a CEL selector failed at run time on a device of the node"
	ReasonPool          Reason = "a resource pool of the node is incomplete or invalid"
	ReasonNoMatch       Reason = "not enough devices match the claim"
	ReasonUnsupported   Reason = "matching devices need a feature that is not supported"
	ReasonTainted       Reason = "matching devices have taints that the claim does not tolerate"
	ReasonHeld          Reason = "matching devices are held by other claims"
	ReasonConstraints   Reason = "free devices do not satisfy all requests and constraints together"
	ReasonTooMany       Reason = "the claim would get more devices than one allocation can list"
)

// OfNodes is the reason as the scheduler tells it, behind the number of nodes that have it.
func (r Reason) OfNodes() string {
	switch r {
	case ReasonUndecided:
		return "node(s) undecided: timed out while searching for devices"
	case ReasonSelectorError:
		return "node(s) with devices on which a CEL selector failed"
	case ReasonPool:
		return "node(s) with a resource pool that is incomplete or invalid"
	case ReasonNoMatch:
		return "node(s) with too few devices that match the claim"
	case ReasonUnsupported:
		return "node(s) whose matching devices need a feature that is not supported"
	case ReasonTainted:
		return "node(s) whose matching devices have taints that the claim does not tolerate"
	case ReasonHeld:
		return "node(s) whose matching devices are held by other claims"
	case ReasonConstraints:
		return "node(s) whose free devices do not satisfy all requests and constraints together"
	case ReasonTooMany:
		return "node(s) on which the claim would get more devices than one allocation can list"
	}
	return string(r)
}
