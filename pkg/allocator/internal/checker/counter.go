// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package checker

import (
	"math/big"
	"slices"
)

// counters makes sure that the devices in use of each pool do not consume more of a counter than there is. A
// device consumes once, however many shares of it there are. What is looked at with admin access consumes nothing.
func (c *check) counters(grants []*grant) {
	if !c.Features.PartitionableDevices {
		return
	}
	type counter struct{ set, name string }
	for _, p := range c.touched(grants) {
		consumed := make(map[counter]*big.Rat)
		asked := make(map[counter]bool) // by a device that was not in use before
		for _, d := range c.inUse(p, grants) {
			begins := !c.isHeld(deviceID{p.id, d.Name}) // a further share of a device takes no more of its counters
			for _, consumption := range d.ConsumesCounters {
				for name, value := range consumption.Counters {
					key := counter{consumption.CounterSet, name}
					if consumed[key] == nil {
						consumed[key] = new(big.Rat)
					}
					consumed[key].Add(consumed[key], exact(value.Value))
					asked[key] = asked[key] || begins
				}
			}
		}
		for key, amount := range consumed {
			have := p.counterSets[key.set].Counters[key.name].Value
			if asked[key] && amount.Cmp(exact(have)) > 0 {
				c.violation("pool %v: %s of counter %s/%s would be consumed, there are %s", p.id, amount.FloatString(3),
					key.set, key.name, have.String())
			}
		}
	}
}

// compatibilityGroups makes sure that all devices that use a counter set have a group in common, or none has any. Where
// that is not so among those held before, there is nothing to be kept.
func (c *check) compatibilityGroups(grants []*grant) {
	if !c.Features.CompatibilityGroups {
		return
	}
	for _, p := range c.touched(grants) {
		groups, held := make(map[string][][]string), make(map[string][][]string)
		for _, d := range c.inUse(p, grants) {
			for _, consumption := range d.ConsumesCounters {
				groups[consumption.CounterSet] = append(groups[consumption.CounterSet], consumption.CompatibilityGroups)
				if c.isHeld(deviceID{p.id, d.Name}) {
					held[consumption.CounterSet] = append(held[consumption.CounterSet], consumption.CompatibilityGroups)
				}
			}
		}
		for set, users := range groups {
			if compatible(held[set]) && !compatible(users) {
				c.violation("pool %v: devices that are not compatible would use counter set %s: %v", p.id, set, users)
			}
		}
	}
}

func compatible(users [][]string) bool {
	if !slices.ContainsFunc(users, func(groups []string) bool { return len(groups) > 0 }) {
		return true
	}
	for _, group := range users[0] {
		if !slices.ContainsFunc(users, func(groups []string) bool { return !slices.Contains(groups, group) }) {
			return true
		}
	}
	return false
}

// touched are the pools of which something is given.
func (c *check) touched(grants []*grant) []*pool {
	var out []*pool
	for _, g := range grants {
		if p := c.pools[g.id.poolID]; !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	return out
}

// inUse are the devices of the pool that are held or given, on any node.
func (c *check) inUse(p *pool, grants []*grant) []*device {
	var out []*device
	for _, d := range p.devices {
		given := slices.ContainsFunc(grants, func(g *grant) bool { return g.device == d && !g.isAdmin() })
		if given || c.isHeld(deviceID{p.id, d.Name}) {
			out = append(out, d)
		}
	}
	return out
}
