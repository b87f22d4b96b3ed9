package allocator

import (
	"slices"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/bitset"
)

// derivedGroup names the devices by what one derivation of a constraint's attribute makes of them.
type derivedGroup struct {
	constraint int // constraint.index
	from       *inventory.Derivation
}

// groupingFor has the devices by the value of the constraint's attribute that the alternative sees. Read only.
func (s *search) groupingFor(c *constraint, a *alternative) *grouping {
	if c.derivations == nil {
		return s.grouping(c)
	}
	key := derivedGroup{c.index, a.derivation(c)}
	g := s.derived[key]
	if g == nil {
		g = s.newGrouping(c, key.from)
		if s.derived == nil {
			s.derived = make(map[derivedGroup]*grouping)
		}
		s.derived[key] = g
	}
	return g
}

// mergedGrouping puts a device into the group of each value that some alternative under the constraint, which may take
// the device, sees. So a group has at least the devices that can be had with its value.
func (s *search) mergedGrouping(c *constraint) *grouping {
	merged := &grouping{
		has: make(bitset.Set, s.words), unknown: make(bitset.Set, s.words), errors: make(bitset.Set, s.words),
	}
	for _, a := range s.reqs.lanes {
		if !slices.Contains(a.constraints, c) {
			continue
		}
		g := s.groupingFor(c, a)
		add := func(to, devices bitset.Set) {
			own := s.lanes[a.lane].candidates.Clone()
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
				merged.groups = append(merged.groups, inventory.Group{Value: group.Value, Devices: make(bitset.Set, s.words)})
			}
			add(merged.groups[at].Devices, group.Devices)
		}
	}
	return merged
}

// derivationError says that the constraint's attribute cannot be derived from a device.
func derivationError(reqs *Requests, a *alternative, c *constraint, p *inventory.NodePool, device int, column *inventory.Column) *SelectorError {
	object, from := reqs.objects[a.request.claim], a.derivation(c)
	return &SelectorError{
		Namespace: object.Namespace, Claim: object.Name, Request: a.resultName(), Attribute: c.attribute, Expression: from.Expression(),
		Driver: p.ID().Driver, Pool: p.ID().Pool, Device: p.Device(device).Name, Err: column.Err(device),
	}
}
