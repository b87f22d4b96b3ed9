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
func (b *bench) checkPool(id usage.PoolID) tracker.Verdict {
	pool := b.poolOf(id)
	consumers, unknown := b.consumers(id, pool)
	if len(consumers)+len(unknown) == 0 {
		return fits
	}
	t := newTab(pool)
	// stranger has a device of which we do not know what it takes, or whether one
	// of the claim's takes the same.
	var stranger *usage.Holder
	for name, device := range b.Usage.Pool(id).All() {
		held := usage.DeviceID{Driver: id.Driver, Pool: id.Pool, Device: name}
		holds := b.before(held, device)
		if len(holds) == 0 {
			continue
		}
		known := pool != nil && len(pool.Devices(name)) > 0
		if takes := t.take(name, holds[0].Claim); !known || takes && len(unknown) > 0 {
			if other := b.unforeseen(held, holds); other != nil {
				stranger = other
			}
		}
	}
	for _, device := range consumers {
		if counter, other := t.lacks(device.Device); counter != "" {
			return tracker.Verdict{Outcome: tracker.Lost, Device: device, Other: other, Detail: "too little is left of " + counter}
		}
		t.take(device.Device, usage.ClaimRef{})
	}
	if stranger != nil {
		return tracker.Verdict{
			Outcome: tracker.Undecided, Device: slices.Concat(unknown, consumers)[0], Other: stranger.Claim,
			Detail: fmt.Sprintf("it is not known what devices of pool %s take of shared counters", id),
		}
	}
	return fits
}

// consumers returns the claim's devices in a pool that take something of its
// counters, and those that may, because the pool does not have them or is not
// known. A device that is shared already takes nothing more.
func (b *bench) consumers(id usage.PoolID, pool *inventory.Pool) (consumers, unknown []usage.DeviceID) {
	for _, w := range b.wants {
		switch {
		case w.device.PoolID() != id || len(b.before(w.device, b.Usage.Device(w.device))) > 0:
		case pool == nil || len(pool.Devices(w.device.Device)) == 0:
			unknown = append(unknown, w.device)
		case pool.Counters != nil && len(pool.Counters.Uses(w.device.Device)) > 0:
			consumers = append(consumers, w.device)
		}
	}
	return consumers, unknown
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

// take subtracts what a device takes, for another claim or, if that is empty, the
// claim itself, and tells whether that is anything.
func (t *tab) take(device string, other usage.ClaimRef) bool {
	if t.counters == nil {
		return false
	}
	uses := t.counters.Uses(device)
	for _, use := range uses {
		t.left[use.Counter] = t.left[use.Counter].Sub(use.Amount)
		if other.UID != "" {
			t.others[use.Counter] = other
		}
	}
	return len(uses) > 0
}

// lacks returns a counter of which another claim has left too little for a device.
func (t *tab) lacks(device string) (counter string, other usage.ClaimRef) {
	for _, use := range t.counters.Uses(device) {
		if other = t.others[use.Counter]; other.UID != "" && t.left[use.Counter].Less(use.Amount) {
			c := t.counters.All[use.Counter]
			return fmt.Sprintf("counter %s of set %s", c.Name, c.Set), other
		}
	}
	return "", usage.ClaimRef{}
}
