// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
)

// Consumers returns the names of the devices that take something of the counter, by index in All, while they are held, in order. Read only.
func (c *Counters) Consumers(counter int) []string {
	c.consumersOnce.Do(func() {
		c.consumers = make([][]string, len(c.All))
		for name, uses := range c.byName {
			for _, use := range uses {
				c.consumers[use.Counter] = append(c.consumers[use.Counter], name)
			}
		}
		for _, names := range c.consumers {
			slices.SortFunc(names, strings.Compare)
		}
	})
	return c.consumers[counter]
}

// Offer is a device in the slice that has it.
type Offer struct {
	*resourceapi.Device
	Slice *Slice
}

// Node is the node for which the device is by the name in its slice, empty if its slice names none.
func (o Offer) Node() string { return nodeOf(o.Slice) }

// Devices returns the devices with the name, whichever nodes they are for. There is one, or none, or several if slices
// for different nodes each have one, which all others count as one. Read only.
func (p *Pool) Devices(name string) []Offer {
	p.devicesOnce.Do(func() {
		p.devices = make(map[string][]Offer)
		for _, s := range p.slices {
			if s.holdsCounters() {
				continue
			}
			for i := range s.Object.Spec.Devices {
				device := &s.Object.Spec.Devices[i]
				p.devices[device.Name] = append(p.devices[device.Name], Offer{device, s})
			}
		}
	})
	return p.devices[name]
}

// UsesOf returns what a device of the pool, which has counters, takes of them, each counter once. Read only.
func (p *Pool) UsesOf(o Offer) []Use {
	if p.isDuplicate(o.Name) {
		return p.Counters.usesOf(o.Slice, o.Device)
	}
	return p.Counters.Uses(o.Name)
}

// MembershipsOf returns the compatibility groups of a device of the pool, one for each of its consumptions; nil if the pool has no groups.
func (p *Pool) MembershipsOf(o Offer) []Membership { return p.Counters.memberships(o.Slice, o.Device) }

// SetOf is the number of a counter's set, if the pool has groups.
func (c *Counters) SetOf(counter int) int {
	number, _ := slices.BinarySearchFunc(c.sets, setKey{c.All[counter].Set, c.All[counter].Node}, setKey.compare)
	return number
}

// SetName is the name of the counter set with the number that a Membership has.
func (c *Counters) SetName(set int) string { return c.sets[set].set }

// Members returns the names of the devices that are in a counter set, in order, if the pool has groups.
func (c *Counters) Members(set int) []string {
	var names []string
	for counter := range c.All {
		if c.SetOf(counter) == set {
			names = append(names, c.Consumers(counter)...)
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// CommonGroups are the compatibility groups that all devices in use have in one counter set (KEP-5963). Devices go together if they all
// share a group, or if none of them has any. The zero value is that of a set of which no device is in use.
type CommonGroups struct {
	used   bool
	bare   bool // none has groups
	groups []string
}

// Add enters a device. Once some devices exclude each other, nothing goes with them.
func (c *CommonGroups) Add(groups []string) {
	if !c.used {
		c.used, c.bare, c.groups = true, len(groups) == 0, slices.Clone(groups)
		return
	}
	c.bare = c.bare && len(groups) == 0
	c.groups = slices.DeleteFunc(c.groups, func(group string) bool { return !slices.Contains(groups, group) })
}

// Admits tells whether a device with these groups goes with those in use.
func (c *CommonGroups) Admits(groups []string) bool {
	if !c.used {
		return true
	}
	if len(groups) == 0 {
		return c.bare
	}
	return slices.ContainsFunc(groups, func(group string) bool { return slices.Contains(c.groups, group) })
}

// Excluded tells whether devices are in use that do not go together.
func (c *CommonGroups) Excluded() bool { return c.used && !c.bare && len(c.groups) == 0 }
