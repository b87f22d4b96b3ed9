// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// deviceID names a device in the cluster.
type deviceID struct{ driver, pool, device string }

func (id deviceID) String() string { return id.driver + "/" + id.pool + "/" + id.device }

// counterSetID names a counter set in the cluster.
type counterSetID struct{ driver, pool, set string }

// Inventory is what devices have to give.
type Inventory struct {
	devices  map[deviceID]*resourceapi.Device
	counters map[counterSetID]map[string]resourceapi.Counter
}

// NewInventory reads slices of complete pools of one generation.
func NewInventory(all []*resourceapi.ResourceSlice) *Inventory {
	inv := &Inventory{
		devices:  map[deviceID]*resourceapi.Device{},
		counters: map[counterSetID]map[string]resourceapi.Counter{},
	}
	for _, slice := range all {
		spec := &slice.Spec
		for i := range spec.Devices {
			inv.devices[deviceID{spec.Driver, spec.Pool.Name, spec.Devices[i].Name}] = &spec.Devices[i]
		}
		for _, set := range spec.SharedCounters {
			inv.counters[counterSetID{spec.Driver, spec.Pool.Name, set.Name}] = set.Counters
		}
	}
	return inv
}

// Holder is a claim with an allocation.
type Holder struct {
	Name    string // of the claim, for messages
	Results []resourceapi.DeviceRequestAllocationResult
}

// Overuse is one thing that is given away more often than it is there.
type Overuse struct {
	// What is the device, or the counter or capacity.
	What string
	// Holders are the claims that use it, in order.
	Holders []string
}

func (o Overuse) String() string {
	return fmt.Sprintf("%s is over-used by the claims %s", o.What, strings.Join(o.Holders, ", "))
}

// Overuse says what the holders use more of than there is. The rules are those
// of the ResourceSlice and ResourceClaim API:
//   - a device that does not allow multiple allocations belongs to one result;
//   - of one that does, the capacities that all results consume must be there;
//     a result without share ID has the whole device;
//   - devices in use draw their counters from the counter sets, once each;
//   - results with admin access use nothing;
//   - a device that is not in the inventory can be used by nobody.
func (inv *Inventory) Overuse(holders []Holder) []Overuse {
	t := tally{inv: inv, users: map[deviceID][]use{}}
	for _, h := range holders {
		for i := range h.Results {
			t.add(h.Name, &h.Results[i])
		}
	}
	found := t.unknown
	for id, uses := range t.users {
		found = append(found, inv.overuseOfDevice(id, uses)...)
	}
	found = append(found, t.overuseOfCounters()...)
	slices.SortFunc(found, func(a, b Overuse) int { return cmp.Compare(a.What, b.What) })
	return found
}

// use is one result that uses a device.
type use struct {
	holder string
	result *resourceapi.DeviceRequestAllocationResult
}

// tally collects who uses which device.
type tally struct {
	inv     *Inventory
	users   map[deviceID][]use
	unknown []Overuse
}

func (t *tally) add(holder string, r *resourceapi.DeviceRequestAllocationResult) {
	if ptr.Deref(r.AdminAccess, false) {
		return
	}
	id := deviceID{r.Driver, r.Pool, r.Device}
	if t.inv.devices[id] == nil {
		t.unknown = append(t.unknown, Overuse{What: id.String() + " (not in any slice)", Holders: []string{holder}})
		return
	}
	t.users[id] = append(t.users[id], use{holder, r})
}

func (inv *Inventory) overuseOfDevice(id deviceID, uses []use) []Overuse {
	device := inv.devices[id]
	whole := slices.ContainsFunc(uses, func(u use) bool { return u.result.ShareID == nil })
	if len(uses) > 1 && (whole || !ptr.Deref(device.AllowMultipleAllocations, false)) {
		return []Overuse{{What: id.String(), Holders: holdersOf(uses)}}
	}
	var found []Overuse
	for name, capacity := range device.Capacity {
		var sum resource.Quantity
		for _, u := range uses {
			sum.Add(u.result.ConsumedCapacity[name])
		}
		if sum.Cmp(capacity.Value) > 0 {
			found = append(found, Overuse{
				What:    fmt.Sprintf("%s, capacity %s: %s of %s", id, name, sum.String(), capacity.Value.String()),
				Holders: holdersOf(uses),
			})
		}
	}
	return found
}

func (t *tally) overuseOfCounters() []Overuse {
	type draw struct {
		sums  map[string]resource.Quantity
		users []use
	}
	draws := map[counterSetID]*draw{}
	for id, uses := range t.users {
		for _, consumption := range t.inv.devices[id].ConsumesCounters {
			set := counterSetID{id.driver, id.pool, consumption.CounterSet}
			if draws[set] == nil {
				draws[set] = &draw{sums: map[string]resource.Quantity{}}
			}
			for name, counter := range consumption.Counters {
				sum := draws[set].sums[name]
				sum.Add(counter.Value)
				draws[set].sums[name] = sum
			}
			draws[set].users = append(draws[set].users, uses...)
		}
	}
	var found []Overuse
	for set, d := range draws {
		for _, name := range slices.Sorted(maps.Keys(d.sums)) {
			sum, there := d.sums[name], t.inv.counters[set][name].Value
			if sum.Cmp(there) > 0 {
				found = append(found, Overuse{
					What:    fmt.Sprintf("%s/%s/%s, counter %s: %s of %s", set.driver, set.pool, set.set, name, sum.String(), there.String()),
					Holders: holdersOf(d.users),
				})
			}
		}
	}
	return found
}

// holdersOf are the users' names, each once, in order.
func holdersOf(uses []use) []string {
	var names []string
	for _, u := range uses {
		names = append(names, u.holder)
	}
	slices.Sort(names)
	return slices.Compact(names)
}
