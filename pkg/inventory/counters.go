// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// Counters are the shared counters of one pool (KEP-4815): how much there is of each, and what each device of
// the pool takes while it is held. Counter sets are for the whole pool, whichever nodes its slices are for. But where each
// node's slices are whole by themselves, so are their sets: those of other nodes are not meant. Immutable. Pools that are
// alike share one.
type Counters struct {
	// All are the counters, by set and name.
	All []Counter

	byName map[string][]Use // device name → what all devices with this name take
	parts  []int            // by counter: its part
	// sets are the counter sets, in order; nil if no device has compatibility groups, or if the feature is
	// off. With groups, parts are those of whole counter sets.
	sets     []setKey
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
	// Node is whose slices the set is for, where it is not for the whole pool.
	Node      string
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
				memberships := c.memberships(s, &s.Object.Spec.Devices[i])
				for _, m := range memberships {
					yield(memberships[0].Set, m.Set)
				}
			}
		}
	})
	c.parts = make([]int, len(c.All))
	for i := range c.All {
		c.parts[i] = c.setParts[c.SetOf(i)]
	}
}

// setKey names a counter set of a pool.
type setKey struct {
	set  string
	node string // whose slices it is for; empty if it is for the whole pool
}

func (k setKey) compare(o setKey) int {
	return cmp.Or(cmp.Compare(k.set, o.set), cmp.Compare(k.node, o.node))
}

// set is the number of the counter set that devices of the slice mean by the name, which is there.
func (c *Counters) set(s *Slice, name string) int {
	number, found := slices.BinarySearchFunc(c.sets, setKey{name, nodeOf(s)}, setKey.compare)
	if !found {
		number, _ = slices.BinarySearchFunc(c.sets, setKey{set: name}, setKey.compare)
	}
	return number
}

