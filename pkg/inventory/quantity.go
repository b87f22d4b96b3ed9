// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"fmt"
	"maps"
	"slices"

	"github.com/blang/semver/v4"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// checkValues names the first quantity of a slice that is out of bounds, or the first version that CEL cannot read. Nobody may calculate
// with such a quantity, and every selector fails on a device with such a version, whatever it looks at. A pool that has one is invalid:
// otherwise it would keep requests of all other drivers off the nodes that see it.
func checkValues(spec *resourceapi.ResourceSliceSpec) error {
	for i := range spec.SharedCounters {
		set := &spec.SharedCounters[i]
		if err := checkCounters(set.Counters); err != nil {
			return fmt.Errorf("counter set %s, %w", set.Name, err)
		}
	}
	for i := range spec.Devices {
		if err := checkDevice(&spec.Devices[i]); err != nil {
			return fmt.Errorf("device %s, %w", spec.Devices[i].Name, err)
		}
	}
	return nil
}

func checkDevice(device *resourceapi.Device) error {
	if err := checkVersions(device.Attributes); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(device.Capacity)) {
		if err := checkCapacity(device.Capacity[name]); err != nil {
			return fmt.Errorf("capacity %s: %w", name, err)
		}
	}
	for i := range device.ConsumesCounters {
		consumption := &device.ConsumesCounters[i]
		if err := checkCounters(consumption.Counters); err != nil {
			return fmt.Errorf("consumption of counter set %s, %w", consumption.CounterSet, err)
		}
	}
	return nil
}

// checkVersions reads versions as CEL does. The API allows numbers of any length in them.
func checkVersions(attributes map[resourceapi.QualifiedName]resourceapi.DeviceAttribute) error {
	var first resourceapi.QualifiedName
	var firstErr error
	for name, attribute := range attributes {
		versions := attribute.VersionValues
		if attribute.VersionValue != nil {
			versions = []string{*attribute.VersionValue}
		}
		for _, version := range versions {
			if _, err := semver.Parse(version); err != nil && (firstErr == nil || name < first) {
				first, firstErr = name, fmt.Errorf("attribute %s: version %q: %w", name, version, err)
			}
		}
	}
	return firstErr
}

func checkCounters(counters map[string]resourceapi.Counter) error {
	for _, name := range slices.Sorted(maps.Keys(counters)) {
		if err := amount.Check(counters[name].Value); err != nil {
			return fmt.Errorf("counter %s: %w", name, err)
		}
	}
	return nil
}

func checkCapacity(capacity resourceapi.DeviceCapacity) error {
	if err := amount.Check(capacity.Value); err != nil {
		return err
	}
	policy := capacity.RequestPolicy
	if policy == nil {
		return nil
	}
	type field struct {
		name  string
		value *resource.Quantity
	}
	fields := []field{{"default", policy.Default}}
	if r := policy.ValidRange; r != nil {
		fields = append(fields, field{"validRange.min", r.Min}, field{"validRange.max", r.Max}, field{"validRange.step", r.Step})
	}
	for i := range policy.ValidValues {
		fields = append(fields, field{fmt.Sprintf("validValues[%d]", i), &policy.ValidValues[i]})
	}
	for _, f := range fields {
		if f.value == nil {
			continue
		}
		if err := amount.Check(*f.value); err != nil {
			return fmt.Errorf("requestPolicy.%s: %w", f.name, err)
		}
	}
	return nil
}
