// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package counters says what is left of what devices share, and whether that is enough.
package counters

import (
	"slices"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/usage"
)

// GroupState is what the devices in use leave of one counter set's compatibility groups (KEP-5963): devices that consume
// its counters can be in use together if they all have a group in common there, or if none has any.
type GroupState struct {
	// Used tells that some device is in use; Bare that the first of those has no groups.
	Used, Bare bool
	// Common are the groups that all devices in use have. Read only.
	Common []string
}

// Admits tells whether a device with these groups can be in use, too.
func (g *GroupState) Admits(groups []string) bool {
	switch {
	case !g.Used:
		return true
	case g.Bare || len(groups) == 0:
		return g.Bare && len(groups) == 0
	}
	return slices.ContainsFunc(groups, func(group string) bool { return slices.Contains(g.Common, group) })
}

// With returns the state after such a device. Where devices are in use together that should not be, it depends on their
// order, as it does upstream.
func (g GroupState) With(groups []string) GroupState {
	switch {
	case !g.Used:
		return GroupState{Used: true, Bare: len(groups) == 0, Common: groups}
	case g.Bare || len(groups) == 0:
		return g
	}
	g.Common = slices.DeleteFunc(slices.Clone(g.Common), func(group string) bool { return !slices.Contains(groups, group) })
	return g
}

// GroupsLeft is what holders leave of the groups of the pool's counter sets; nil if there are no groups.
func GroupsLeft(p *inventory.NodePool, in *usage.Pool) []GroupState {
	if !p.Pool.Counters.HasGroups() {
		return nil
	}
	states := make([]GroupState, p.Pool.Counters.Sets())
	for name, memberships := range p.AllMemberships() {
		if in.Device(name) == nil {
			continue
		}
		for _, m := range memberships {
			states[m.Set] = states[m.Set].With(m.Groups)
		}
	}
	return states
}

// GroupsAdmit tells whether a device with these memberships can be in use, too.
func GroupsAdmit(states []GroupState, memberships []inventory.Membership) bool {
	for i, m := range memberships {
		state := states[m.Set]
		for _, before := range memberships[:i] { // the API permits one for each counter set
			if before.Set == m.Set {
				state = state.With(before.Groups)
			}
		}
		if !state.Admits(m.Groups) {
			return false
		}
	}
	return true
}

// Affords tells whether so much is left.
func Affords(left []amount.Amount, uses []inventory.Use) bool {
	for i := range uses {
		if left[uses[i].Counter].Less(uses[i].Amount) {
			return false
		}
	}
	return true
}

// Covers tells whether what is left of each capacity is enough.
func Covers(left, takes []amount.Amount) bool {
	for i := range takes {
		if left[i].Less(takes[i]) {
			return false
		}
	}
	return true
}
