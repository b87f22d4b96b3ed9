// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compiled

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
)

// Compile compiles the unallocated claims of one pod, all of its namespace, against the classes of the view. The error is a
// [*ClaimError], and wraps the cause of ctx if that ends before all are compiled.
func Compile(ctx context.Context, claims []*resourceapi.ResourceClaim, inv *inventory.View, features Features) (*Requests, error) {
	c := &compiler{ctx: ctx, inv: inv, features: features, out: &Requests{Objects: claims, Features: features}}
	for i, object := range claims {
		if err := c.claim(i, object); err != nil {
			return nil, err
		}
	}
	if r := c.out; len(r.Lanes) == 1 && c.constraints == 0 {
		r.Plain = r.Lanes[0]
	}
	if len(claims) > 0 {
		c.out.Namespace = claims[0].Namespace
	}
	c.out.Number, c.out.Recurring = inv.NumberOf(c.out.Namespace, c.out.description())
	return c.out, nil
}

type compiler struct {
	ctx         context.Context
	inv         *inventory.View
	features    Features
	out         *Requests
	constraints int
}

func (c *compiler) claim(index int, object *resourceapi.ResourceClaim) error {
	compiled := Claim{Object: object}
	devices := &object.Spec.Devices
	for i := range devices.Constraints {
		constraint, err := c.constraint(index, i, object)
		if err != nil {
			return err
		}
		compiled.Constraints = append(compiled.Constraints, constraint)
	}
	least := 0
	for i := range devices.Requests {
		request, err := c.request(index, i, object, compiled.Constraints)
		if err != nil {
			return err
		}
		if n := len(compiled.Requests); n > 0 {
			request.Twin = areTwins(compiled.Requests[n-1], request)
		}
		compiled.Requests = append(compiled.Requests, request)
		// Requests for all devices are counted on the node.
		smallest := math.MaxInt
		for _, a := range request.Alternatives {
			smallest = min(smallest, a.Count)
		}
		if smallest > resourceapi.AllocationResultsMaxSize-least {
			before := ""
			if least > 0 {
				before = fmt.Sprintf(" in addition to %d of earlier requests", least)
			}
			return fail(object, request.Name, fmt.Sprintf("devices.requests[%d]", i),
				fmt.Sprintf("%d devices%s are more than the %d that one claim can get", smallest, before, resourceapi.AllocationResultsMaxSize))
		}
		least += smallest
	}
	c.out.Claims = append(c.out.Claims, compiled)
	return nil
}

func (c *compiler) constraint(claim, position int, object *resourceapi.ResourceClaim) (*Constraint, error) {
	in := &object.Spec.Devices.Constraints[position]
	out := &Constraint{Index: c.constraints, Claim: claim, requests: in.Requests}
	switch {
	case in.MatchAttribute != nil:
		out.Attribute = *in.MatchAttribute
	case in.DistinctAttribute != nil:
		out.Attribute, out.Distinct = *in.DistinctAttribute, true
	default:
		return nil, fail(object, "", fmt.Sprintf("devices.constraints[%d]", position),
			"neither matchAttribute nor distinctAttribute is set, and other constraints are not supported")
	}
	c.constraints++
	return out, nil
}

func (c *compiler) request(claim, position int, object *resourceapi.ResourceClaim, constraints []*Constraint) (*Request, error) {
	in := &object.Spec.Devices.Requests[position]
	out := &Request{Index: len(c.out.Requests), Claim: claim, Position: position, Name: in.Name, Prioritized: len(in.FirstAvailable) > 0}
	c.out.Requests = append(c.out.Requests, out)
	field := fmt.Sprintf("devices.requests[%d]", position)
	switch {
	case out.Prioritized && !c.features.PrioritizedList:
		return nil, fail(object, in.Name, field+".firstAvailable", "the feature DRAPrioritizedList is disabled")
	case out.Prioritized:
		for i := range in.FirstAvailable {
			sub := &in.FirstAvailable[i]
			at := fmt.Sprintf("%s.firstAvailable[%d]", field, i)
			err := c.alternative(out, object, constraints, at, sub.Name, &resourceapi.ExactDeviceRequest{
				DeviceClassName: sub.DeviceClassName, AllocationMode: sub.AllocationMode, Count: sub.Count, Selectors: sub.Selectors,
				Tolerations: sub.Tolerations, Capacity: sub.Capacity, DerivedAttributes: sub.DerivedAttributes,
			})
			if err != nil {
				return nil, err
			}
		}
	case in.Exactly != nil:
		if err := c.alternative(out, object, constraints, field+".exactly", in.Name, in.Exactly); err != nil {
			return nil, err
		}
	default:
		return nil, fail(object, in.Name, field, "neither exactly nor firstAvailable is set, and other types of requests are not supported")
	}
	return out, nil
}

