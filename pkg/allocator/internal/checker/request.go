// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package checker

import (
	"context"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
)

// request is an exact request, or one alternative of a prioritized one.
type request struct {
	of *resourceapi.DeviceRequest
	// name is what results call it: "request" or "request/alternative".
	name string
	*resourceapi.ExactDeviceRequest
}

// findRequest returns the request of the claim that results call by the name.
func (c *check) findRequest(claim *resourceapi.ResourceClaim, name string) *request {
	for i := range claim.Spec.Devices.Requests {
		in := &claim.Spec.Devices.Requests[i]
		if exact := in.Exactly; exact != nil && len(in.FirstAvailable) == 0 && in.Name == name {
			return &request{in, name, exact}
		}
		for j := range in.FirstAvailable {
			if sub := &in.FirstAvailable[j]; in.Name+"/"+sub.Name == name {
				return &request{in, name, &resourceapi.ExactDeviceRequest{
					DeviceClassName: sub.DeviceClassName, Selectors: sub.Selectors, AllocationMode: sub.AllocationMode, Count: sub.Count,
					Tolerations: sub.Tolerations, Capacity: sub.Capacity, DerivedAttributes: sub.DerivedAttributes,
				}}
			}
		}
	}
	return nil
}

func (c *check) findClass(name string) *resourceapi.DeviceClass {
	for _, class := range c.Classes {
		if class.Name == name {
			return class
		}
	}
	return nil
}

// matches tells whether all selectors of the class and of the request accept the device.
func (c *check) matches(r *request, d *device) (bool, error) {
	class := c.findClass(r.DeviceClassName)
	if class == nil {
		return false, fmt.Errorf("there is no device class %s", r.DeviceClassName)
	}
	compiler := cel.GetCompiler(c.celFeatures())
	for _, selector := range slices.Concat(class.Spec.Selectors, r.Selectors) {
		program := compiler.CompileCELExpression(selector.CEL.Expression, cel.Options{DisableCostEstimation: true})
		if program.Error != nil {
			return false, fmt.Errorf("selector %q: %w", selector.CEL.Expression, program.Error)
		}
		matches, _, err := program.DeviceMatches(context.Background(), d.input())
		if err != nil {
			return false, fmt.Errorf("selector %q on device %s: %w", selector.CEL.Expression, d.Name, err)
		}
		if !matches {
			return false, nil
		}
	}
	return true, nil
}

func (c *check) celFeatures() cel.Features {
	return cel.Features{EnableConsumableCapacity: c.Features.ConsumableCapacity, EnableListTypeAttributes: c.Features.ListTypeAttributes}
}

func (d *device) input() cel.Device {
	return cel.Device{
		Driver: d.slice.Spec.Driver, AllowMultipleAllocations: d.AllowMultipleAllocations, Attributes: d.Attributes, Capacity: d.Capacity,
	}
}

// prevents tells whether a taint that is not tolerated keeps a device from being allocated.
func prevents(taint resourceapi.DeviceTaint) bool {
	return taint.Effect == resourceapi.DeviceTaintEffectNoSchedule || taint.Effect == resourceapi.DeviceTaintEffectNoExecute
}

// tolerates follows the fields of DeviceToleration: an empty key means all keys, an empty effect all effects.
func tolerates(t resourceapi.DeviceToleration, taint resourceapi.DeviceTaint) bool {
	if t.Effect != "" && t.Effect != taint.Effect {
		return false
	}
	if t.Key != "" && t.Key != taint.Key {
		return false
	}
	switch t.Operator {
	case resourceapi.DeviceTolerationOpExists:
		return true
	case resourceapi.DeviceTolerationOpEqual, "":
		return t.Value == taint.Value
	}
	return false
}
