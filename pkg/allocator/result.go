package allocator

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/utils/ptr"
)

// allocations turns the picks into one allocation per claim.
func (s *state) allocations() []resourceapi.AllocationResult {
	out := make([]resourceapi.AllocationResult, len(s.reqs.claims))
	next := 0
	for i := range s.reqs.claims {
		picks := s.picks[next : next+s.used[i]]
		next += s.used[i]
		out[i].Devices.Results = s.results(picks)
		out[i].Devices.Config = s.config(&s.reqs.claims[i])
		out[i].NodeSelector = s.nodeSelector(picks)
	}
	return out
}

func (s *state) results(picks []pick) []resourceapi.DeviceRequestAllocationResult {
	out := make([]resourceapi.DeviceRequestAllocationResult, len(picks))
	for i, pick := range picks {
		a := s.reqs.lanes[pick.lane]
		p := s.poolOf(pick.device)
		pool := s.pools[p]
		device := pool.Device(pick.device - s.starts[p])
		out[i] = resourceapi.DeviceRequestAllocationResult{
			Request:     a.resultName(),
			Driver:      pool.ID().Driver,
			Pool:        pool.ID().Pool,
			Device:      device.Name,
			Tolerations: a.tolerations,
			// Without the feature, devices that have binding conditions are not picked.
			BindingConditions:        device.BindingConditions,
			BindingFailureConditions: device.BindingFailureConditions,
		}
		if s.in.Inventory.Features().OptionalNodeOperations {
			out[i].SkipNodeOperations = pool.SliceOf(pick.device - s.starts[p]).Object.Spec.SkipNodeOperations
		}
		if a.admin {
			out[i].AdminAccess = ptr.To(true)
		}
		if s.ledger.shareable.Has(pick.device) {
			s.share(&out[i], a, device)
		}
	}
	return out
}

// share makes the result one share of the device, which allows multiple allocations.
func (s *state) share(result *resourceapi.DeviceRequestAllocationResult, a *alternative, device *resourceapi.Device) {
	if s.in.NewShareID != nil {
		result.ShareID = ptr.To(s.in.NewShareID())
	} else {
		result.ShareID = ptr.To(uuid.NewUUID())
	}
	// A device for which this fails does not match.
	if consumed, ok, err := s.in.Inventory.Features().Consumption(device, a.capacity); ok && err == nil && len(consumed) > 0 {
		result.ConsumedCapacity = consumed
	}
}

// config collects the configuration for a claim: first that of the classes, in the order of the requests and each
// class once, then the claim's own. The later entry takes precedence (DeviceAllocationConfiguration API).
func (s *state) config(c *claim) []resourceapi.DeviceAllocationConfiguration {
	var out []resourceapi.DeviceAllocationConfiguration
	type span struct{ start, end int }
	ofClass := make(map[string]span) // class name → its entries in out
	for _, r := range c.requests {
		a := r.alternatives[s.chosen[r.index]]
		class := a.class.Object
		if span, ok := ofClass[class.Name]; ok {
			for i := span.start; i < span.end; i++ {
				out[i].Requests = append(out[i].Requests, a.resultName())
			}
			continue
		}
		start := len(out)
		for i := range class.Spec.Config {
			out = append(out, resourceapi.DeviceAllocationConfiguration{
				Source:              resourceapi.AllocationConfigSourceClass,
				Requests:            []string{a.resultName()},
				DeviceConfiguration: class.Spec.Config[i].DeviceConfiguration,
			})
		}
		ofClass[class.Name] = span{start, len(out)}
	}
	for i := range c.object.Spec.Devices.Config {
		config := &c.object.Spec.Devices.Config[i]
		if len(config.Requests) == 0 || slices.ContainsFunc(c.requests, func(r *request) bool { return s.isNamed(r, config.Requests) }) {
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
			!slices.ContainsFunc(c.requests, func(r *request) bool { return !s.isNamed(r, names) }) {
			out[i].Requests = nil
		}
	}
	return out
}

// isNamed tells whether the names have the request, or the alternative chosen for it.
func (s *state) isNamed(r *request, names []string) bool {
	return slices.Contains(names, r.name) ||
		(r.prioritized && slices.Contains(names, r.alternatives[s.chosen[r.index]].resultName()))
}

// nodeSelector says where the picked devices of one claim can be used: on this node if one of them is local to
// it or binds to it, otherwise where all their selectors agree; nil means everywhere.
func (s *state) nodeSelector(picks []pick) *v1.NodeSelector {
	var term v1.NodeSelectorTerm
	for _, pick := range picks {
		p := s.poolOf(pick.device)
		i := pick.device - s.starts[p]
		device, spec := s.pools[p].Device(i), &s.pools[p].SliceOf(i).Object.Spec
		nodeName, selector := spec.NodeName, spec.NodeSelector
		if ptr.Deref(spec.PerDeviceNodeSelection, false) {
			nodeName, selector = device.NodeName, device.NodeSelector
		}
		if nodeName != nil || ptr.Deref(device.BindsToNode, false) {
			return &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
				MatchFields: []v1.NodeSelectorRequirement{{
					Key: "metadata.name", Operator: v1.NodeSelectorOpIn, Values: []string{s.in.Node.Name},
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

// value is what the chosen alternatives are worth on this node.
func (s *state) value(seen *glance) *value {
	var v value
	for i, r := range s.reqs.requests {
		v.add(seen, &s.in, r.alternatives[s.chosen[i]])
	}
	return &v
}
