// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// Capacity is what a device that allows multiple allocations has to give, by name. Immutable.
type Capacity struct {
	Names   []resourceapi.QualifiedName // sorted
	Amounts []amount.Amount
}

// Consumption returns what one allocation of the device takes of its capacities under the request's requirements
// (KEP-5075): for each capacity of the device the requested quantity, rounded up as its request policy says,
// or without a request the policy's default, or else all of it.
//
// With ok false the device cannot serve the request. The error is a request that the policy's arithmetic cannot
// represent, or a negative quantity: nothing can be said about the device then.
func (f Features) Consumption(device *resourceapi.Device,
	required *resourceapi.CapacityRequirements,
) (consumed map[resourceapi.QualifiedName]resource.Quantity, ok bool, err error) {
	var requests map[resourceapi.QualifiedName]resource.Quantity
	if required != nil {
		requests = required.Requests
	}
	for name := range requests {
		if _, has := device.Capacity[name]; !has {
			return nil, false, nil
		}
	}
	consumed, ok = make(map[resourceapi.QualifiedName]resource.Quantity, len(device.Capacity)), true
	for _, name := range slices.Sorted(maps.Keys(device.Capacity)) {
		capacity := device.Capacity[name]
		var requested *resource.Quantity
		if quantity, has := requests[name]; has {
			requested = &quantity
		}
		quantity, allowed, err := f.consume(&capacity, requested)
		if err != nil {
			return nil, false, fmt.Errorf("capacity %q: %w", name, err)
		}
		ok = ok && allowed && compare(quantity, capacity.Value) <= 0
		consumed[name] = quantity
	}
	if !ok {
		return nil, false, nil
	}
	return consumed, true, nil
}

var errNegative = errors.New("capacity value is negative")

// consume says how much of one capacity is taken, and whether the policy allows it.
func (f Features) consume(capacity *resourceapi.DeviceCapacity,
	requested *resource.Quantity,
) (quantity resource.Quantity, allowed bool, err error) {
	policy := capacity.RequestPolicy
	switch {
	case requested == nil && policy != nil && policy.Default != nil:
		quantity = policy.Default.DeepCopy()
	case requested == nil:
		quantity = capacity.Value.DeepCopy()
	case policy != nil && policy.ValidRange != nil && policy.ValidRange.Min != nil:
		if quantity, err = f.roundUp(requested, policy.ValidRange); err != nil {
			return quantity, false, err
		}
	case policy != nil:
		quantity = requested.DeepCopy()
		// Values are in ascending order (ResourceSlice API).
		for i := range policy.ValidValues {
			if compare(*requested, policy.ValidValues[i]) <= 0 {
				quantity = policy.ValidValues[i].DeepCopy()
				break
			}
		}
	default:
		quantity = requested.DeepCopy()
	}
	if quantity.Sign() < 0 {
		return quantity, false, errNegative
	}
	return quantity, policy == nil || f.allows(policy, &quantity), nil
}

// allows tells whether a quantity may be taken under the policy. The default always may.
func (f Features) allows(policy *resourceapi.CapacityRequestPolicy, quantity *resource.Quantity) bool {
	switch {
	case policy.Default != nil && compare(*quantity, *policy.Default) == 0:
		return true
	case policy.ValidRange != nil:
		return f.isInRange(policy.ValidRange, quantity)
	case len(policy.ValidValues) > 0:
		return slices.ContainsFunc(policy.ValidValues, func(valid resource.Quantity) bool { return compare(valid, *quantity) == 0 })
	}
	return true
}

func (f Features) isInRange(r *resourceapi.CapacityRequestPolicyRange, quantity *resource.Quantity) bool {
	if r.Max != nil && compare(*quantity, *r.Max) > 0 {
		return false
	}
	if r.Step == nil || r.Min == nil {
		return true
	}
	value, least, step := quantity.Value(), r.Min.Value(), r.Step.Value()
	if f.countsMilli(r) {
		var exact bool
		if value, exact = milli(quantity); !exact {
			return false
		}
		least, step = r.Min.MilliValue(), r.Step.MilliValue()
	}
	return step > 0 && (value-least)%step == 0
}

