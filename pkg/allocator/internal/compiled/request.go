// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package compiled has a pod's claims in the form in which nodes are judged: with the class, the matcher and the constraints of each
// request, and everything decided that does not depend on the node.
package compiled

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory"
)

// Requests are a pod's claims in the form in which nodes are judged: everything that does not depend on the
// node is decided. Immutable, and so is all that it has.
type Requests struct {
	Objects  []*resourceapi.ResourceClaim // the claims as they were given
	Claims   []Claim
	Requests []*Request     // of all claims, in order
	Lanes    []*Alternative // of all requests, in order; as many as these, unless some request has several alternatives
	// Namespace is that of all claims.
	Namespace string

	// Admin tells whether any request asks for admin access.
	Admin bool
	// Features are those that they were compiled with.
	Features Features
	// Plain is the only alternative if there is no other and no constraint; such pods are judged by counting.
	Plain *Alternative
	// Number is the same for all that judge nodes alike, see number.go. Recurring tells that such were seen before: what is
	// found is kept only for those.
	Number    uint64
	Recurring bool
}

// Claim is one compiled claim.
type Claim struct {
	Object      *resourceapi.ResourceClaim
	Requests    []*Request
	Constraints []*Constraint // in the order of the claim
}

// Request is one compiled request with its alternatives, at least one.
type Request struct {
	Index        int // in Requests.Requests
	Claim        int // in Requests.Claims
	Position     int // in the claim
	Name         string
	Alternatives []*Alternative
	// Prioritized tells a firstAvailable request from an exact one.
	Prioritized bool
	// Twin tells that the request before this one, in the same claim, asks for exactly the same.
	Twin bool
}

// Alternative is an exact request or one subrequest of a firstAvailable request.
type Alternative struct {
	Lane        int // in Requests.Lanes
	Request     *Request
	Position    int // in the request
	name        string
	Class       *inventory.Class
	Matcher     *inventory.Matcher
	All         bool
	Count       int // devices wanted; not for all
	Admin       bool
	Tolerations []resourceapi.DeviceToleration
	Selectors   []string
	Capacity    *resourceapi.CapacityRequirements // what one device must have; may be nil
	Constraints []*Constraint                     // those of the claim that apply
	derived     []derived
}

// derived is an attribute that an alternative derives from those of each device.
type derived struct {
	name resourceapi.FullyQualifiedName
	from *inventory.Derivation
}

// Derivation is what the attribute of the constraint is derived from for the alternative; nil if devices themselves
// have it.
func (a *Alternative) Derivation(c *Constraint) *inventory.Derivation {
	for i := range a.derived {
		if a.derived[i].name == c.Attribute {
			return a.derived[i].from
		}
	}
	return nil
}

// ResultName is the name in allocation results: "request" or "request/subrequest".
func (a *Alternative) ResultName() string {
	if a.Request.Prioritized {
		return a.Request.Name + "/" + a.name
	}
	return a.name
}

// Constraint is one compiled matchAttribute or distinctAttribute.
type Constraint struct {
	Index     int // among all constraints of all claims
	Claim     int
	Attribute resourceapi.FullyQualifiedName
	Distinct  bool
	requests  []string // names that it applies to; all if empty
	// Derivations has each derivation of the attribute by an alternative to which the constraint applies.
	Derivations []*inventory.Derivation
}

// AppliesTo tells whether devices of the alternative are under the constraint.
func (c *Constraint) AppliesTo(a *Alternative) bool {
	return len(c.requests) == 0 || slices.Contains(c.requests, a.Request.Name) ||
		(a.Request.Prioritized && slices.Contains(c.requests, a.ResultName()))
}

// AnyAll tells whether any request asks for all devices.
func (r *Requests) AnyAll() bool {
	return slices.ContainsFunc(r.Lanes, func(a *Alternative) bool { return a.All })
}

// Preference is the score of choosing this alternative (KEP-4816).
func (a *Alternative) Preference() int64 {
	if !a.Request.Prioritized {
		return 0
	}
	return int64(resourceapi.FirstAvailableDeviceRequestMaxSize - a.Position)
}
