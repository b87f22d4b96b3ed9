// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package compat

import (
	"context"
	"errors"
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/inventory"
)

// claimError says what is wrong with a claim in upstream's words, which callers may look for. The cause, ours,
// can be had with errors.As.
func claimError(err error, claims []*resourceapi.ResourceClaim) error {
	var e *allocator.ClaimError
	if !errors.As(err, &e) {
		return err
	}
	claim := klog.KRef(e.Namespace, e.Claim)
	request := e.Request[strings.LastIndex(e.Request, "/")+1:]
	kind := "request"
	if request != e.Request {
		kind = "subrequest"
	}
	if e.Err != nil && strings.Contains(e.Field, "derivedAttributes[") {
		return &worded{text: fmt.Sprintf("claim %s, request %s: %s: %v", claim, request, e.Reason, e.Err), cause: err}
	}
	field := e.Field[strings.LastIndex(e.Field, ".")+1:]
	field, index, _ := strings.Cut(strings.TrimSuffix(field, "]"), "[")
	says := func(format string, args ...any) error {
		return &worded{text: fmt.Sprintf(format, args...), cause: err}
	}
	switch field {
	case "firstAvailable":
		return says("claim %s, request %s: has subrequests, but the DRAPrioritizedList feature is disabled", claim, request)
	case "adminAccess":
		return says("claim %s, request %s: admin access is requested, but the feature is disabled", claim, request)
	case "capacity":
		return says("claim %s, %s %s: has capacity requests, but the DRAConsumableCapacity feature is disabled", claim, kind, request)
	case "derivedAttributes":
		return says("claim %s, request %s: cannot handle request with derived attributes, the feature is disabled", claim, request)
	case "allocationMode":
		return says("claim %s, request %s: unsupported count mode %s", claim, request, find(claims, e).mode)
	case "deviceClassName":
		if class := find(claims, e).class; class != "" {
			return says("claim %s, request %s: could not retrieve device class %s: not found", claim, request, class)
		}
		return says("claim %s, request %s: missing device class name (unsupported request type?)", claim, request)
	case "constraints":
		return says("claim %s, constraint #%s: empty constraint (unsupported constraint type?)", claim, index)
	case "selectors":
		return says("claim %s, request %s, selector #%s: CEL expression empty (unsupported selector type?)", claim, request, index)
	case "requests", "count":
		return says("claim %s, request %s: exceeds the claim limit of %d: %s", claim, request, resourceapi.AllocationResultsMaxSize, e.Reason)
	case "expression":
		owner := "claim " + claim.String()
		if e.Class != "" {
			owner = "class " + e.Class
		}
		_, index, _ := strings.Cut(e.Field, "selectors[")
		index, _, _ = strings.Cut(index, "]")
		return says("%s: selector #%s: CEL compile error: %v", owner, index, e.Err)
	}
	return err
}

// worded is an error in upstream's words.
type worded struct {
	text  string
	cause error
}

func (e *worded) Error() string { return e.text }
func (e *worded) Unwrap() error { return e.cause }

// find returns the request that the error is about, an empty one if there is none.
func find(claims []*resourceapi.ResourceClaim, e *allocator.ClaimError) anyRequest {
	for _, claim := range claims {
		if claim.Namespace != e.Namespace || claim.Name != e.Claim {
			continue
		}
		for _, request := range requestsOf(claim) {
			name := claim.Spec.Devices.Requests[request.position].Name
			if request.sub >= 0 {
				name += "/" + request.name
			}
			if name == e.Request {
				return request
			}
		}
	}
	return anyRequest{}
}

// failureError says in upstream's words why a node was refused; nil where upstream says nothing but that it does
// not fit.
func (a *firstFit) failureError(ctx context.Context, node *v1.Node, claims []*resourceapi.ResourceClaim, f *allocator.Failure) error {
	switch {
	case f.Reason == explain.ReasonUndecided:
		return fmt.Errorf("filter operation aborted: %w", f.Err)
	case f.SelectorError != nil:
		return onNode(selectorError(f.SelectorError))
	}
	if err := allOfUnusablePool(claims, f.Pools); err != nil {
		return onNode(err)
	}
	if err := tooManyError(claims, f.Requests); err != nil {
		return onNode(err)
	}
	for _, problem := range f.Pools {
		if problem.Kind == inventory.Invalid {
			return fmt.Errorf("invalid resource pools were encountered%w", structured.ErrFailedAllocationOnNode)
		}
	}
	if f.Reason == explain.ReasonConstraints {
		return a.constraintError(ctx, node, claims)
	}
	return nil
}

