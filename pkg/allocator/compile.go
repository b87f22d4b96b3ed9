package allocator

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator/internal/answers"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
)

// Requests are a pod's claims in the form in which nodes are judged: everything that does not depend on the
// node is decided. Immutable but for a cache, safe for concurrent use.
type Requests struct {
	objects  []*resourceapi.ResourceClaim
	claims   []claim
	requests []*request     // of all claims, in order
	lanes    []*alternative // of all requests, in order
	// namespace is that of all claims.
	namespace string

	// admin tells whether any request asks for admin access.
	admin bool
	// features are those that they were compiled with.
	features Features
	// choice tells whether some request has several alternatives.
	choice bool
	// plain is the only alternative if there is no other and no constraint; such pods are judged by counting.
	plain *alternative
	// number is the same for all that judge nodes alike, see number.go. recurring tells that such were seen before: what is
	// found is kept only for those.
	number    uint64
	recurring bool
	// answers are what was found on nodes for which that took long.
	answers answers.Table
}

// claim is one compiled claim.
type claim struct {
	object      *resourceapi.ResourceClaim
	requests    []*request
	constraints []*constraint
}

// request is one compiled request with its alternatives, at least one.
type request struct {
	index        int // in Requests.requests
	claim        int // in Requests.claims
	position     int // in the claim
	name         string
	alternatives []*alternative
	// prioritized tells a firstAvailable request from an exact one.
	prioritized bool
	// twin tells that the request before this one, in the same claim, asks for exactly the same.
	twin bool
}

// alternative is an exact request or one subrequest of a firstAvailable request.
type alternative struct {
	lane        int // in Requests.lanes
	request     *request
	position    int // in the request
	name        string
	class       *inventory.Class
	matcher     *inventory.Matcher
	all         bool
	count       int // devices wanted; not for all
	admin       bool
	tolerations []resourceapi.DeviceToleration
	selectors   []string
	capacity    *resourceapi.CapacityRequirements // what one device must have; may be nil
	constraints []*constraint                     // those of the claim that apply
	derived     []derived
}

// derived is an attribute that an alternative derives from those of each device.
type derived struct {
	name resourceapi.FullyQualifiedName
	from *inventory.Derivation
}

// derivation is what the attribute of the constraint is derived from for the alternative; nil if devices themselves
// have it.
func (a *alternative) derivation(c *constraint) *inventory.Derivation {
	for i := range a.derived {
		if a.derived[i].name == c.attribute {
			return a.derived[i].from
		}
	}
	return nil
}

// resultName is the name in allocation results: "request" or "request/subrequest".
func (a *alternative) resultName() string {
	if a.request.prioritized {
		return a.request.name + "/" + a.name
	}
	return a.name
}

// constraint is one compiled matchAttribute or distinctAttribute.
type constraint struct {
	index     int // among all constraints of all claims
	claim     int
	position  int // in the claim
	attribute resourceapi.FullyQualifiedName
	distinct  bool
	requests  []string // names that it applies to; all if empty
	// derivations has each derivation of the attribute by an alternative to which the constraint applies.
	derivations []*inventory.Derivation
}

func (c *constraint) appliesTo(a *alternative) bool {
	return len(c.requests) == 0 || slices.Contains(c.requests, a.request.name) ||
		(a.request.prioritized && slices.Contains(c.requests, a.resultName()))
}

// Claims returns the claims in the order of Result.Allocations.
func (r *Requests) Claims() []*resourceapi.ResourceClaim { return r.objects }

// anyAll tells whether any request asks for all devices.
func (r *Requests) anyAll() bool {
	return slices.ContainsFunc(r.lanes, func(a *alternative) bool { return a.all })
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
	c := &compiler{ctx: ctx, inv: inv, features: features, out: &Requests{objects: claims, features: features}}
	for i, object := range claims {
		if err := c.claim(i, object); err != nil {
			return nil, err
		}
	}
	if r := c.out; len(r.lanes) == 1 && c.constraints == 0 {
		r.plain = r.lanes[0]
	}
	if len(claims) > 0 {
		c.out.namespace = claims[0].Namespace
	}
	c.out.number, c.out.recurring = inv.NumberOf(c.out.namespace, c.out.description())
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
	compiled := claim{object: object}
	devices := &object.Spec.Devices
	for i := range devices.Constraints {
		constraint, err := c.constraint(index, i, object)
		if err != nil {
			return err
		}
		compiled.constraints = append(compiled.constraints, constraint)
	}
	least := 0
	for i := range devices.Requests {
		request, err := c.request(index, i, object, compiled.constraints)
		if err != nil {
			return err
		}
		if n := len(compiled.requests); n > 0 {
			request.twin = areTwins(compiled.requests[n-1], request)
		}
		compiled.requests = append(compiled.requests, request)
		// Requests for all devices are counted on the node.
		smallest := math.MaxInt
		for _, a := range request.alternatives {
			smallest = min(smallest, a.count)
		}
		if smallest > resourceapi.AllocationResultsMaxSize-least {
			before := ""
			if least > 0 {
				before = fmt.Sprintf(" in addition to %d of earlier requests", least)
			}
			return fail(object, &devices.Requests[i], fmt.Sprintf("devices.requests[%d]", i),
				fmt.Sprintf("%d devices%s are more than the %d that one claim can get", smallest, before, resourceapi.AllocationResultsMaxSize))
		}
		least += smallest
	}
	c.out.claims = append(c.out.claims, compiled)
	return nil
}

