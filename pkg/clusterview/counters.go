// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterview

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// maxBeside bounds the claims that are named as those that have the counters of a device.
const maxBeside = 8

// Left is what claims on other devices leave of the counters that a device consumes (KEP-4815).
type Left int

const (
	// Enough for it.
	Enough Left = iota
	// TooLittle for it.
	TooLittle
	// Nothing.
	Nothing
)

// counterID names a counter of a pool. The slice of a node may have a set of its own.
type counterID struct{ driver, pool, node, set, name string }

// counter is what there is of one, and who has it.
type counter struct {
	total, used amount.Amount
	by          []*Device
}

// consumed is a device of a slice with the counters that it consumes of.
type consumed struct {
	*Device
	held  bool
	of    []*counter
	needs []amount.Amount
}

// countCounters tells of devices that are not held what others leave of their counters, and of those that are whether there is as much.
func countCounters(counting []*resourceapi.ResourceSlice, of map[*resourceapi.Device]*Device) {
	counters := map[counterID]*counter{}
	for _, slice := range counting {
		for i := range slice.Spec.SharedCounters {
			set := &slice.Spec.SharedCounters[i]
			for name, c := range set.Counters {
				counters[counterOf(slice, set.Name, name)] = &counter{total: amount.Of(c.Value)}
			}
		}
	}
	if len(counters) == 0 {
		return
	}
	var consumers []consumed
	for _, slice := range counting {
		for i := range slice.Spec.Devices {
			object := &slice.Spec.Devices[i]
			d := consumed{Device: of[object]}
			if len(object.ConsumesCounters) == 0 || d.Device == nil { // of two of one name the second one does not count
				continue
			}
			d.held = slices.ContainsFunc(d.Holders, func(h Holder) bool { return !h.Admin })
			for k := range object.ConsumesCounters {
				set := &object.ConsumesCounters[k]
				for name, needs := range set.Counters {
					c, need := counters[counterOf(slice, set.CounterSet, name)], amount.Of(needs.Value)
					if c == nil || !(amount.Amount{}).Less(need) {
						continue
					}
					if d.of, d.needs = append(d.of, c), append(d.needs, need); d.held {
						c.used, c.by = c.used.Add(need), append(c.by, d.Device)
					}
				}
			}
			consumers = append(consumers, d)
		}
	}
	for i := range consumers {
		consumers[i].judge()
	}
}

func counterOf(slice *resourceapi.ResourceSlice, set, name string) counterID {
	return counterID{slice.Spec.Driver, slice.Spec.Pool.Name, ptr.Deref(slice.Spec.NodeName, ""), set, name}
}

// judge sets what is left for the device, and who has the rest.
func (d *consumed) judge() {
	empty := true
	for i, c := range d.of {
		left := c.total.Sub(c.used)
		switch {
		case d.held:
			d.Overdrawn = d.Overdrawn || left.IsNegative()
		case left.Less(d.needs[i]) && len(c.by) > 0:
			d.Left = TooLittle
		}
		empty = empty && !(amount.Amount{}).Less(left)
		if d.Overdrawn || d.Left != Enough {
			d.nameHolders(c)
		}
	}
	if d.Left == TooLittle && empty {
		d.Left = Nothing
	}
}

// nameHolders adds the claims of the other devices that consume of a counter.
func (d *consumed) nameHolders(c *counter) {
	for _, other := range c.by {
		for _, h := range other.Holders {
			h.Device = other.ID.Device
			if len(d.Beside) == maxBeside {
				return
			}
			if other != d.Device && !h.Admin && !slices.ContainsFunc(d.Beside, func(b Holder) bool {
				return b.Namespace == h.Namespace && b.Claim == h.Claim && b.Device == h.Device
			}) {
				d.Beside = append(d.Beside, h)
			}
		}
	}
}