// memberships are the groups of a device of the slice, one for each of its consumptions; nil if the pool has no groups.
func (c *Counters) memberships(s *Slice, device *resourceapi.Device) []Membership {
	if !c.HasGroups() || len(device.ConsumesCounters) == 0 {
		return nil
	}
	out := make([]Membership, 0, len(device.ConsumesCounters))
	for i := range device.ConsumesCounters {
		consumption := &device.ConsumesCounters[i]
		out = append(out, Membership{Set: c.set(s, consumption.CounterSet), Groups: consumption.CompatibilityGroups})
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
			parts[i] = parts[parts[i]] // so that the way is shorter the next time
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

// particularsOf is how many devices, counters and uses of counters the slices have: looking at them is most of the work that a pool makes.
// Of more than most it is some number above.
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
// once, and whatever devices consume must be there. Apart tells that each node's slices have sets of their own, beside those of the pool.
func newCounters(slicesOfPool []*Slice, features Features, apart bool) (counters *Counters, problem string) {
	held, consumed, grouped := false, false, false
	for _, s := range slicesOfPool {
		held = held || s.holdsCounters()
		consumed = consumed || (s.consumers != nil && !s.holdsCounters())
		grouped = grouped || (features.CompatibilityGroups && !s.holdsCounters() && usesCompatibilityGroups(s.Object))
	}
	if !held && !consumed {
		return nil, ""
	}
	sets := setsOf(slicesOfPool, apart)
	for _, node := range slices.Sorted(maps.Keys(sets.duplicates)) {
		return nil, sets.duplicates[node]
	}
	if !consumed {
		return nil, ""
	}
	c := &Counters{byName: make(map[string][]Use)}
	keys := slices.SortedFunc(maps.Keys(sets.all), setKey.compare)
	if grouped {
		c.sets = keys
	}
	for _, key := range keys {
		if problem := sets.all[key].learn(len(c.All), func(counter Counter) {
			counter.Node = key.node
			c.All = append(c.All, counter)
		}); problem != "" {
			return nil, problem
		}
	}
	for _, s := range slicesOfPool {
		if s.holdsCounters() {
			continue
		}
		for i := s.consumers.Next(0); i >= 0; i = s.consumers.Next(i + 1) {
			device := &s.Object.Spec.Devices[i]
			uses, problem := sets.usesOf(s, device)
			if problem != "" {
				return nil, problem
			}
			c.byName[device.Name] = append(c.byName[device.Name], uses...)
		}
	}
	for name, uses := range c.byName { // once, of however many devices with the name
		c.byName[name] = joined(uses)
	}
	c.findParts(slicesOfPool)
	return c, ""
}

// counterSets are the counter sets of slices.
type counterSets struct {
	all   map[setKey]*indexedSet
	apart bool // each node's slices have their own
	// duplicates say that there are two of a name, by the node of the slice that has the other one.
	duplicates map[string]string
}

type indexedSet struct {
	*resourceapi.CounterSet
	index map[string]int // of the counters, in Counters.All
	node  string         // for which the set's slice is, see nodeOf; empty also if the pool is called after it
}

// learn numbers the counters by name, beginning with first, and says which is wrong.
func (set *indexedSet) learn(first int, add func(Counter)) (problem string) {
	for i, name := range slices.Sorted(maps.Keys(set.Counters)) {
		total := amount.Of(set.Counters[name].Value)
		if total.IsNegative() {
			return fmt.Sprintf("counter %s of counter set %s is negative", name, set.Name)
		}
		set.index[name] = first + i
		add(Counter{Set: set.Name, Name: name, Total: total})
	}
	return ""
}

func setsOf(slicesOfPool []*Slice, apart bool) *counterSets {
	sets := &counterSets{all: make(map[setKey]*indexedSet), apart: apart, duplicates: make(map[string]string)}
	add := func(s *Slice) {
		for i := range s.Object.Spec.SharedCounters {
			set := &s.Object.Spec.SharedCounters[i]
			if sets.of(s, set.Name) != nil {
				sets.duplicates[nodeOf(s)] = cmp.Or(sets.duplicates[nodeOf(s)], "duplicate counter set name "+set.Name)
				continue
			}
			node := nodeOf(s)
			if node == ownerOf(poolOf(s.Object)) {
				node = ""
			}
			sets.all[sets.keyFor(s, set.Name)] = &indexedSet{set, make(map[string]int, len(set.Counters)), node}
		}
	}
	for _, first := range []bool{true, false} { // what is wrong is so with the others
		for _, s := range slicesOfPool {
			if first == (sets.keyFor(s, "").node == "") {
				add(s)
			}
		}
	}
	return sets
}

// problemsOfCounters says what is wrong with the counters that the slices of each node have and consume.
func problemsOfCounters(slicesOfPool []*Slice, apart bool) map[string]string {
	sets := setsOf(slicesOfPool, apart)
	problems := sets.duplicates
	for _, key := range slices.SortedFunc(maps.Keys(sets.all), setKey.compare) {
		if problem := sets.all[key].learn(0, func(Counter) {}); problem != "" && problems[key.node] == "" {
			problems[key.node] = problem
		}
	}
	for _, s := range slicesOfPool {
		for i := s.consumers.Next(0); i >= 0 && !s.holdsCounters() && problems[nodeOf(s)] == ""; i = s.consumers.Next(i + 1) {
			if _, problem := sets.usesOf(s, &s.Object.Spec.Devices[i]); problem != "" {
				problems[nodeOf(s)] = problem
			}
		}
	}
	return problems
}

// keyFor is the key of a set that the slice has. The node after which a pool is called has the pool's.
func (sets *counterSets) keyFor(s *Slice, name string) setKey {
	if node := nodeOf(s); sets.apart && node != ownerOf(poolOf(s.Object)) {
		return setKey{name, node}
	}
	return setKey{set: name}
}

// of returns the set that devices of the slice mean by the name, nil if there is none.
func (sets *counterSets) of(s *Slice, name string) *indexedSet {
	if set := sets.all[sets.keyFor(s, name)]; set != nil {
		return set
	}
	return sets.all[setKey{set: name}]
}

// usesOf is what a device of the slice takes, in the order of the counters, or the first that is wrong with it. One for more than
// one node takes of no single node's sets, which a kubelet may have written before the pool's driver has written its own.
func (sets *counterSets) usesOf(s *Slice, device *resourceapi.Device) (uses []Use, problem string) {
	n := 0
	for i := range device.ConsumesCounters {
		n += len(device.ConsumesCounters[i].Counters)
	}
	uses = make([]Use, 0, n)
	for i := range device.ConsumesCounters {
		consumption := &device.ConsumesCounters[i]
		set := sets.of(s, consumption.CounterSet)
		switch {
		case set == nil:
			return nil, fmt.Sprintf("device %s consumes from counter set %s, which does not exist", device.Name, consumption.CounterSet)
		case set.node != "" && nodeOf(s) == "":
			return nil, fmt.Sprintf("device %s, which is one for more than one node, consumes from counter set %s, which is node %s's",
				device.Name, set.Name, set.node)
		}
		wrong := "" // the first by name
		for name := range consumption.Counters {
			index, known := set.index[name]
			taken := amount.Of(consumption.Counters[name].Value)
			if (!known || taken.IsNegative()) && (wrong == "" || name < wrong) {
				wrong = name
			}
			uses = append(uses, Use{Counter: index, Amount: taken})
		}
		if _, known := set.index[wrong]; wrong != "" && !known {
			return nil, fmt.Sprintf("device %s consumes counter %s, which counter set %s does not have", device.Name, wrong, set.Name)
		} else if wrong != "" {
			return nil, fmt.Sprintf("device %s consumes a negative amount of counter %s of counter set %s", device.Name, wrong, set.Name)
		}
	}
	return joined(uses), ""
}

// joined orders uses by counter, and adds up those of one.
func joined(uses []Use) []Use {
	slices.SortFunc(uses, func(a, b Use) int { return a.Counter - b.Counter })
	out := uses[:0]
	for _, use := range uses {
		if last := len(out) - 1; last >= 0 && out[last].Counter == use.Counter {
			out[last].Amount = out[last].Amount.Add(use.Amount)
		} else {
			out = append(out, use)
		}
	}
	return out
}

// usesOf is what the device of the slice takes, where others have the same name.
func (c *Counters) usesOf(s *Slice, device *resourceapi.Device) []Use {
	var uses []Use
	for _, consumption := range device.ConsumesCounters {
		for name, value := range consumption.Counters {
			at, found := c.find(nodeOf(s), consumption.CounterSet, name)
			if !found {
				at, found = c.find("", consumption.CounterSet, name)
			}
			if found {
				uses = append(uses, Use{Counter: at, Amount: amount.Of(value.Value)})
			}
		}
	}
	return joined(uses)
}

func (c *Counters) find(node, set, name string) (at int, found bool) {
	return slices.BinarySearchFunc(c.All, name, func(counter Counter, name string) int {
		return cmp.Or(setKey{counter.Set, counter.Node}.compare(setKey{set, node}), cmp.Compare(counter.Name, name))
	})
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
