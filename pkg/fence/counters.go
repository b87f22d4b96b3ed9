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
		}
	}
	return unclear
}

// checkPool adds up the counters of one pool.
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
	ours, unknown := b.wantedOf(id, pool)
	t := newTab(pool)
	// stranger has a device of which we do not know what it takes, or whether one
	// of the claim's takes the same.
	var stranger *usage.Holder
	for name, device := range b.Usage.Pool(id).All() {
		held := usage.DeviceID{Driver: id.Driver, Pool: id.Pool, Device: name}
		known := pool != nil && len(pool.Devices(name)) > 0
		if b.isWanted(held) || known && t.counters == nil && len(unknown) == 0 {
			continue // takes nothing, or what the claim takes
		}
		holds := b.before(held, device)
		if len(holds) == 0 {
			continue
		}
		t.take(name, holds[0].Claim)
		if !known || len(unknown) > 0 {
			if other := b.unforeseen(held, holds); other != nil {
				stranger = other
			}
		}
	}
	for _, device := range ours {
		if counter, other := t.lacks(device.Device); counter != "" {
			return tracker.Verdict{Outcome: tracker.Lost, Device: device, Other: other, Detail: "too little is left of " + counter}
		}
		t.take(device.Device, usage.ClaimRef{})
	}
	if stranger != nil {
		return tracker.Verdict{
			Outcome: tracker.Undecided, Device: slices.Concat(unknown, ours)[0], Other: stranger.Claim,
			Detail: fmt.Sprintf("it is not known what devices of pool %s take of shared counters", id),
		}
	}
	return fits
}

// wantedOf returns the claim's devices in a pool, apart from those that the pool
// does not have, or that are not known because it is not.
func (b *bench) wantedOf(id usage.PoolID, pool *inventory.Pool) (ours, unknown []usage.DeviceID) {
	for _, w := range b.wants {
		switch {
		case w.device.PoolID() != id:
		case pool == nil || len(pool.Devices(w.device.Device)) == 0:
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

// tab is what is left of the counters of a pool, and who else took something of each.
type tab struct {
	counters *inventory.Counters // nil if there are none, or none are known
	left     []amount.Amount
	others   []usage.ClaimRef
}

func newTab(pool *inventory.Pool) *tab {
	if pool == nil || pool.Counters == nil {
		return &tab{}
	}
	t := &tab{counters: pool.Counters, others: make([]usage.ClaimRef, len(pool.Counters.All))}
	for _, counter := range pool.Counters.All {
		t.left = append(t.left, counter.Total)
	}
	return t
}

// uses is what a device takes, nothing if that is not known.
func (t *tab) uses(device string) []inventory.Use {
	if t.counters == nil {
		return nil
	}
	return t.counters.Uses(device)
}

// take subtracts what a device takes, for another claim or, if that is empty, the
// claim itself.
func (t *tab) take(device string, other usage.ClaimRef) {
	for _, use := range t.uses(device) {
		t.left[use.Counter] = t.left[use.Counter].Sub(use.Amount)
		if other.UID != "" {
			t.others[use.Counter] = other
		}
	}
}

// lacks returns a counter of which another claim has left too little for a device.
func (t *tab) lacks(device string) (counter string, other usage.ClaimRef) {
	for _, use := range t.uses(device) {
		if other = t.others[use.Counter]; other.UID != "" && t.left[use.Counter].Less(use.Amount) {
			c := t.counters.All[use.Counter]
			return fmt.Sprintf("counter %s of set %s", c.Name, c.Set), other
		}
	}
	return "", usage.ClaimRef{}
}
