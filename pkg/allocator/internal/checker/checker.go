// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package checker

import (
	"errors"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// Cluster is what an allocation is judged against.
type Cluster struct {
	Node    *v1.Node
	Slices  []*resourceapi.ResourceSlice
	Classes []*resourceapi.DeviceClass
	// Held are the allocations that exist already.
	Held []resourceapi.AllocationResult
	// Features are the optional parts of the API that are enabled.
	Features structured.Features
}

// Check tells what is wrong with giving these allocations to these claims, one each, all at once. Nil means that
// they are valid. Every violation is reported, with the claim, request and device.
func Check(cluster Cluster, claims []*resourceapi.ResourceClaim, allocations []resourceapi.AllocationResult) error {
	if len(claims) != len(allocations) {
		return fmt.Errorf("%d allocations for %d claims", len(allocations), len(claims))
	}
	c := &check{Cluster: cluster, pools: poolsFor(cluster)}
	var all []*grant
	for i, claim := range claims {
		grants := c.grants(claim, &allocations[i])
		c.counts(claim, grants)
		c.constraints(claim, grants)
		c.config(claim, grants, allocations[i].Devices.Config)
		c.nodeSelector(claim, grants, allocations[i].NodeSelector)
		all = append(all, grants...)
	}
	c.exclusive(all)
	c.shares(all)
	c.counters(all)
	c.compatibilityGroups(all)
	return errors.Join(c.violations...)
}

type check struct {
	Cluster
	pools      map[poolID]*pool
	violations []error
}

func (c *check) violation(format string, args ...any) {
	c.violations = append(c.violations, fmt.Errorf(format, args...))
}

// grant is one result: one device given to one request.
type grant struct {
	claim   *resourceapi.ResourceClaim
	request *request
	result  *resourceapi.DeviceRequestAllocationResult
	device  *device
	// id names the device; also set if there is no such device.
	id deviceID
}

func (g *grant) String() string {
	return fmt.Sprintf("claim %s, request %s, device %s", g.claim.Name, g.result.Request, g.id)
}

func (g *grant) isAdmin() bool { return ptr.Deref(g.result.AdminAccess, false) }

// grants resolves the results of one claim and judges each by itself.
func (c *check) grants(claim *resourceapi.ResourceClaim, allocation *resourceapi.AllocationResult) []*grant {
	if n := len(allocation.Devices.Results); n > resourceapi.AllocationResultsMaxSize {
		c.violation("claim %s: %d results, at most %d are allowed", claim.Name, n, resourceapi.AllocationResultsMaxSize)
	}
	var out []*grant
	for i := range allocation.Devices.Results {
		result := &allocation.Devices.Results[i]
		g := &grant{
			claim: claim, result: result, request: c.findRequest(claim, result.Request),
			id: deviceID{poolID{result.Driver, result.Pool}, result.Device},
		}
		if g.request == nil {
			c.violation("%v: the claim has no such request", g)
			continue
		}
		if g.device = c.reachable(g); g.device == nil {
			continue
		}
		c.single(g)
		out = append(out, g)
	}
	return out
}

// reachable returns the device if the node can use it.
func (c *check) reachable(g *grant) *device {
	p := c.pools[g.id.poolID]
	switch {
	case p == nil:
		c.violation("%v: there is no such pool", g)
	case p.problem != "":
		c.violation("%v: the pool cannot be used: %s", g, p.problem)
	default:
		for _, d := range p.devices {
			if d.Name == g.id.name && d.onNode {
				return d
			}
		}
		c.violation("%v: the pool has no such device for node %s", g, c.Node.Name)
	}
	return nil
}

// single judges one result without looking at any other.
func (c *check) single(g *grant) {
	if matches, err := c.matches(g.request, g.device); err != nil {
		c.violation("%v: %v", g, err)
	} else if !matches {
		c.violation("%v: the device does not match", g)
	}
	if c.Features.DeviceTaints {
		for _, taint := range g.device.Taints {
			if prevents(taint) &&
				!slices.ContainsFunc(g.request.Tolerations, func(t resourceapi.DeviceToleration) bool { return tolerates(t, taint) }) {
				c.violation("%v: taint %s=%s:%s is not tolerated", g, taint.Key, taint.Value, taint.Effect)
			}
		}
	}
	if !apiequality.Semantic.DeepEqual(g.result.Tolerations, g.request.Tolerations) {
		c.violation("%v: the tolerations are not those of the request", g)
	}
	if admin := ptr.Deref(g.request.AdminAccess, false); g.isAdmin() != admin {
		c.violation("%v: admin access is %v, asked for was %v", g, g.isAdmin(), admin)
	}
	if !c.Features.DeviceBindingAndStatus && len(g.device.BindingConditions) > 0 {
		c.violation("%v: the device has binding conditions, which are disabled", g)
	}
	if !slices.Equal(g.result.BindingConditions, g.device.BindingConditions) ||
		!slices.Equal(g.result.BindingFailureConditions, g.device.BindingFailureConditions) {
		c.violation("%v: the binding conditions are not those of the device", g)
	}
	c.nodeOperations(g)
	if !c.Features.PartitionableDevices && len(g.device.ConsumesCounters) > 0 {
		c.violation("%v: the device consumes counters, which are disabled", g)
	}
	c.consumption(g)
}

// nodeOperations makes sure that operations are skipped exactly where the slice says so, on a node that can do that.
// Without the feature nothing is skipped.
func (c *check) nodeOperations(g *grant) {
	skip := g.device.slice.Spec.SkipNodeOperations
	if !c.Features.OptionalNodeOperations {
		skip = nil
	}
	if !slices.Equal(g.result.SkipNodeOperations, skip) {
		c.violation("%v: the node operations to skip are not those of the slice", g)
	}
	if len(skip) > 0 && !slices.Contains(c.Node.Status.DeclaredFeatures, "DRAOptionalNodeOperations") {
		c.violation("%v: the device is for nodes that can skip operations", g)
	}
}

// counts makes sure that every request got as many devices as it wants, from one alternative.
func (c *check) counts(claim *resourceapi.ResourceClaim, grants []*grant) {
	for i := range claim.Spec.Devices.Requests {
		in := &claim.Spec.Devices.Requests[i]
		var own []*grant
		for _, g := range grants {
			if g.request.of == in {
				own = append(own, g)
			}
		}
		if len(own) == 0 {
			// Nothing is right only if nothing was asked for.
			if in.Exactly == nil || in.Exactly.AllocationMode == resourceapi.DeviceAllocationModeAll || in.Exactly.Count > 0 {
				c.violation("claim %s, request %s: got no device", claim.Name, in.Name)
			}
			continue
		}
		request := own[0].request
		for _, g := range own[1:] {
			if g.request.name != request.name {
				c.violation("claim %s, request %s: got devices for two alternatives, %s and %s", claim.Name, in.Name, request.name, g.request.name)
			}
		}
		if request.AllocationMode != resourceapi.DeviceAllocationModeAll {
			if int64(len(own)) != request.Count {
				c.violation("claim %s, request %s: got %d devices, wants %d", claim.Name, request.name, len(own), request.Count)
			}
			continue
		}
		c.gotAll(claim, request, own)
	}
}

// gotAll makes sure that a request for all devices got every device of the node that matches.
func (c *check) gotAll(claim *resourceapi.ResourceClaim, request *request, own []*grant) {
	for id, p := range c.pools {
		if p.problem != "" {
			if p.slicesOnNode > 0 {
				c.violation("claim %s, request %s: wants all devices, but pool %v cannot be used: %s", claim.Name, request.name, id, p.problem)
			}
			continue
		}
		for _, d := range p.devices {
			if slices.ContainsFunc(own, func(g *grant) bool { return g.device == d }) {
				continue
			}
			if wanted, err := c.isOneOfAll(request, d); err != nil {
				c.violation("claim %s, request %s: wants all devices: %v", claim.Name, request.name, err)
			} else if wanted {
				c.violation("claim %s, request %s: wants all devices, did not get %v/%s", claim.Name, request.name, id, d.Name)
			}
		}
	}
}

// isOneOfAll tells whether a request for all devices has to get this one of a pool that can be used: whether it matches and
// could be given to the request if nothing of it were in use.
func (c *check) isOneOfAll(request *request, d *device) (bool, error) {
	if !d.onNode || (!c.Features.DeviceBindingAndStatus && len(d.BindingConditions) > 0) {
		return false, nil
	}
	if matches, err := c.matches(request, d); err != nil || !matches {
		return false, err
	}
	if c.Features.ConsumableCapacity {
		if consumed, err := c.consumes(request, d); err != nil || !fitsAlone(d, consumed) {
			return false, nil
		}
	}
	return true, nil
}

// All returns how many devices of the node the request, or the alternative "request/alternative", has to get if it is for all
// devices. The error is that of a selector.
func All(cluster Cluster, claim *resourceapi.ResourceClaim, name string) (total int, err error) {
	c := &check{Cluster: cluster, pools: poolsFor(cluster)}
	request := c.findRequest(claim, name)
	if request == nil {
		return 0, fmt.Errorf("claim %s has no request %s", claim.Name, name)
	}
	for _, p := range c.pools {
		if p.problem != "" {
			continue
		}
		for _, d := range p.devices {
			wanted, err := c.isOneOfAll(request, d)
			if err != nil {
				return 0, err
			}
			if wanted {
				total++
			}
		}
	}
	return total, nil
}

// exclusive makes sure that no device is given away twice, unless it may be.
func (c *check) exclusive(grants []*grant) {
	for i, g := range grants {
		if c.isShared(g.device) {
			if !g.isAdmin() && c.heldAlone(g.id) {
				c.violation("%v: the device is held by somebody for himself alone", g)
			}
			continue
		}
		for _, other := range grants[:i] {
			if other.device == g.device && (other.claim == g.claim || (!g.isAdmin() && !other.isAdmin())) {
				c.violation("%v: the device was given to claim %s, request %s, too", g, other.claim.Name, other.result.Request)
			}
		}
		if !g.isAdmin() && c.isHeld(g.id) {
			c.violation("%v: the device is held", g)
		}
	}
}

// isShared tells whether the device may have several holders.
func (c *check) isShared(d *device) bool {
	return c.Features.ConsumableCapacity && ptr.Deref(d.AllowMultipleAllocations, false)
}

// holds are what is held of a device.
func (c *check) holds(id deviceID) (out []*resourceapi.DeviceRequestAllocationResult) {
	for i := range c.Held {
		for j := range c.Held[i].Devices.Results {
			result := &c.Held[i].Devices.Results[j]
			if !ptr.Deref(result.AdminAccess, false) && (deviceID{poolID{result.Driver, result.Pool}, result.Device}) == id {
				out = append(out, result)
			}
		}
	}
	return out
}

func (c *check) isHeld(id deviceID) bool { return len(c.holds(id)) > 0 }

func (c *check) heldAlone(id deviceID) bool {
	return slices.ContainsFunc(c.holds(id), func(result *resourceapi.DeviceRequestAllocationResult) bool { return result.ShareID == nil })
}
