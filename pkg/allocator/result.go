// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package allocator

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/allocator/internal/search"
)

// allocations turns the picks into one allocation per claim.
func allocations(in *Input, s *search.Search) []resourceapi.AllocationResult {
	claims := in.Requests.compiled.Claims
	out := make([]resourceapi.AllocationResult, len(claims))
	for i := range claims {
		picks := s.Picks(i)
		out[i].Devices.Results = resultsOf(in, s, picks)
		out[i].Devices.Config = configOf(s, &claims[i])
		out[i].NodeSelector = nodeSelectorFor(in, s, picks)
	}
	return out
}

func resultsOf(in *Input, s *search.Search, picks []search.Pick) []resourceapi.DeviceRequestAllocationResult {
	out := make([]resourceapi.DeviceRequestAllocationResult, len(picks))
	for i, pick := range picks {
		a := in.Requests.compiled.Lanes[pick.Lane]
		pool, at := s.Locate(pick.Device)
		device := pool.Device(at)
		out[i] = resourceapi.DeviceRequestAllocationResult{
			Request:     a.ResultName(),
			Driver:      pool.ID().Driver,
			Pool:        pool.ID().Pool,
			Device:      device.Name,
			Tolerations: a.Tolerations,
			// Without the feature, devices that have binding conditions are not picked.
			BindingConditions:        device.BindingConditions,
			BindingFailureConditions: device.BindingFailureConditions,
		}
		if in.Inventory.Features().OptionalNodeOperations {
			out[i].SkipNodeOperations = pool.SliceOf(at).Object.Spec.SkipNodeOperations
		}
		if a.Admin {
			out[i].AdminAccess = ptr.To(true)
		}
		if pool.Shareable().Has(at) {
			addShare(in, &out[i], a, device)
		}
	}
	return out
}

// addShare makes the result one share of the device, which allows multiple allocations.
func addShare(in *Input, result *resourceapi.DeviceRequestAllocationResult, a *compiled.Alternative, device *resourceapi.Device) {
	if in.NewShareID != nil {
		result.ShareID = ptr.To(in.NewShareID())
	} else {
		result.ShareID = ptr.To(uuid.NewUUID())
	}
	// A device for which this fails does not match.
	if consumed, ok, err := in.Inventory.Features().Consumption(device, a.Capacity); ok && err == nil && len(consumed) > 0 {
		result.ConsumedCapacity = consumed
	}
}

// configOf collects the configuration for a claim: first that of the classes, in the order of the requests and each
// class once, then the claim's own. The later entry takes precedence (DeviceAllocationConfiguration API).
func configOf(s *search.Search, c *compiled.Claim) []resourceapi.DeviceAllocationConfiguration {
	var out []resourceapi.DeviceAllocationConfiguration
	type span struct{ start, end int }
	ofClass := make(map[string]span) // class name → its entries in out
	for _, r := range c.Requests {
		a := s.Choice(r)
		class := a.Class.Object
		if span, ok := ofClass[class.Name]; ok {
			for i := span.start; i < span.end; i++ {
				out[i].Requests = append(out[i].Requests, a.ResultName())
			}
			continue
		}
		start := len(out)
		for i := range class.Spec.Config {
			out = append(out, resourceapi.DeviceAllocationConfiguration{
				Source:              resourceapi.AllocationConfigSourceClass,
				Requests:            []string{a.ResultName()},
				DeviceConfiguration: class.Spec.Config[i].DeviceConfiguration,
			})
		}
		ofClass[class.Name] = span{start, len(out)}
	}
	for i := range c.Object.Spec.Devices.Config {
		config := &c.Object.Spec.Devices.Config[i]
		if len(config.Requests) == 0 ||
			slices.ContainsFunc(c.Requests, func(r *compiled.Request) bool { return isNamed(s, r, config.Requests) }) {
			out = append(out, resourceapi.DeviceAllocationConfiguration{
				Source:              resourceapi.AllocationConfigSourceClaim,
				Requests:            config.Requests,
				DeviceConfiguration: config.DeviceConfiguration,
			})
		}
	}
	// No names mean all requests.
	for i := range out {
		if names := out[i].Requests; len(names) > 0 &&
			!slices.ContainsFunc(c.Requests, func(r *compiled.Request) bool { return !isNamed(s, r, names) }) {
			out[i].Requests = nil
		}
	}
	return out
}

// isNamed tells whether the names have the request, or the alternative chosen for it.
func isNamed(s *search.Search, r *compiled.Request, names []string) bool {
	return slices.Contains(names, r.Name) ||
		(r.Prioritized && slices.Contains(names, s.Choice(r).ResultName()))
}

// nodeSelectorFor says where the picked devices of one claim can be used: on this node if one of them is local to
// it or binds to it, otherwise where all their selectors agree; nil means everywhere.
func nodeSelectorFor(in *Input, s *search.Search, picks []search.Pick) *v1.NodeSelector {
	var term v1.NodeSelectorTerm
	for _, pick := range picks {
		pool, at := s.Locate(pick.Device)
		device, spec := pool.Device(at), &pool.SliceOf(at).Object.Spec
		nodeName, selector := spec.NodeName, spec.NodeSelector
		if ptr.Deref(spec.PerDeviceNodeSelection, false) {
			nodeName, selector = device.NodeName, device.NodeSelector
		}
		if nodeName != nil || ptr.Deref(device.BindsToNode, false) {
			return &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
				MatchFields: []v1.NodeSelectorRequirement{{
					Key: "metadata.name", Operator: v1.NodeSelectorOpIn, Values: []string{in.Node.Name},
				}},
			}}}
		}
		// The inventory refuses selectors with more than one term.
		if selector != nil && len(selector.NodeSelectorTerms) == 1 {
			term.MatchFields = merge(term.MatchFields, selector.NodeSelectorTerms[0].MatchFields)
			term.MatchExpressions = merge(term.MatchExpressions, selector.NodeSelectorTerms[0].MatchExpressions)
		}
	}
	if len(term.MatchFields) == 0 && len(term.MatchExpressions) == 0 {
		return nil
	}
	return &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{term}}
}

// merge adds the requirements that are not there yet; values are compared as sets.
func merge(have, more []v1.NodeSelectorRequirement) []v1.NodeSelectorRequirement {
	for _, requirement := range more {
		values := sets.New(requirement.Values...)
		if !slices.ContainsFunc(have, func(other v1.NodeSelectorRequirement) bool {
			return other.Key == requirement.Key && other.Operator == requirement.Operator && sets.New(other.Values...).Equal(values)
		}) {
			have = append(have, requirement)
		}
	}
	return have
}
