// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package checker

import (
	"errors"
	"fmt"
	"math/big"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// amounts are exact quantities by capacity name.
type amounts map[resourceapi.QualifiedName]*big.Rat

// exact returns the quantity as a fraction.
func exact(q resource.Quantity) *big.Rat {
	q = q.DeepCopy() // AsDec changes its receiver
	value, _ := new(big.Rat).SetString(q.AsDec().String())
	return value
}

// consumption judges what one result says that it consumes.
func (c *check) consumption(g *grant) {
	if !c.Features.ConsumableCapacity {
		if g.request.Capacity != nil {
			c.violation("%v: the request asks for capacity, which is disabled", g)
		}
		if g.result.ShareID != nil || len(g.result.ConsumedCapacity) > 0 {
			c.violation("%v: has a share of a device, which is disabled", g)
		}
		return
	}
	want, err := c.consumes(g.request, g.device)
	if err != nil {
		c.violation("%v: %v", g, err)
		return
	}
	if !fitsAlone(g.device, want) {
		c.violation("%v: the device is too small", g)
	}
	if !c.isShared(g.device) {
		if g.result.ShareID != nil || len(g.result.ConsumedCapacity) > 0 {
			c.violation("%v: has a share of a device that does not allow multiple allocations", g)
		}
		return
	}
	if g.result.ShareID == nil || *g.result.ShareID == "" {
		c.violation("%v: has no share ID", g)
	}
	for name, amount := range want {
		got, ok := g.result.ConsumedCapacity[name]
		if !ok {
			c.violation("%v: does not say what it consumes of %s", g, name)
		} else if exact(got).Cmp(amount) != 0 {
			c.violation("%v: consumes %s of %s, which should be %s", g, got.String(), name, amount.FloatString(3))
		}
	}
	for name := range g.result.ConsumedCapacity {
		if want[name] == nil {
			c.violation("%v: consumes %s, which the device does not have", g, name)
		}
	}
}

// consumes returns what the request takes of each capacity of the device, rounded as the device's policies say. The
// error says why the device cannot serve the request.
func (c *check) consumes(r *request, d *device) (amounts, error) {
	out := make(amounts)
	requests := ptr.Deref(r.Capacity, resourceapi.CapacityRequirements{}).Requests
	for name := range requests {
		if _, ok := d.Capacity[name]; !ok {
			return nil, fmt.Errorf("the device has no capacity %s", name)
		}
	}
	for name, capacity := range d.Capacity {
		var asked *resource.Quantity
		if q, ok := requests[name]; ok {
			asked = &q
		}
		amount, err := round(asked, capacity, c.Features.FractionalCapacityRange)
		if err != nil {
			return nil, fmt.Errorf("capacity %s: %w", name, err)
		}
		if amount.Sign() < 0 {
			return nil, fmt.Errorf("capacity %s: the amount is negative", name)
		}
		out[name] = amount
	}
	return out, nil
}

// round turns what is asked of one capacity into what is consumed (CapacityRequestPolicy API). Unless ranges may have
// fractions, steps are counted in whole numbers.
func round(asked *resource.Quantity, capacity resourceapi.DeviceCapacity, fractions bool) (*big.Rat, error) {
	policy := capacity.RequestPolicy
	var amount *big.Rat
	switch {
	case asked != nil:
		amount = exact(*asked)
	case policy != nil && policy.Default != nil:
		return exact(*policy.Default), nil
	default:
		amount = exact(capacity.Value)
	}
	switch {
	case policy == nil:
	case policy.ValidRange != nil:
		return roundToRange(amount, policy.ValidRange, fractions)
	case len(policy.ValidValues) > 0:
		for _, value := range policy.ValidValues {
			if v := exact(value); v.Cmp(amount) >= 0 {
				return v, nil
			}
		}
		return nil, errors.New("more than the largest valid value")
	}
	return amount, nil
}

func roundToRange(amount *big.Rat, valid *resourceapi.CapacityRequestPolicyRange, fractions bool) (*big.Rat, error) {
	least := new(big.Rat)
	if valid.Min != nil {
		least = exact(*valid.Min)
	}
	if amount.Cmp(least) < 0 {
		amount = least
	} else if valid.Step != nil {
		// least + n*step, the smallest that is enough.
		step := exact(*valid.Step)
		if !fractions {
			amount, least, step = wholeUp(amount), wholeUp(least), wholeUp(step)
		}
		if step.Sign() <= 0 {
			return nil, errors.New("the step is not positive")
		}
		n := new(big.Rat).Quo(new(big.Rat).Sub(amount, least), step)
		amount = new(big.Rat).Add(least, step.Mul(step, wholeUp(n)))
	}
	if valid.Max != nil && amount.Cmp(exact(*valid.Max)) > 0 {
		return nil, errors.New("more than the largest valid value")
	}
	return amount, nil
}

// wholeUp is the smallest whole number that is not less.
func wholeUp(r *big.Rat) *big.Rat {
	whole, rest := new(big.Int).DivMod(r.Num(), r.Denom(), new(big.Int))
	if rest.Sign() != 0 {
		whole.Add(whole, big.NewInt(1))
	}
	return new(big.Rat).SetInt(whole)
}

// fitsAlone tells whether the device, if nobody else had a share of it, would be large enough.
func fitsAlone(d *device, consumed amounts) bool {
	for name, amount := range consumed {
		if amount.Cmp(exact(d.Capacity[name].Value)) > 0 {
			return false
		}
	}
	return true
}

// shares makes sure that the shares of each device are told apart and do not exceed it. What is looked at with
// admin access takes nothing.
func (c *check) shares(grants []*grant) {
	seen := make(map[*device]bool)
	for _, g := range grants {
		if !c.isShared(g.device) || seen[g.device] {
			continue
		}
		seen[g.device] = true
		results := c.holds(g.id)
		for _, other := range grants {
			if other.device == g.device && !other.isAdmin() {
				results = append(results, other.result)
			}
		}
		ids := make(map[types.UID]bool)
		total := make(amounts)
		for _, result := range results {
			if result.ShareID != nil {
				if ids[*result.ShareID] {
					c.violation("%v: share ID %s is there twice", g, *result.ShareID)
				}
				ids[*result.ShareID] = true
			}
			for name, consumed := range result.ConsumedCapacity {
				if total[name] == nil {
					total[name] = new(big.Rat)
				}
				total[name].Add(total[name], exact(consumed))
			}
		}
		for name, capacity := range g.device.Capacity {
			if total[name] != nil && total[name].Cmp(exact(capacity.Value)) > 0 {
				c.violation("%v: %s of capacity %s would be consumed, there are %s", g, total[name].FloatString(3), name, capacity.Value.String())
			}
		}
	}
}