func (c *compiler) constraint(claim, position int, object *resourceapi.ResourceClaim) (*constraint, error) {
	in := &object.Spec.Devices.Constraints[position]
	out := &constraint{index: c.constraints, claim: claim, position: position, requests: in.Requests}
	switch {
	case in.MatchAttribute != nil:
		out.attribute = *in.MatchAttribute
	case in.DistinctAttribute != nil:
		out.attribute, out.distinct = *in.DistinctAttribute, true
	default:
		return nil, fail(object, nil, fmt.Sprintf("devices.constraints[%d]", position),
			"neither matchAttribute nor distinctAttribute is set, and other constraints are not supported")
	}
	c.constraints++
	return out, nil
}

func (c *compiler) request(claim, position int, object *resourceapi.ResourceClaim, constraints []*constraint) (*request, error) {
	in := &object.Spec.Devices.Requests[position]
	out := &request{index: len(c.out.requests), claim: claim, position: position, name: in.Name, prioritized: len(in.FirstAvailable) > 0}
	c.out.requests = append(c.out.requests, out)
	field := fmt.Sprintf("devices.requests[%d]", position)
	switch {
	case out.prioritized && !c.features.PrioritizedList:
		return nil, fail(object, in, field+".firstAvailable", "the feature DRAPrioritizedList is disabled")
	case out.prioritized:
		for i := range in.FirstAvailable {
			sub := &in.FirstAvailable[i]
			err := c.alternative(out, object, constraints, fmt.Sprintf("%s.firstAvailable[%d]", field, i), &details{
				name: sub.Name, class: sub.DeviceClassName, mode: sub.AllocationMode, count: sub.Count, selectors: sub.Selectors,
				tolerations: sub.Tolerations, capacity: sub.Capacity, derived: sub.DerivedAttributes,
			})
			if err != nil {
				return nil, err
			}
		}
	case in.Exactly != nil:
		exact := in.Exactly
		err := c.alternative(out, object, constraints, field+".exactly", &details{
			name: in.Name, class: exact.DeviceClassName, mode: exact.AllocationMode, count: exact.Count, selectors: exact.Selectors,
			tolerations: exact.Tolerations, capacity: exact.Capacity, derived: exact.DerivedAttributes, admin: exact.AdminAccess,
		})
		if err != nil {
			return nil, err
		}
	default:
		return nil, fail(object, in, field, "neither exactly nor firstAvailable is set, and other types of requests are not supported")
	}
	return out, nil
}

// details are the fields that exact requests and subrequests share.
type details struct {
	name, class string
	mode        resourceapi.DeviceAllocationMode
	count       int64
	admin       *bool
	selectors   []resourceapi.DeviceSelector
	tolerations []resourceapi.DeviceToleration
	capacity    *resourceapi.CapacityRequirements
	derived     []resourceapi.DeviceDerivedAttribute
}

