package inventory

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// Counters are the shared counters of one pool (KEP-4815): how much there is of each, and what each device of
// the pool takes while it is held. Counter sets are for the whole pool, whichever nodes its slices are for.
// Immutable. Pools that are alike share one.
type Counters struct {
	// All are the counters, by set and name.
	All []Counter

	byName map[string][]Use // device name → what all devices with this name take
	parts  []int            // by counter: its part
}

// Counter is one counter of a counter set.
type Counter struct {
	Set, Name string
	// Total is how much there is of it when no device is held.
	Total amount.Amount
}

// Use is what a device takes of one counter.
type Use struct {
	Counter int // index in Counters.All
	Amount  amount.Amount
}

// Uses returns what the device with the name takes, nil if nothing, in the order of the counters. Read only.
func (c *Counters) Uses(device string) []Use { return c.byName[device] }

// PartOf tells which part of the pool the use belongs to: counters of different parts are never consumed by one
// device, and so devices of different parts have nothing to do with each other's counters.
func (c *Counters) PartOf(use Use) int { return c.parts[use.Counter] }

// findParts connects the counters that one device consumes.
func (c *Counters) findParts() {
	c.parts = make([]int, len(c.All))
	for i := range c.parts {
		c.parts[i] = i
	}
	find := func(counter int) int {
		for c.parts[counter] != counter {
			counter = c.parts[counter]
		}
		return counter
	}
	for _, uses := range c.byName {
		for _, use := range uses {
			a, b := find(use.Counter), find(uses[0].Counter)
			c.parts[max(a, b)] = min(a, b)
		}
	}
	for i := range c.parts {
		c.parts[i] = find(i)
	}
}

// newCounters collects the counters of the slices, and says what is wrong with them: each counter set must be there
// once, and whatever devices consume must be there.
func newCounters(slicesOfPool []*Slice) (counters *Counters, problem string) {
	sets := make(map[string]*resourceapi.CounterSet)
	consumed := false
	for _, s := range slicesOfPool {
		for i := range s.Object.Spec.SharedCounters {
			set := &s.Object.Spec.SharedCounters[i]
			if _, ok := sets[set.Name]; ok {
				return nil, fmt.Sprintf("duplicate counter set name %s", set.Name)
			}
			sets[set.Name] = set
		}
		consumed = consumed || (s.consumers != nil && !s.holdsCounters())
	}
	if !consumed {
		return nil, ""
	}
	c := &Counters{byName: make(map[string][]Use)}
	type key struct{ set, name string }
	index := make(map[key]int)
	for _, setName := range slices.Sorted(maps.Keys(sets)) {
		for _, name := range slices.Sorted(maps.Keys(sets[setName].Counters)) {
			index[key{setName, name}] = len(c.All)
			c.All = append(c.All, Counter{Set: setName, Name: name, Total: amount.Of(sets[setName].Counters[name].Value)})
		}
	}
	for _, s := range slicesOfPool {
		if s.holdsCounters() {
			continue
		}
		for i := s.consumers.Next(0); i >= 0; i = s.consumers.Next(i + 1) {
			device := &s.Object.Spec.Devices[i]
			uses := c.byName[device.Name]
			for _, consumption := range device.ConsumesCounters {
				set, ok := sets[consumption.CounterSet]
				if !ok {
					return nil, fmt.Sprintf("device %s consumes from counter set %s, which does not exist", device.Name, consumption.CounterSet)
				}
				for _, name := range slices.Sorted(maps.Keys(consumption.Counters)) {
					if _, ok := set.Counters[name]; !ok {
						return nil, fmt.Sprintf("device %s consumes counter %s, which counter set %s does not have", device.Name, name, set.Name)
					}
					uses = addUse(uses, index[key{set.Name, name}], amount.Of(consumption.Counters[name].Value))
				}
			}
			slices.SortFunc(uses, func(a, b Use) int { return a.Counter - b.Counter })
			c.byName[device.Name] = uses
		}
	}
	c.findParts()
	return c, ""
}

// usesOf is what the device takes, where others have the same name.
func (c *Counters) usesOf(device *resourceapi.Device) []Use {
	var uses []Use
	for _, consumption := range device.ConsumesCounters {
		for i, counter := range c.All {
			if value, ok := consumption.Counters[counter.Name]; ok && counter.Set == consumption.CounterSet {
				uses = addUse(uses, i, amount.Of(value.Value))
			}
		}
	}
	slices.SortFunc(uses, func(a, b Use) int { return a.Counter - b.Counter })
	return uses
}

func addUse(uses []Use, counter int, taken amount.Amount) []Use {
	for i := range uses {
		if uses[i].Counter == counter {
			uses[i].Amount = uses[i].Amount.Add(taken)
			return uses
		}
	}
	return append(uses, Use{Counter: counter, Amount: taken})
}

func (c *Counters) equal(o *Counters) bool {
	return slices.Equal(c.All, o.All) && maps.EqualFunc(c.byName, o.byName, slices.Equal[[]Use])
}

// counterTables keeps the counters seen last, so that the pools of equal nodes share them.
type counterTables struct {
	mu     sync.Mutex
	recent []*Counters // the one used last first
}

// maxTables is how many different kinds of pools with counters are recognized at a time.
const maxTables = 16

// shared returns counters equal to c, which are c itself if they are new.
func (t *counterTables) shared(c *Counters) *Counters {
	t.mu.Lock()
	defer t.mu.Unlock()
	at := slices.IndexFunc(t.recent, c.equal)
	if at >= 0 {
		c = t.recent[at]
		t.recent = slices.Delete(t.recent, at, at+1)
	} else if len(t.recent) == maxTables {
		t.recent = t.recent[:maxTables-1]
	}
	t.recent = slices.Insert(t.recent, 0, c)
	return c
}
