// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/usage"
)

// Overdrawn returns the claims that have, in the API, together more than there is of a capacity of the device that is given out
// in shares (KEP-5075), or of a shared counter that it takes (KEP-4815), ordered by UID, and what that is; nil if it suffices or what
// there is is not known. So it does for devices whose compatibility groups (KEP-5963) exclude each other.
//
// One claim alone can be overdrawn, too, when a device has shrunk since. Where several nodes have a device of the name,
// it is overdrawn only if it would be with each of them, also of a node that counts the pool's generations for itself
// and is behind: nobody may have the others.
func Overdrawn(id usage.DeviceID, view usage.View, inv *inventory.View) (claims []usage.ClaimRef, what string) {
	pool := poolOf(id, inv)
	if pool == nil || len(written(view.Device(id))) == 0 {
		return nil, ""
	}
	for generation := range pool.Generations() {
		for _, device := range generation.Devices(id.Device) {
			if claims, what = overdrawn(id, device, view, generation); claims == nil {
				return nil, ""
			}
		}
	}
	return claims, what
}

func overdrawn(id usage.DeviceID, device inventory.Offer, view usage.View, pool *inventory.Pool) (claims []usage.ClaimRef, what string) {
	if claims, what = overdrawnCapacity(id, device, view); claims != nil {
		return claims, what
	}
	if claims, what = overdrawnCounter(id, device, view, pool); claims != nil {
		return claims, what
	}
	return excluded(id, device, view, pool)
}

// poolOf returns the device's pool, nil if it is not known, or not all of it.
func poolOf(id usage.DeviceID, inv *inventory.View) *inventory.Pool {
	if pool := inv.Pool(inventory.PoolID(id.PoolID())); pool != nil && pool.Problem == nil {
		return pool
	}
	return nil
}

func overdrawnCapacity(id usage.DeviceID, device inventory.Offer, view usage.View) ([]usage.ClaimRef, string) {
	holders := written(view.Device(id))
	for _, name := range slices.Sorted(maps.Keys(device.Capacity)) {
		left := amount.Of(device.Capacity[name].Value)
		for i := range holders {
			left = left.Sub(amount.Of(holders[i].ConsumedCapacity[name]))
		}
		if left.IsNegative() {
			return claimants(holders), fmt.Sprintf("capacity %s", name)
		}
	}
	return nil, ""
}

func overdrawnCounter(id usage.DeviceID, device inventory.Offer, view usage.View, pool *inventory.Pool) ([]usage.ClaimRef, string) {
	if pool.Counters == nil {
		return nil, ""
	}
	for _, mine := range pool.UsesOf(device) {
		counter := &pool.Counters.All[mine.Counter]
		left := counter.Total
		var holders []usage.Holder
		for _, name := range pool.Counters.Consumers(mine.Counter) {
			of := written(view.Pool(id.PoolID()).Device(name))
			for _, use := range pool.Counters.Uses(name) {
				if len(of) > 0 && use.Counter == mine.Counter {
					left = left.Sub(use.Amount)
					holders = append(holders, of...)
				}
			}
		}
		if left.IsNegative() {
			return claimants(holders), fmt.Sprintf("counter %s of set %s", counter.Name, counter.Set)
		}
	}
	return nil, ""
}

// excluded looks for devices in the counter sets of this one that do not go together.
func excluded(id usage.DeviceID, device inventory.Offer, view usage.View, pool *inventory.Pool) ([]usage.ClaimRef, string) {
	for _, mine := range pool.MembershipsOf(device) {
		var common inventory.CommonGroups
		var holders []usage.Holder
		for _, name := range pool.Counters.Members(mine.Set) {
			of := written(view.Pool(id.PoolID()).Device(name))
			for _, member := range pool.Devices(name) {
				for _, m := range pool.MembershipsOf(member) {
					if len(of) > 0 && m.Set == mine.Set {
						common.Add(m.Groups)
						holders = append(holders, of...)
					}
				}
			}
		}
		if common.Excluded() {
			return claimants(holders), fmt.Sprintf("compatibility groups of counter set %s", pool.Counters.SetName(mine.Set))
		}
	}
	return nil, ""
}

// written are the holders of a device that are not only in flight.
func written(device *usage.Device) []usage.Holder {
	return slices.DeleteFunc(slices.Clone(device.Holders()), func(h usage.Holder) bool { return h.InFlight })
}

// claimants are the claims of holders, each once, ordered by UID.
func claimants(holders []usage.Holder) []usage.ClaimRef {
	claims := make([]usage.ClaimRef, 0, len(holders))
	for i := range holders {
		claims = append(claims, holders[i].Claim)
	}
	slices.SortFunc(claims, func(a, b usage.ClaimRef) int { return cmp.Or(cmp.Compare(a.UID, b.UID), compareRefs(a, b)) })
	return slices.Compact(claims)
}