func (c *compiler) alternative(r *request, object *resourceapi.ResourceClaim, constraints []*constraint, field string, in *details) error {
	out := &alternative{
		lane: len(c.out.lanes), request: r, position: len(r.alternatives), name: in.name,
		admin: ptr.Deref(in.admin, false), tolerations: in.tolerations,
	}
	bad := func(sub, reason string) *ClaimError {
		e := fail(object, nil, field+"."+sub, reason)
		e.Request = out.resultName()
		return e
	}
	if len(in.derived) > 0 && !c.inv.Features().DerivedAttributes {
		return bad("derivedAttributes", "the feature DRADerivedAttributes is disabled")
	}
	for i := range in.derived {
		from, err := c.inv.Derivation(c.ctx, object.Namespace, in.derived[i].Expression)
		if err != nil {
			e := bad(fmt.Sprintf("derivedAttributes[%d].expression", i), fmt.Sprintf("attribute %s cannot be derived", in.derived[i].Name))
			e.Err = err
			return e
		}
		out.derived = append(out.derived, derived{name: in.derived[i].Name, from: from})
	}
	if in.capacity != nil && !c.inv.Features().ConsumableCapacity {
		return bad("capacity", "the feature DRAConsumableCapacity is disabled")
	}
	if in.capacity != nil {
		for _, name := range slices.Sorted(maps.Keys(in.capacity.Requests)) {
			if err := amount.Check(in.capacity.Requests[name]); err != nil {
				return bad(fmt.Sprintf("capacity.requests[%s]", name), err.Error())
			}
		}
	}
	out.capacity = in.capacity
	if in.admin != nil && !c.features.AdminAccess {
		return bad("adminAccess", "the feature DRAAdminAccess is disabled")
	}
	for i := range in.selectors {
		if in.selectors[i].CEL == nil {
			return bad(fmt.Sprintf("selectors[%d]", i), "cel is not set, and other selectors are not supported")
		}
		out.selectors = append(out.selectors, in.selectors[i].CEL.Expression)
	}
	switch in.mode {
	case resourceapi.DeviceAllocationModeAll:
		out.all = true
	case resourceapi.DeviceAllocationModeExactCount:
		// Far more than a claim can get: refused for the claim if there is no smaller alternative.
		out.count = max(0, int(min(in.count, math.MaxInt32)))
	default:
		return bad("allocationMode", fmt.Sprintf("%q is not supported", in.mode))
	}
	if in.class == "" {
		return bad("deviceClassName", "must be set")
	}
	if out.class = c.inv.Class(in.class); out.class == nil {
		return bad("deviceClassName", fmt.Sprintf("device class %q does not exist", in.class))
	}
	if err := c.matcher(out, object, field); err != nil {
		return err
	}
	for _, constraint := range constraints {
		if constraint.appliesTo(out) {
			out.constraints = append(out.constraints, constraint)
			if from := out.derivation(constraint); from != nil && !slices.Contains(constraint.derivations, from) {
				constraint.derivations = append(constraint.derivations, from)
			}
		}
	}
	r.alternatives = append(r.alternatives, out)
	c.out.choice = c.out.choice || len(r.alternatives) > 1
	c.out.lanes = append(c.out.lanes, out)
	c.out.admin = c.out.admin || out.admin
	return nil
}

// matcher compiles the selectors of the class and of the request.
func (c *compiler) matcher(a *alternative, object *resourceapi.ResourceClaim, field string) error {
	class := a.class.Object
	spec := inventory.MatcherSpec{
		Selectors:               a.selectors,
		Capacity:                a.capacity,
		Tolerations:             a.tolerations,
		IgnoreTaints:            !c.features.DeviceTaints,
		RefuseBindingConditions: !c.features.DeviceBindingConditions,
		Namespace:               object.Namespace,
	}
	for i := range class.Spec.Selectors {
		if class.Spec.Selectors[i].CEL == nil {
			return &ClaimError{
				Namespace: object.Namespace, Claim: object.Name, Request: a.resultName(), Class: class.Name,
				Field: fmt.Sprintf("selectors[%d]", i), Reason: "cel is not set, and other selectors are not supported",
			}
		}
		spec.ClassSelectors = append(spec.ClassSelectors, class.Spec.Selectors[i].CEL.Expression)
	}
	var err error
	if a.matcher, err = c.inv.Matcher(c.ctx, spec); err == nil {
		return nil
	}
	e := &ClaimError{Namespace: object.Namespace, Claim: object.Name, Request: a.resultName(), Reason: "selector does not compile", Err: err}
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
func areTwins(a, b *request) bool {
	if a.prioritized || b.prioritized {
		return false
	}
	x, y := a.alternatives[0], b.alternatives[0]
	return !x.all && !y.all && x.count == y.count && x.count > 0 && x.admin == y.admin &&
		x.matcher == y.matcher && slices.Equal(x.constraints, y.constraints) && slices.Equal(x.derived, y.derived)
}

func fail(claim *resourceapi.ResourceClaim, request *resourceapi.DeviceRequest, field, reason string) *ClaimError {
	e := &ClaimError{Namespace: claim.Namespace, Claim: claim.Name, Field: field, Reason: reason}
	if request != nil {
		e.Request = request.Name
	}
	return e
}
