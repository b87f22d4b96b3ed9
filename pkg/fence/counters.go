// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"fmt"
	"slices"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// checkCounters adds up what the held devices of each pool take of its counters.
func (b *bench) checkCounters() tracker.Verdict {
	unclear := fits
	for i, w := range b.wants {
		pool := w.device.PoolID()
		if slices.ContainsFunc(b.wants[:i], func(before want) bool { return before.device.PoolID() == pool }) {
			continue // checked with that one
		}
		switch verdict := b.checkPool(pool); verdict.Outcome {
		case tracker.Lost:
			return verdict
		case tracker.Undecided:
			unclear = verdict
		case tracker.Fits:
		}
	}
	return unclear
}

// checkPool adds up the counters of one pool that the claim's devices take of, and
// sees whether their compatibility groups go with those of what is held.
//
// Devices that the pool does not have tell that it is known as it was, or as it
// will be: what it says of the others may be outdated, too. A driver that begins
// to offer a GPU in parts gives the whole GPU, under its old name, counters that it
// had none of before.
//
// A device that is shared already takes nothing more. It counts for the claim
// nevertheless, and not for the others: were it theirs, the claim would fit only as
// long as they have it, and they may be about to give way.
func (b *bench) checkPool(id usage.PoolID) tracker.Verdict {
	pool := b.poolOf(id)
	ours, unknown := b.wantedOf(id)
	t := b.newTab(pool, ours)
	b.takeOthers(id, t)
	for _, device := range ours {
		devices := b.devicesOf(device)
		if lacking, other := t.lacks(devices); lacking != "" {
			return tracker.Verdict{Outcome: tracker.Lost, Device: device, Other: other, Detail: lacking}
		}
		t.take(devices, usage.ClaimRef{})
	}
	if stranger := b.stranger(id, pool, len(unknown) > 0); stranger != nil {
		return tracker.Verdict{
			Outcome: tracker.Undecided, Device: slices.Concat(unknown, ours)[0], Other: stranger.Claim,
			Detail: fmt.Sprintf("it is not known what devices of pool %s take of shared counters", id),
		}
	}
	return fits
}

// takeOthers enters the devices that others hold of those that take of the tab's
// counters. Devices of the claim are not among them.
func (b *bench) takeOthers(id usage.PoolID, t *tab) {
	in := b.Usage.Pool(id)
	for _, name := range t.consumers() {
		device := usage.DeviceID{Driver: id.Driver, Pool: id.Pool, Device: name}
		if holds := b.before(device, in.Device(name)); len(holds) > 0 && !b.isWanted(device) {
			t.take(t.pool.Devices(name), holds[0].Claim)
		}
	}
}

// stranger returns a holder that was not there when the claim was decided, of a
// device of which we do not know what it takes; or of any device if we do not know
// that of one of the claim's. It is nil if there is none.
func (b *bench) stranger(id usage.PoolID, pool *inventory.Pool, any bool) *usage.Holder {
	in := b.Usage.Pool(id)
	names := b.held(in)
	if !any {
		names = slices.Values(b.strangersIn(id, pool))
	}
	for name := range names {
		device := usage.DeviceID{Driver: id.Driver, Pool: id.Pool, Device: name}
		if b.isWanted(device) {
			continue
		}
		if other := b.unforeseen(device, b.before(device, in.Device(name))); other != nil {
			return other
		}
	}
	return nil
}

// wantedOf returns the claim's devices in a pool, apart from those that are not
// known.
func (b *bench) wantedOf(id usage.PoolID) (ours, unknown []usage.DeviceID) {
	for _, w := range b.wants {
		switch {
		case w.device.PoolID() != id:
		case len(b.devicesOf(w.device)) == 0:
			unknown = append(unknown, w.device)
		default:
			ours = append(ours, w.device)
		}
	}
	return ours, unknown
}

func (b *bench) isWanted(device usage.DeviceID) bool {
	return slices.ContainsFunc(b.wants, func(w want) bool { return w.device == device })
}

// tab is what is left of the counters that the claim's devices take of, and which
// compatibility groups are left in their counter sets.
type tab struct {
	pool  *inventory.Pool // nil if it is not known, or has no counters
	lines map[int]*line   // by counter
	sets  map[int]*common // by counter set
}

// line is what is left of a counter, and a claim of others that took of it.
type line struct {
	left  amount.Amount
	other usage.ClaimRef
}

// common is what all devices in use have in common in a counter set, and a claim of
// others that has one of them.
type common struct {
	inventory.CommonGroups
	other usage.ClaimRef
}

func (b *bench) newTab(pool *inventory.Pool, ours []usage.DeviceID) *tab {
	t := &tab{lines: map[int]*line{}, sets: map[int]*common{}}
	if pool == nil || pool.Counters == nil {
		return t
	}
	t.pool = pool
	for _, id := range ours {
		for _, device := range b.devicesOf(id) {
			for _, use := range pool.UsesOf(device) {
				t.lines[use.Counter] = &line{left: pool.Counters.All[use.Counter].Total}
			}
			for _, m := range pool.MembershipsOf(device) {
				t.sets[m.Set] = &common{}
			}
		}
	}
	return t
}

// consumers are the devices that take of the counters or, where groups matter, are
// in one of the counter sets, by name.
func (t *tab) consumers() []string {
	var names []string
	for counter := range t.lines {
		names = append(names, t.pool.Counters.Consumers(counter)...)
	}
	for set := range t.sets {
		names = append(names, t.pool.Counters.Members(set)...)
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// take enters what a device takes, for another claim or, if that is empty, the
// claim itself. Where the device may be several, it is what they take together.
func (t *tab) take(devices []inventory.Offer, other usage.ClaimRef) {
	if t.pool == nil {
		return
	}
	for _, device := range devices {
		for _, use := range t.pool.UsesOf(device) {
			if line := t.lines[use.Counter]; line != nil {
				line.left = line.left.Sub(use.Amount)
				if other.UID != "" {
					line.other = other
				}
			}
		}
		for _, m := range t.pool.MembershipsOf(device) {
			if set := t.sets[m.Set]; set != nil {
				set.Add(m.Groups)
				if other.UID != "" {
					set.other = other
				}
			}
		}
	}
}

// lacks says what another claim has left too little of for a device, "" if there is
// enough of all for one that it may be.
func (t *tab) lacks(devices []inventory.Offer) (what string, other usage.ClaimRef) {
	if t.pool == nil {
		return "", usage.ClaimRef{}
	}
	for _, device := range devices {
		if what, other = t.lacksFor(device); what == "" {
			break
		}
	}
	return what, other
}

func (t *tab) lacksFor(device inventory.Offer) (what string, other usage.ClaimRef) {
	for _, use := range t.pool.UsesOf(device) {
		if line := t.lines[use.Counter]; line.other.UID != "" && line.left.Less(use.Amount) {
			c := t.pool.Counters.All[use.Counter]
			return fmt.Sprintf("too little is left of counter %s of set %s", c.Name, c.Set), line.other
		}
	}
	for _, m := range t.pool.MembershipsOf(device) {
		if set := t.sets[m.Set]; set.other.UID != "" && !set.Admits(m.Groups) {
			return fmt.Sprintf("its compatibility groups in counter set %s do not go with those of what is held",
				t.pool.Counters.SetName(m.Set)), set.other
		}
	}
	return "", usage.ClaimRef{}
}
