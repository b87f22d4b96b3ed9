// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package checker

import (
	"context"
	"fmt"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
)

// constraints judges the constraints of one claim.
func (c *check) constraints(claim *resourceapi.ResourceClaim, grants []*grant) {
	for i := range claim.Spec.Devices.Constraints {
		constraint := &claim.Spec.Devices.Constraints[i]
		name, distinct := constraint.MatchAttribute, false
		if name == nil {
			name, distinct = constraint.DistinctAttribute, true
		}
		if name == nil {
			c.violation("claim %s: constraint %d is of an unknown kind", claim.Name, i)
			continue
		}
		var values [][]string
		for _, g := range grants {
			if len(constraint.Requests) > 0 && !slices.Contains(constraint.Requests, g.request.of.Name) &&
				!slices.Contains(constraint.Requests, g.request.name) {
				continue
			}
			value, err := c.value(g, *name)
			if err != nil {
				c.violation("%v: constraint %d: %v", g, i, err)
				continue
			}
			values = append(values, value)
		}
		if len(values) < 2 {
			continue // nothing to compare: the attribute is there
		}
		if distinct {
			c.distinct(claim, *name, values)
		} else {
			c.match(claim, *name, values)
		}
	}
}

// match makes sure that all devices have a value in common.
func (c *check) match(claim *resourceapi.ResourceClaim, name resourceapi.FullyQualifiedName, values [][]string) {
	for _, candidate := range values[0] {
		if !slices.ContainsFunc(values[1:], func(value []string) bool { return !slices.Contains(value, candidate) }) {
			return
		}
	}
	c.violation("claim %s: devices do not match in %s: %v", claim.Name, name, values)
}

// distinct makes sure that no two devices have a value in common.
func (c *check) distinct(claim *resourceapi.ResourceClaim, name resourceapi.FullyQualifiedName, values [][]string) {
	for i := range values {
		for _, other := range values[:i] {
			if slices.ContainsFunc(values[i], func(v string) bool { return slices.Contains(other, v) }) {
				c.violation("claim %s: devices are not distinct in %s: %v", claim.Name, name, values)
				return
			}
		}
	}
}

// value returns the device's values of the attribute as the request sees them; more than one only if it is a list.
// Each has its type, so that 1 and "1" differ. An attribute of an unknown type has none.
func (c *check) value(g *grant, name resourceapi.FullyQualifiedName) ([]string, error) {
	attribute, err := c.attribute(g, name)
	if err != nil {
		return nil, err
	}
	switch {
	case attribute.StringValue != nil:
		return texts("string", *attribute.StringValue), nil
	case attribute.IntValue != nil:
		return texts("int", *attribute.IntValue), nil
	case attribute.BoolValue != nil:
		return texts("bool", *attribute.BoolValue), nil
	case attribute.VersionValue != nil:
		return texts("version", *attribute.VersionValue), nil
	case !c.Features.ListTypeAttributes:
		return nil, nil
	case len(attribute.StringValues) > 0:
		return texts("string", attribute.StringValues...), nil
	case len(attribute.IntValues) > 0:
		return texts("int", attribute.IntValues...), nil
	case len(attribute.BoolValues) > 0:
		return texts("bool", attribute.BoolValues...), nil
	case len(attribute.VersionValues) > 0:
		return texts("version", attribute.VersionValues...), nil
	}
	return nil, nil
}

func texts[T any](kind string, values ...T) []string {
	out := make([]string, len(values))
	for i, value := range values {
		out[i] = fmt.Sprintf("%s %v", kind, value)
	}
	return out
}

// attribute returns the attribute that the request derives, or else the device's own. A name without a domain has
// the driver's.
func (c *check) attribute(g *grant, name resourceapi.FullyQualifiedName) (*resourceapi.DeviceAttribute, error) {
	if c.Features.DerivedAttributes {
		for _, derived := range g.request.DerivedAttributes {
			if derived.Name != name {
				continue
			}
			program := cel.NewCache(1, c.celFeatures()).GetOrCompileDerivedAttribute(derived.Expression)
			attribute, _, err := program.EvaluateDerivedAttribute(context.Background(), g.device.input())
			return attribute, err
		}
	}
	if attribute, ok := g.device.Attributes[resourceapi.QualifiedName(name)]; ok {
		return &attribute, nil
	}
	if short, ok := strings.CutPrefix(string(name), g.id.driver+"/"); ok {
		if attribute, ok := g.device.Attributes[resourceapi.QualifiedName(short)]; ok {
			return &attribute, nil
		}
	}
	return nil, fmt.Errorf("the device has no attribute %s", name)
}
