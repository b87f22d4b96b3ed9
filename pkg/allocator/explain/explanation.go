// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package explain is what a waiting pod is told: why nodes were refused, as values that can be written as JSON, and as text. It
// decides nothing; the allocator fills it.
package explain

import (
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/inventory"
)

// Explanation is why the claims of one pod were not satisfied, summed up over nodes: the one value that events,
// metrics and the command line show. It refers to nothing and can be kept, compared and written as JSON or YAML;
// field names are stable. Lists are in a fixed order, so that equal failures give equal explanations.
type Explanation struct {
	// Nodes is how many nodes were refused.
	Nodes int `json:"nodes"`
	// Reasons counts the nodes by reason.
	Reasons map[Reason]int `json:"reasons,omitempty"`
	// Requests says, for each request and each of its alternatives, in the order of the claims, how all devices
	// look to it. A pool that several nodes see alike is counted once. Empty if all nodes are undecided.
	Requests []Request `json:"requests,omitempty"`
	// Constraints says how far each matchAttribute constraint gets on the node where it gets farthest.
	Constraints []Constraint `json:"constraints,omitempty"`
	// SelectorErrors are CEL selectors that failed at run time, one for each device on which a node was given up.
	SelectorErrors []SelectorError `json:"selectorErrors,omitempty"`
	// Pools are the pools that are incomplete or invalid, by driver and name.
	Pools []Pool `json:"pools,omitempty"`
	// Holders has nodes that would do if some claims were released, the one with the fewest first. Only
	// allocator.FindHolders fills it.
	Holders []NodeHolders `json:"holders,omitempty"`
	// NeverTogether tells that no node satisfies the requests together even if nobody holds a device, although each alone could be
	// satisfied. Only allocator.FindLimits sets it.
	NeverTogether bool `json:"neverTogether,omitempty"`
	// PerNode has the same counts node by node, if that was asked for, see allocator.ExplainNodes.
	PerNode []Node `json:"perNode,omitempty"`
}

// Request says how devices look to one request, or to one alternative of it.
type Request struct {
	// Namespace and Claim name the claim.
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	// Request is "request" or "request/subrequest".
	Request string `json:"request"`
	// Subject is what the request stands for, where no user has written it.
	Subject string `json:"subject,omitempty"`
	// DeviceClass is the class that the request names.
	DeviceClass string `json:"deviceClass"`
	// Wanted is how many devices the request needs on one node; 0 with All.
	Wanted int `json:"wanted,omitempty"`
	// All tells that the request is for all matching devices of a node.
	All bool `json:"all,omitempty"`
	// Limit is what no node exceeds, if that is less than the request asks for. Only allocator.FindLimits sets it.
	Limit *Limit `json:"limit,omitempty"`
	// Offered is how many devices the nodes can use, of any class.
	Offered int `json:"offered"`
	// Devices is how many devices of the class there are. Each of them is in exactly one of FilteredBy,
	// TooSmall, Failing and Matching.
	Devices int `json:"devices"`
	// FilteredBy counts the devices by the selector of the request that was the first to reject them.
	FilteredBy []SelectorCount `json:"filteredBy,omitempty"`
	DeviceCounts
}

// Limit is what the cluster has for a request that asks for more: no node could satisfy it, whoever releases devices.
type Limit struct {
	// Asked is how many devices are asked for on one node, by this request and those that compete with it for the same devices, and
	// Devices how many of them the node with the most has.
	Asked   int `json:"asked,omitempty"`
	Devices int `json:"devices,omitempty"`
	// Others is how many other requests Asked includes.
	Others int `json:"others,omitempty"`
	// Capacity is set if it is what one device is asked for and none has: AskedCapacity of it, where the largest has LargestCapacity.
	Capacity        resourceapi.QualifiedName `json:"capacity,omitempty"`
	AskedCapacity   string                    `json:"askedCapacity,omitempty"`
	LargestCapacity string                    `json:"largestCapacity,omitempty"`
}

// SelectorCount is how many devices one selector rejected.
type SelectorCount struct {
	Expression string `json:"expression"`
	Devices    int    `json:"devices"`
}

// Constraint says how far a matchAttribute constraint gets.
type Constraint struct {
	// Namespace and Claim name the claim.
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	// Attribute is what the devices must have in common.
	Attribute resourceapi.FullyQualifiedName `json:"attribute"`
	// Best is the largest number of free devices of one node with one value; Wanted is how many are needed.
	Best   int `json:"best"`
	Wanted int `json:"wanted"`
}

// SelectorError says on which device which CEL selector, or which expression that derives an attribute,
// failed at run time.
type SelectorError struct {
	Namespace string `json:"namespace"`
	Claim     string `json:"claim"`
	Request   string `json:"request"`
	// Subject is as in Request.
	Subject string `json:"subject,omitempty"`
	// DeviceClass is set if the selector is the class's, not the request's own.
	DeviceClass string `json:"deviceClass,omitempty"`
	// Attribute is set if the expression derives that attribute and is not a selector.
	Attribute  resourceapi.FullyQualifiedName `json:"attribute,omitempty"`
	Expression string                         `json:"expression"`
	Driver     string                         `json:"driver"`
	Pool       string                         `json:"pool"`
	Device     string                         `json:"device"`
	// Message is what CEL said.
	Message string `json:"message"`
}

// Pool says why a pool cannot be used.
type Pool struct {
	Driver string                `json:"driver"`
	Pool   string                `json:"pool"`
	Kind   inventory.ProblemKind `json:"kind"`
	Detail string                `json:"detail"`
}

// Node says why one node was refused.
type Node struct {
	Node   string `json:"node"`
	Reason Reason `json:"reason"`
	// Detail is what the reason, being the same for many nodes, does not say: which device, pool, or error.
	Detail string `json:"detail,omitempty"`
	// Requests and Constraints are as in Explanation, for this node alone.
	Requests    []Request    `json:"requests,omitempty"`
	Constraints []Constraint `json:"constraints,omitempty"`
}

// NodeHolders says whose devices keep a node from being used that would do otherwise.
type NodeHolders struct {
	Node string `json:"node"`
	// Release is a set of claims whose release would make the node usable, none of which can be left out. There
	// may be other such sets, seldom with fewer claims.
	Release []ClaimHolder `json:"release"`
	// Holders are all claims that hold devices of the node that the pod could use, or use up counters that such
	// devices need.
	Holders []ClaimHolder `json:"holders"`
}

// ClaimHolder is a claim with what it holds of a node's devices.
type ClaimHolder struct {
	Namespace string    `json:"namespace"`
	Claim     string    `json:"claim"`
	UID       types.UID `json:"uid"`
	// InFlight tells that a device was promised to the claim and the API does not have that yet.
	InFlight bool `json:"inFlight,omitempty"`
	// Devices are "driver/pool/device", in order, each once.
	Devices []string `json:"devices"`
}
