// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package search

import (
	"slices"

	"stowage.dev/stowage/pkg/allocator/internal/compiled"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// grouping has the devices of the node by their value of one constraint's attribute. Read only: with one pool, which
// is the rule, the sets are the inventory's.
type grouping struct {
	groups  []inventory.Group
	unknown bitset.Set        // devices whose value is of an unknown kind
	has     bitset.Set        // devices that have the attribute
	errors  bitset.Set        // devices for which the attribute cannot be derived
	column  *inventory.Column // what all this is of, if that is one pool and not derived
}

// devices returns those with the value, nil if there are none.
func (g *grouping) devices(value inventory.AttributeValue) bitset.Set {
	for i := range g.groups {
		if g.groups[i].Value == value {
			return g.groups[i].Devices
		}
	}
	return nil
}

// groupings has the groupings of one node, each made when it is first needed.
type groupings struct {
	*offer
	groups  []*grouping // by Constraint.Index
	spare   []*grouping // from earlier searches, to be used again
	derived map[derivedGroup]*grouping
}

// derivedGroup names the devices by what one derivation of a constraint's attribute makes of them.
type derivedGroup struct {
	constraint int // Constraint.Index
	from       *inventory.Derivation
}

// open begins with none.
func (gs *groupings) open() {
	for _, c := range gs.reqs.Claims {
		for range c.Constraints {
			gs.groups = append(gs.groups, nil)
		}
	}
}

// close forgets everything but the memory.
func (gs *groupings) close() {
	for _, g := range gs.groups {
		if g != nil {
			*g = grouping{}
			gs.spare = append(gs.spare, g)
		}
	}
	clear(gs.groups)
	gs.groups, gs.derived = gs.groups[:0], nil
}

// of has the devices by what any alternative under the constraint sees.
func (gs *groupings) of(c *compiled.Constraint) *grouping {
	if g := gs.groups[c.Index]; g != nil {
		return g
	}
	var g *grouping
	if c.Derivations == nil {
		g = gs.group(c, nil)
	} else {
		g = gs.merge(c)
	}
	gs.groups[c.Index] = g
	return g
}

// group groups the devices by the values of the constraint's attribute, derived if from is not nil.
func (gs *groupings) group(c *compiled.Constraint, from *inventory.Derivation) *grouping {
	var g *grouping
	if n := len(gs.spare); n > 0 {
		g, gs.spare = gs.spare[n-1], gs.spare[:n-1]
	} else {
		g = new(grouping)
	}
	if len(gs.pools) == 1 {
		column := gs.column(c, from, 0)
		g.groups, g.has, g.unknown, g.errors = column.Groups(), column.Has(), column.Unknown(), column.Errors()
		if from == nil {
			g.column = column
		}
		return g
	}
	g.has, g.unknown, g.errors = make(bitset.Set, gs.words), make(bitset.Set, gs.words), make(bitset.Set, gs.words)
	index := make(map[inventory.AttributeValue]int)
	for p := range gs.pools {
		column := gs.column(c, from, p)
		base := gs.starts[p] / 64
		copy(g.has[base:], column.Has())
		copy(g.unknown[base:], column.Unknown())
		copy(g.errors[base:], column.Errors())
		for _, group := range column.Groups() {
			i, ok := index[group.Value]
			if !ok {
				i = len(g.groups)
				index[group.Value] = i
				g.groups = append(g.groups, inventory.Group{Value: group.Value, Devices: make(bitset.Set, gs.words)})
			}
			copy(g.groups[i].Devices[base:], group.Devices)
		}
	}
	return g
}

// seenBy has the devices by the value of the constraint's attribute that the alternative sees. Read only.
func (gs *groupings) seenBy(c *compiled.Constraint, a *compiled.Alternative) *grouping {
	if c.Derivations == nil {
		return gs.of(c)
	}
	key := derivedGroup{c.Index, a.Derivation(c)}
	g := gs.derived[key]
	if g == nil {
		g = gs.group(c, key.from)
		if gs.derived == nil {
			gs.derived = make(map[derivedGroup]*grouping)
		}
		gs.derived[key] = g
	}
	return g
}

// merge puts a device into the group of each value that some alternative under the constraint, which may take
// the device, sees. So a group has at least the devices that can be had with its value.
func (gs *groupings) merge(c *compiled.Constraint) *grouping {
	merged := &grouping{
		has: make(bitset.Set, gs.words), unknown: make(bitset.Set, gs.words), errors: make(bitset.Set, gs.words),
	}
	for _, a := range gs.reqs.Lanes {
		if !slices.Contains(a.Constraints, c) {
			continue
		}
		g := gs.seenBy(c, a)
		add := func(to, devices bitset.Set) {
			own := gs.lanes[a.Lane].candidates.Clone()
			own.And(devices)
			to.Or(own)
		}
		add(merged.has, g.has)
		add(merged.unknown, g.unknown)
		add(merged.errors, g.errors)
		for _, group := range g.groups {
			at := slices.IndexFunc(merged.groups, func(known inventory.Group) bool { return known.Value == group.Value })
			if at < 0 {
				at = len(merged.groups)
				merged.groups = append(merged.groups, inventory.Group{Value: group.Value, Devices: make(bitset.Set, gs.words)})
			}
			add(merged.groups[at].Devices, group.Devices)
		}
	}
	return merged
}

// column has the values of the constraint's attribute in one pool, derived if from is not nil.
func (gs *groupings) column(c *compiled.Constraint, from *inventory.Derivation, pool int) *inventory.Column {
	if from != nil {
		column := gs.in.Derive(from, gs.pools[pool])
		if gs.Err == nil {
			gs.Err = gs.in.Interrupted
		}
		return column
	}
	if g := gs.groups[c.Index]; g != nil && g.column != nil {
		return g.column
	}
	return gs.pools[pool].Attribute(c.Attribute)
}

// orderMatters tells whether a constraint of the alternative meets a value of an unknown kind, which may only come
// first: then the devices of two equal requests cannot be exchanged.
func (gs *groupings) orderMatters(a *compiled.Alternative) bool {
	for _, c := range a.Constraints {
		for p := range gs.pools {
			if gs.column(c, a.Derivation(c), p).Unknown() != nil {
				return true
			}
		}
	}
	return false
}
