package allocator

import (
	"slices"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// groupState is what the devices in use leave of one counter set's compatibility groups (KEP-5963): devices that consume
// its counters can be in use together if they all have a group in common there, or if none has any.
type groupState struct {
	// used tells that some device is in use; bare that the first of those has no groups.
	used, bare bool
	// common are the groups that all devices in use have. Read only.
	common []string
}

// admits tells whether a device with these groups can be in use, too.
func (g *groupState) admits(groups []string) bool {
	switch {
	case !g.used:
		return true
	case g.bare || len(groups) == 0:
		return g.bare && len(groups) == 0
	}
	return slices.ContainsFunc(groups, func(group string) bool { return slices.Contains(g.common, group) })
}

// with returns the state after such a device. Where devices are in use together that should not be, it depends on their
// order, as it does upstream.
func (g groupState) with(groups []string) groupState {
	switch {
	case !g.used:
		return groupState{used: true, bare: len(groups) == 0, common: groups}
	case g.bare || len(groups) == 0:
		return g
	}
	common := make([]string, 0, len(g.common))
	for _, group := range g.common {
		if slices.Contains(groups, group) {
			common = append(common, group)
		}
	}
	g.common = common
	return g
}

// groupsLeft is what holders leave of the groups of the pool's counter sets; nil if there are no groups.
func groupsLeft(p *inventory.NodePool, in *usage.Pool) []groupState {
	if !p.Pool.Counters.HasGroups() {
		return nil
	}
	states := make([]groupState, p.Pool.Counters.Sets())
	for name, memberships := range p.AllMemberships() {
		if in.Device(name) == nil {
			continue
		}
		for _, m := range memberships {
			states[m.Set] = states[m.Set].with(m.Groups)
		}
	}
	return states
}

// groupsAdmit tells whether a device with these memberships can be in use, too.
func groupsAdmit(states []groupState, memberships []inventory.Membership) bool {
	for i, m := range memberships {
		state := states[m.Set]
		for _, before := range memberships[:i] { // the API permits one for each counter set
			if before.Set == m.Set {
				state = state.with(before.Groups)
			}
		}
		if !state.admits(m.Groups) {
			return false
		}
	}
	return true
}

// formerGroup is a state to go back to.
type formerGroup struct {
	index int // in ledger.groups
	state groupState
}

// groupsOf are the states of the counter sets of the device's pool; nil if no pool of the node has groups.
func (l *ledger) groupsOf(device int) []groupState {
	if len(l.groups) == 0 {
		return nil
	}
	return l.groups[l.firstGroup[l.poolOf(device)]:]
}

// admitsGroups tells whether the device's groups allow it to be picked.
func (l *ledger) admitsGroups(device int) bool {
	states := l.groupsOf(device)
	return states == nil || groupsAdmit(states, l.membershipsOf(device))
}

// joinGroups puts the device into its groups, which leaveGroups takes back, the last one first.
func (l *ledger) joinGroups(device int) {
	if len(l.groups) == 0 {
		return
	}
	first := l.firstGroup[l.poolOf(device)]
	for _, m := range l.membershipsOf(device) {
		state := &l.groups[first+m.Set]
		l.former = append(l.former, formerGroup{first + m.Set, *state})
		*state = state.with(m.Groups)
	}
}

func (l *ledger) leaveGroups(device int) {
	if len(l.groups) == 0 {
		return
	}
	for range l.membershipsOf(device) {
		last := l.former[len(l.former)-1]
		l.former = l.former[:len(l.former)-1]
		l.groups[last.index] = last.state
	}
}
