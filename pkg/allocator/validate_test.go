package allocator

import (
	"context"
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"
)

// validate judges allocations by the rules of the API alone. It shares no code with the allocator.
func validate(w *world, node *v1.Node, allocations []resourceapi.AllocationResult) error {
	if len(allocations) != len(w.claims) {
		return fmt.Errorf("%d allocations for %d claims", len(allocations), len(w.claims))
	}
	type deviceKey struct{ driver, pool, device string }
	heldBefore := make(map[deviceKey]bool)
	for _, id := range w.held {
		heldBefore[deviceKey{id.Driver, id.Pool, id.Device}] = true
	}
	newest := make(map[[2]string]int64)
	for _, slice := range w.slices {
		key := [2]string{slice.Spec.Driver, slice.Spec.Pool.Name}
		newest[key] = max(newest[key], slice.Spec.Pool.Generation)
	}
	find := func(key deviceKey) (*resourceapi.ResourceSlice, *resourceapi.Device) {
		for _, slice := range w.slices {
			if slice.Spec.Driver != key.driver || slice.Spec.Pool.Name != key.pool || slice.Spec.Pool.Generation != newest[[2]string{key.driver, key.pool}] {
				continue
			}
			for i := range slice.Spec.Devices {
				device := &slice.Spec.Devices[i]
				if device.Name == key.device && reaches(w, node, slice, device) {
					return slice, device
				}
			}
		}
		return nil, nil
	}
	exclusive := make(map[deviceKey]int)
	for i, claim := range w.claims {
		results := allocations[i].Devices.Results
		if len(results) > resourceapi.AllocationResultsMaxSize {
			return fmt.Errorf("claim %s: %d results", claim.Name, len(results))
		}
		inClaim := make(map[deviceKey]bool)
		counts := make(map[string]int)
		devices := make([]*resourceapi.Device, len(results))
		for j, result := range results {
			key := deviceKey{result.Driver, result.Pool, result.Device}
			slice, device := find(key)
			if device == nil {
				return fmt.Errorf("claim %s: device %v does not exist for the node", claim.Name, key)
			}
			devices[j] = device
			if inClaim[key] {
				return fmt.Errorf("claim %s: device %v twice", claim.Name, key)
			}
			inClaim[key] = true
			if !ptr.Deref(result.AdminAccess, false) {
				if exclusive[key]++; exclusive[key] > 1 || heldBefore[key] {
					return fmt.Errorf("claim %s: device %v is held", claim.Name, key)
				}
			}
			counts[result.Request]++
			details, err := findRequest(claim, result.Request)
			if err != nil {
				return err
			}
			if err := accepts(w, details, slice, device); err != nil {
				return fmt.Errorf("claim %s, request %s: %w", claim.Name, result.Request, err)
			}
		}
		for _, request := range claim.Spec.Devices.Requests {
			chosen := 0
			if request.Exactly != nil {
				if counts[request.Name] > 0 && (request.Exactly.AllocationMode == resourceapi.DeviceAllocationModeAll || int64(counts[request.Name]) == request.Exactly.Count) {
					chosen++
				}
			}
			for _, sub := range request.FirstAvailable {
				n := counts[request.Name+"/"+sub.Name]
				if n > 0 && (sub.AllocationMode == resourceapi.DeviceAllocationModeAll || int64(n) == sub.Count) {
					chosen++
				}
			}
			if chosen != 1 {
				return fmt.Errorf("claim %s, request %s: not satisfied exactly once: %v", claim.Name, request.Name, counts)
			}
		}
		for _, constraint := range claim.Spec.Devices.Constraints {
			var values []string
			for j, result := range results {
				parent, _, _ := strings.Cut(result.Request, "/")
				if len(constraint.Requests) > 0 && !in(constraint.Requests, parent) && !in(constraint.Requests, result.Request) {
					continue
				}
				name := ptr.Deref(constraint.MatchAttribute, ptr.Deref(constraint.DistinctAttribute, ""))
				value, ok := devices[j].Attributes[resourceapi.QualifiedName(name)]
				if !ok {
					value, ok = devices[j].Attributes[resourceapi.QualifiedName(strings.TrimPrefix(string(name), result.Driver+"/"))]
				}
				if !ok {
					return fmt.Errorf("claim %s: device %s lacks attribute %s", claim.Name, result.Device, name)
				}
				text := toYAML(value)
				if constraint.DistinctAttribute != nil && in(values, text) {
					return fmt.Errorf("claim %s: attribute %s twice %s", claim.Name, name, text)
				}
				if constraint.MatchAttribute != nil && len(values) > 0 && values[0] != text {
					return fmt.Errorf("claim %s: attribute %s differs: %s %s", claim.Name, name, values[0], text)
				}
				values = append(values, text)
			}
		}
	}
	return nil
}

func in(list []string, s string) bool {
	for _, t := range list {
		if s == t {
			return true
		}
	}
	return false
}

func reaches(w *world, node *v1.Node, slice *resourceapi.ResourceSlice, device *resourceapi.Device) bool {
	name, all, selector := slice.Spec.NodeName, slice.Spec.AllNodes, slice.Spec.NodeSelector
	if ptr.Deref(slice.Spec.PerDeviceNodeSelection, false) {
		name, all, selector = device.NodeName, device.AllNodes, device.NodeSelector
	}
	switch {
	case name != nil:
		return *name == node.Name
	case all != nil:
		return *all
	}
	requirement := selector.NodeSelectorTerms[0].MatchExpressions[0]
	return in(requirement.Values, node.Labels[requirement.Key])
}

func findRequest(claim *resourceapi.ResourceClaim, name string) (*details, error) {
	for _, request := range claim.Spec.Devices.Requests {
		if e := request.Exactly; e != nil && request.Name == name {
			return &details{class: e.DeviceClassName, selectors: e.Selectors, tolerations: e.Tolerations}, nil
		}
		for _, sub := range request.FirstAvailable {
			if request.Name+"/"+sub.Name == name {
				return &details{class: sub.DeviceClassName, selectors: sub.Selectors, tolerations: sub.Tolerations}, nil
			}
		}
	}
	return nil, fmt.Errorf("claim %s has no request %s", claim.Name, name)
}

func accepts(w *world, d *details, slice *resourceapi.ResourceSlice, device *resourceapi.Device) error {
	class, err := classLister(w.classes).Get(d.class)
	if err != nil {
		return err
	}
	for _, selectors := range [][]resourceapi.DeviceSelector{class.Spec.Selectors, d.selectors} {
		for _, selector := range selectors {
			program := celCache.GetOrCompile(selector.CEL.Expression)
			ok, _, err := program.DeviceMatches(context.Background(), cel.Device{Driver: slice.Spec.Driver, Attributes: device.Attributes, Capacity: device.Capacity})
			if err != nil || !ok {
				return fmt.Errorf("device %s does not match %s: %v", device.Name, selector.CEL.Expression, err)
			}
		}
	}
	for _, taint := range device.Taints {
		if taint.Effect == resourceapi.DeviceTaintEffectNone {
			continue
		}
		tolerated := false
		for _, t := range d.tolerations {
			tolerated = tolerated || ((t.Key == "" || t.Key == taint.Key) && (t.Effect == "" || t.Effect == taint.Effect))
		}
		if !tolerated {
			return fmt.Errorf("device %s has taint %s", device.Name, taint.Key)
		}
	}
	return nil
}