// onNode marks an error that is about one node only.
func onNode(err error) error {
	return fmt.Errorf("%w%w", err, structured.ErrFailedAllocationOnNode)
}

// selectorError is about a device that a request cannot be judged on: because of a selector, or of a capacity.
func selectorError(e *allocator.SelectorError) error {
	device := fmt.Sprintf("%s/%s/%s", e.Driver, e.Pool, e.Device)
	if e.Expression == "" {
		return &worded{fmt.Sprintf("claim %s, request %s: checking capacity for device %s: %v", klog.KRef(e.Namespace, e.Claim),
			e.Request, device, e.Err), e}
	}
	if e.Attribute != "" {
		return &worded{fmt.Sprintf("evaluate derived attribute %s on device %s failed: %v", e.Attribute, device, e.Err), e}
	}
	owner := "claim " + klog.KRef(e.Namespace, e.Claim).String()
	if e.Class != "" {
		owner = "class " + e.Class
	}
	return &worded{fmt.Sprintf("%s: selector %q on device %s: CEL runtime error: %v", owner, e.Expression, device, e.Err), e}
}

// allOfUnusablePool is about requests for all devices of a node that has a pool of which not all are known.
func allOfUnusablePool(claims []*resourceapi.ResourceClaim, problems []*inventory.PoolProblem) error {
	if len(problems) == 0 {
		return nil
	}
	state := "being updated"
	if problems[0].Kind == inventory.Invalid {
		state = "invalid"
	}
	for _, claim := range claims {
		for _, request := range requestsOf(claim) {
			if request.mode == resourceapi.DeviceAllocationModeAll {
				return fmt.Errorf("claim %s, request %s: asks for all devices, but resource pool %s is currently %s",
					klog.KObj(claim), request.name, problems[0].Pool, state)
			}
		}
	}
	return nil
}

// tooManyError is about requests that get more devices together than one allocation can list, whatever alternatives are
// chosen: there are too many devices on the node for a request that is for all of them.
func tooManyError(claims []*resourceapi.ResourceClaim, counts []allocator.RequestCounts) error {
	type alternative struct{ claim, request, number int }
	gets := make(map[alternative]int)
	for i := range counts {
		c := &counts[i]
		if alternative := (alternative{c.Claim, c.Request, c.Alternative}); c.Wanted > 0 {
			gets[alternative] = c.Wanted
		} else {
			gets[alternative] += c.Matching
		}
	}
	for i, claim := range claims {
		least := 0
		for j := range claim.Spec.Devices.Requests {
			request := &claim.Spec.Devices.Requests[j]
			fewest := gets[alternative{i, j, 0}]
			for k := range request.FirstAvailable {
				fewest = min(fewest, gets[alternative{i, j, k}])
			}
			if fewest > resourceapi.AllocationResultsMaxSize-least {
				return fmt.Errorf("claim %s, request %s: adding %d devices exceeds the claim limit of %d, with %d already accounted for",
					klog.KObj(claim), request.Name, fewest, resourceapi.AllocationResultsMaxSize, least)
			}
			least += fewest
		}
	}
	return nil
}

// constraintError is about requests for all devices that contradict a constraint in themselves. Upstream's library
// is asked which device is the first in the way: for one such request alone there is nothing to search.
func (a *firstFit) constraintError(ctx context.Context, node *v1.Node, claims []*resourceapi.ResourceClaim) error {
	for _, claim := range claims {
		if len(claim.Spec.Devices.Constraints) == 0 {
			continue
		}
		for _, request := range requestsOf(claim) {
			if request.mode != resourceapi.DeviceAllocationModeAll {
				continue
			}
			upstream, err := a.upstream()
			if err != nil {
				return err
			}
			if _, err := upstream.Allocate(ctx, node, []*resourceapi.ResourceClaim{only(claim, request)}); err != nil {
				return onNode(err)
			}
		}
	}
	return nil
}
