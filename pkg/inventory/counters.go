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
	// sets are the names of the counter sets, in order; nil if no device has compatibility groups, or if the feature is
	// off. With groups, parts are those of whole counter sets.
	sets     []string
	setParts []int // by counter set: its part

	consumersOnce sync.Once
	consumers     [][]string // by counter: who takes something of it; made when first asked for
}

// Membership says which compatibility groups a device has in one counter set (KEP-5963). A device that consumes
// counters of a set and has no groups there has one without Groups.
type Membership struct {
	Set    int // number of the counter set, by name
	Groups []string
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

// HasGroups tells whether some device has compatibility groups, so that they matter for all that consume counters.
func (c *Counters) HasGroups() bool { return c != nil && c.sets != nil }

// Sets is the number of counter sets, if the pool has groups.
func (c *Counters) Sets() int { return len(c.sets) }

// PartOfSet tells which part of the pool a counter set belongs to, if the pool has groups.
func (c *Counters) PartOfSet(set int) int { return c.setParts[set] }

// findParts connects the counters that one device of the slices consumes; where there are groups, the counter sets.
func (c *Counters) findParts(slicesOfPool []*Slice) {
	if !c.HasGroups() {
		c.parts = connect(len(c.All), func(yield func(a, b int)) {
			for _, uses := range c.byName {
				for _, use := range uses {
					yield(uses[0].Counter, use.Counter)
				}
			}
		})
		return
	}
	c.setParts = connect(len(c.sets), func(yield func(a, b int)) {
		for _, s := range slicesOfPool {
			for i := s.consumers.Next(0); i >= 0 && !s.holdsCounters(); i = s.consumers.Next(i + 1) {
				memberships := c.memberships(&s.Object.Spec.Devices[i])
				for _, m := range memberships {
					yield(memberships[0].Set, m.Set)
				}
			}
		}
	})
	c.parts = make([]int, len(c.All))
	for i, counter := range c.All {
		c.parts[i] = c.setParts[c.set(counter.Set)]
	}
}

// set is the number of the counter set with the name, which is there.
func (c *Counters) set(name string) int {
	number, _ := slices.BinarySearch(c.sets, name)
	return number
}

// memberships are the groups of a device, one for each of its consumptions; nil if the pool has no groups.
func (c *Counters) memberships(device *resourceapi.Device) []Membership {
	if !c.HasGroups() || len(device.ConsumesCounters) == 0 {
		return nil
	}
	out := make([]Membership, 0, len(device.ConsumesCounters))
	for i := range device.ConsumesCounters {
		consumption := &device.ConsumesCounters[i]
		out = append(out, Membership{Set: c.set(consumption.CounterSet), Groups: consumption.CompatibilityGroups})
	}
	return out
}

// connect numbers the parts into which pairs connect the numbers below n: each has the least number of its part.
func connect(n int, pairs func(yield func(a, b int))) []int {
	parts := make([]int, n)
	for i := range parts {
		parts[i] = i
	}
	find := func(i int) int {
		for parts[i] != i {
			i = parts[i]
		}
		return i
	}
	pairs(func(a, b int) {
		a, b = find(a), find(b)
		parts[max(a, b)] = min(a, b)
	})
	for i := range parts {
		parts[i] = find(i)
	}
	return parts
}

// particularsOf is how many devices, counters and uses of counters the slices have: looking at them is most of the work that a pool makes. Of more
// than most it is some number above.
func particularsOf(group []*Slice, most int) int {
	n := 0
	for _, s := range group {
		if n > most {
			break
		}
		n += len(s.Object.Spec.Devices)
		for i := range s.Object.Spec.SharedCounters {
			n += len(s.Object.Spec.SharedCounters[i].Counters)
		}
		for i := s.consumers.Next(0); i >= 0; i = s.consumers.Next(i + 1) {
			for _, consumption := range s.Object.Spec.Devices[i].ConsumesCounters {
				n += len(consumption.Counters)
			}
		}
	}
	return n
}

// newCounters collects the counters of the slices, and says what is wrong with them: each counter set must be there
// once, and whatever devices consume must be there.
func newCounters(slicesOfPool []*Slice, features Features) (counters *Counters, problem string) {
	sets := make(map[string]*resourceapi.CounterSet)
	consumed, grouped := false, false
	for _, s := range slicesOfPool {
		for i := range s.Object.Spec.SharedCounters {
			set := &s.Object.Spec.SharedCounters[i]
			if _, ok := sets[set.Name]; ok {
				return nil, fmt.Sprintf("duplicate counter set name %s", set.Name)
			}
			sets[set.Name] = set
		}
		consumed = consumed || (s.consumers != nil && !s.holdsCounters())
		grouped = grouped || (features.CompatibilityGroups && !s.holdsCounters() && usesCompatibilityGroups(s.Object))
	}
	if !consumed {
		return nil, ""
	}
	c := &Counters{byName: make(map[string][]Use)}
	type key struct{ set, name string }
	index := make(map[key]int)
	names := slices.Sorted(maps.Keys(sets))
	if grouped {
		c.sets = names
	}
	for _, setName := range names {
		for _, name := range slices.Sorted(maps.Keys(sets[setName].Counters)) {
			total := amount.Of(sets[setName].Counters[name].Value)
			if total.IsNegative() {
				return nil, fmt.Sprintf("counter %s of counter set %s is negative", name, setName)
			}
			index[key{setName, name}] = len(c.All)
			c.All = append(c.All, Counter{Set: setName, Name: name, Total: total})
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
					taken := amount.Of(consumption.Counters[name].Value)
					if taken.IsNegative() {
						return nil, fmt.Sprintf("device %s consumes a negative amount of counter %s of counter set %s", device.Name, name, set.Name)
					}
					uses = addUse(uses, index[key{set.Name, name}], taken)
				}
			}
			slices.SortFunc(uses, func(a, b Use) int { return a.Counter - b.Counter })
			c.byName[device.Name] = uses
		}
	}
	c.findParts(slicesOfPool)
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
	return slices.Equal(c.All, o.All) && maps.EqualFunc(c.byName, o.byName, slices.Equal[[]Use]) &&
		slices.Equal(c.sets, o.sets) && slices.Equal(c.setParts, o.setParts)
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
