package allocator

import (
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

// grouping has the devices by what any alternative under the constraint sees.
func (s *search) grouping(c *constraint) *grouping {
	if g := s.groups[c.index]; g != nil {
		return g
	}
	var g *grouping
	if c.derivations == nil {
		g = s.newGrouping(c, nil)
	} else {
		g = s.mergedGrouping(c)
	}
	s.groups[c.index] = g
	return g
}

// newGrouping groups the devices by the values of the constraint's attribute, derived if from is not nil.
func (s *search) newGrouping(c *constraint, from *inventory.Derivation) *grouping {
	var g *grouping
	if n := len(s.spare); n > 0 {
		g, s.spare = s.spare[n-1], s.spare[:n-1]
	} else {
		g = new(grouping)
	}
	if len(s.pools) == 1 {
		column := s.column(c, from, 0)
		g.groups, g.has, g.unknown, g.errors = column.Groups(), column.Has(), column.Unknown(), column.Errors()
		if from == nil {
			g.column = column
		}
		return g
	}
	g.has, g.unknown, g.errors = make(bitset.Set, s.words), make(bitset.Set, s.words), make(bitset.Set, s.words)
	index := make(map[inventory.AttributeValue]int)
	for p := range s.pools {
		column := s.column(c, from, p)
		base := s.starts[p] / 64
		copy(g.has[base:], column.Has())
		copy(g.unknown[base:], column.Unknown())
		copy(g.errors[base:], column.Errors())
		for _, group := range column.Groups() {
			i, ok := index[group.Value]
			if !ok {
				i = len(g.groups)
				index[group.Value] = i
				g.groups = append(g.groups, inventory.Group{Value: group.Value, Devices: make(bitset.Set, s.words)})
			}
			copy(g.groups[i].Devices[base:], group.Devices)
		}
	}
	return g
}