// roundUp returns the least quantity of the range that is enough for the request.
func (f Features) roundUp(requested *resource.Quantity, r *resourceapi.CapacityRequestPolicyRange) (resource.Quantity, error) {
	if compare(*requested, *r.Min) < 0 {
		return r.Min.DeepCopy(), nil
	}
	if r.Step == nil {
		return requested.DeepCopy(), nil
	}
	inMilli := f.countsMilli(r)
	value, least, step := requested.Value(), r.Min.Value(), r.Step.Value()
	switch {
	case inMilli:
		var exact bool
		if value, exact = milli(requested); !exact {
			return resource.Quantity{}, fmt.Errorf("request %s cannot be represented in thousandths, in which the policy's steps are counted",
				text(requested))
		}
		least, step = r.Min.MilliValue(), r.Step.MilliValue()
	case requested.CmpInt64(math.MaxInt64) > 0:
		return resource.Quantity{}, fmt.Errorf("request %s cannot be represented in 64 bits, in which the policy's steps are counted",
			text(requested))
	}
	if step <= 0 {
		return resource.Quantity{}, fmt.Errorf("steps of %s cannot be counted", text(r.Step))
	}
	steps := (value - least) / step
	if (value-least)%step != 0 {
		steps++
	}
	if steps > (math.MaxInt64-max(least, 0))/step {
		return resource.Quantity{}, fmt.Errorf("request %s cannot be represented: the policy's next step is beyond 64 bits", text(requested))
	}
	value = least + steps*step
	switch {
	case !inMilli:
		return *resource.NewQuantity(value, r.Step.Format), nil
	case value%1000 == 0:
		return *resource.NewQuantity(value/1000, r.Step.Format), nil
	}
	return *resource.NewMilliQuantity(value, r.Step.Format), nil
}

// countsMilli tells whether the steps of the range are counted in thousandths: all its quantities are then exact
// in thousandths, and the step is at least one (CapacityRequestPolicyRange API).
func (f Features) countsMilli(r *resourceapi.CapacityRequestPolicyRange) bool {
	if !f.FractionalCapacityRange {
		return false
	}
	for _, quantity := range []*resource.Quantity{r.Min, r.Max, r.Step} {
		if quantity == nil {
			continue
		}
		if _, exact := milli(quantity); !exact {
			return false
		}
	}
	return r.Step == nil || r.Step.MilliValue() >= 1
}

// milli returns the quantity in thousandths, if that is exact.
func milli(quantity *resource.Quantity) (value int64, exact bool) {
	value = quantity.MilliValue()
	return value, compare(*quantity, *resource.NewMilliQuantity(value, quantity.Format)) == 0
}

// compare compares without a change of either: Cmp may turn a small number into a large one's form.
func compare(a, b resource.Quantity) int { return a.Cmp(b) }

// text prints a quantity of a shared object: String would write to it.
func text(quantity *resource.Quantity) string {
	own := quantity.DeepCopy()
	return own.String()
}

// needsCapacityCheck tells whether the device may be unable to serve even a request without requirements.
func needsCapacityCheck(device *resourceapi.Device) bool {
	for _, capacity := range device.Capacity {
		if capacity.RequestPolicy != nil || capacity.Value.Sign() < 0 {
			return true
		}
	}
	return false
}

func capacityOf(device *resourceapi.Device) *Capacity {
	c := &Capacity{Names: slices.Sorted(maps.Keys(device.Capacity)), Amounts: make([]amount.Amount, 0, len(device.Capacity))}
	for _, name := range c.Names {
		c.Amounts = append(c.Amounts, amount.Of(device.Capacity[name].Value))
	}
	return c
}