// alternative compiles an exact request, or a subrequest in the form of one, without admin access.
func (c *compiler) alternative(r *Request, object *resourceapi.ResourceClaim, constraints []*Constraint, field, name string,
	in *resourceapi.ExactDeviceRequest,
) error {
	out := &Alternative{
		Lane: len(c.out.Lanes), Request: r, Position: len(r.Alternatives), name: name,
		Admin: ptr.Deref(in.AdminAccess, false), Tolerations: in.Tolerations,
	}
	bad := func(sub, reason string) *ClaimError {
		return fail(object, out.ResultName(), field+"."+sub, reason)
	}
	if len(in.DerivedAttributes) > 0 && !c.inv.Features().DerivedAttributes {
		return bad("derivedAttributes", "the feature DRADerivedAttributes is disabled")
	}
	for i := range in.DerivedAttributes {
		from, err := c.inv.Derivation(c.ctx, object.Namespace, in.DerivedAttributes[i].Expression)
		if err != nil {
			e := bad(fmt.Sprintf("derivedAttributes[%d].expression", i), fmt.Sprintf("attribute %s cannot be derived", in.DerivedAttributes[i].Name))
			e.Err = err
			return e
		}
		out.derived = append(out.derived, derived{name: in.DerivedAttributes[i].Name, from: from})
	}
	if in.Capacity != nil && !c.inv.Features().ConsumableCapacity {
		return bad("capacity", "the feature DRAConsumableCapacity is disabled")
	}
	if in.Capacity != nil {
		for _, name := range slices.Sorted(maps.Keys(in.Capacity.Requests)) {
			if err := amount.Check(in.Capacity.Requests[name]); err != nil {
				return bad(fmt.Sprintf("capacity.requests[%s]", name), err.Error())
			}
		}
	}
	out.Capacity = in.Capacity
	if in.AdminAccess != nil && !c.features.AdminAccess {
		return bad("adminAccess", "the feature DRAAdminAccess is disabled")
	}
	for i := range in.Selectors {
		if in.Selectors[i].CEL == nil {
			return bad(fmt.Sprintf("selectors[%d]", i), "cel is not set, and other selectors are not supported")
		}
		out.Selectors = append(out.Selectors, in.Selectors[i].CEL.Expression)
	}
	switch in.AllocationMode {
	case resourceapi.DeviceAllocationModeAll:
		out.All = true
	case resourceapi.DeviceAllocationModeExactCount:
		// Far more than a claim can get: refused for the claim if there is no smaller alternative.
		out.Count = max(0, int(min(in.Count, math.MaxInt32)))
	default:
		return bad("allocationMode", fmt.Sprintf("%q is not supported", in.AllocationMode))
	}
	if in.DeviceClassName == "" {
		return bad("deviceClassName", "must be set")
	}
	if out.Class = c.inv.Class(in.DeviceClassName); out.Class == nil {
		return bad("deviceClassName", fmt.Sprintf("device class %q does not exist", in.DeviceClassName))
	}
	if err := c.matcher(out, object, field); err != nil {
		return err
	}
	for _, constraint := range constraints {
		if constraint.AppliesTo(out) {
			out.Constraints = append(out.Constraints, constraint)
			if from := out.Derivation(constraint); from != nil && !slices.Contains(constraint.Derivations, from) {
				constraint.Derivations = append(constraint.Derivations, from)
			}
		}
	}
	r.Alternatives = append(r.Alternatives, out)
	c.out.Lanes = append(c.out.Lanes, out)
	c.out.Admin = c.out.Admin || out.Admin
	return nil
}

// matcher compiles the selectors of the class and of the request.
func (c *compiler) matcher(a *Alternative, object *resourceapi.ResourceClaim, field string) error {
	class := a.Class.Object
	spec := inventory.MatcherSpec{
		Selectors:               a.Selectors,
		Capacity:                a.Capacity,
		Tolerations:             a.Tolerations,
		IgnoreTaints:            !c.features.DeviceTaints,
		RefuseBindingConditions: !c.features.DeviceBindingConditions,
		Namespace:               object.Namespace,
	}
	for i := range class.Spec.Selectors {
		if class.Spec.Selectors[i].CEL == nil {
			e := fail(object, a.ResultName(), fmt.Sprintf("selectors[%d]", i), "cel is not set, and other selectors are not supported")
			e.Class = class.Name
			return e
		}
		spec.ClassSelectors = append(spec.ClassSelectors, class.Spec.Selectors[i].CEL.Expression)
	}
	var err error
	if a.Matcher, err = c.inv.Matcher(c.ctx, spec); err == nil {
		return nil
	}
	e := &ClaimError{Namespace: object.Namespace, Claim: object.Name, Request: a.ResultName(), Reason: "selector does not compile", Err: err}
	var compileError *inventory.CompileError
	if !errors.As(err, &compileError) {
		e.Reason = "selectors cannot be compiled now"
		return e
	}
	if i := slices.Index(spec.ClassSelectors, compileError.Expression); i >= 0 {
		e.Class, e.Field = class.Name, fmt.Sprintf("selectors[%d].cel.expression", i)
	} else {
		e.Field = fmt.Sprintf("%s.selectors[%d].cel.expression", field, slices.Index(spec.Selectors, compileError.Expression))
	}
	return e
}

// areTwins tells whether two requests of one claim are interchangeable. Of all ways to satisfy both, the first
// one gives the earlier device to the earlier request, so the others need not be tried.
func areTwins(a, b *Request) bool {
	if a.Prioritized || b.Prioritized {
		return false
	}
	x, y := a.Alternatives[0], b.Alternatives[0]
	return !x.All && !y.All && x.Count == y.Count && x.Count > 0 && x.Admin == y.Admin &&
		x.Matcher == y.Matcher && slices.Equal(x.Constraints, y.Constraints) && slices.Equal(x.derived, y.derived)
}

func fail(claim *resourceapi.ResourceClaim, request, field, reason string) *ClaimError {
	return &ClaimError{Namespace: claim.Namespace, Claim: claim.Name, Request: request, Field: field, Reason: reason}
}
