// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package clusterview

import (
	"maps"
	"slices"
	"strings"

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

// counterID names a counter of a pool. Where each node's slices are whole by themselves, so are their sets, and node tells these apart.
type counterID struct {
	generation
	node, set, name string
}

// generation is one of a pool.
type generation struct {
	driver, pool string
	number       int64
}

func generationOf(slice *resourceapi.ResourceSlice) generation {
	return generation{slice.Spec.Driver, slice.Spec.Pool.Name, slice.Spec.Pool.Generation}
}

// counters are those of all pools.
type counters struct {
	of map[counterID]*counter
	// together are the generations that are whole with the slices of all nodes: there a set is for all of them.
	together map[generation]bool
}

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
	all := countersOf(counting)
	if len(all.of) == 0 {
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
				for _, name := range slices.Sorted(maps.Keys(set.Counters)) {
					c, need := all.find(slice, set.CounterSet, name), amount.Of(set.Counters[name].Value)
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

func countersOf(counting []*resourceapi.ResourceSlice) counters {
	all := counters{of: map[counterID]*counter{}, together: map[generation]bool{}}
	slicesOf := map[generation]int64{}
	for _, slice := range counting {
		slicesOf[generationOf(slice)]++
	}
	for _, slice := range counting {
		g := generationOf(slice)
		all.together[g] = slicesOf[g] == slice.Spec.Pool.ResourceSliceCount
	}
	for _, slice := range counting {
		for i := range slice.Spec.SharedCounters {
			set := &slice.Spec.SharedCounters[i]
			for name, c := range set.Counters {
				all.of[all.idOf(slice, set.Name, name)] = &counter{total: amount.Of(c.Value)}
			}
		}
	}
	return all
}

// idOf names a counter of the node of the slice, or of the pool: the node that the pool is called after has the pool's.
func (all *counters) idOf(slice *resourceapi.ResourceSlice, set, name string) counterID {
	id := counterID{generationOf(slice), ptr.Deref(slice.Spec.NodeName, ""), set, name}
	if owner, _, _ := strings.Cut(id.pool, "/"); all.together[id.generation] || id.node == owner {
		id.node = ""
	}
	return id
}

// find returns the counter that a device of the slice consumes of: its node's, else the pool's.
func (all *counters) find(slice *resourceapi.ResourceSlice, set, name string) *counter {
	id := all.idOf(slice, set, name)
	if c := all.of[id]; c != nil {
		return c
	}
	id.node = ""
	return all.of[id]
}

// judge sets what is left for the device, and who has too much of a counter.
func (d *consumed) judge() {
	empty := true
	for i, c := range d.of {
		left := c.total.Sub(c.used)
		empty = empty && !(amount.Amount{}).Less(left)
		switch {
		case d.held && left.IsNegative():
			d.Overdrawn = true
		case !d.held && left.Less(d.needs[i]) && len(c.by) > 0:
			d.Left = TooLittle
		default:
			continue
		}
		d.nameHolders(c)
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
