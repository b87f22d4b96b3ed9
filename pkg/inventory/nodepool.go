// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"iter"
	"slices"
	"sort"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory/bitset"
)

// NodePool is what a node sees of one usable pool: devices with a dense index, in the order in which slices
// (by name) and devices (as listed) are tried. Nodes that see the same devices share one NodePool. It is
// replaced whenever any slice of the pool changes. Immutable but for its caches.
type NodePool struct {
	Pool *Pool
	// Slices are the slices with devices that the node sees, by name.
	Slices []*Slice

	starts            []int // index of the first device of each slice
	devices           []*resourceapi.Device
	visible           bitset.Set // the devices that the node may use; nil for all
	bindingConditions bool

	consumers   bitset.Set     // the devices that consume counters; nil if none
	unaccounted bitset.Set     // the devices that stand for CPU or memory of a node; nil if none
	skipping    bitset.Set     // the devices that need node operations to be skipped, which the node cannot; nil if none
	unsupported bitset.Set     // those, and the consumers if there are no counters; nil if none
	shareable   bitset.Set     // the devices that allow multiple allocations; nil if none
	apart       bitset.Set     // those of them whose shares are one namespace's; nil if none
	capacities  []*Capacity    // of those, by device
	uses        [][]Use        // what devices take of Pool.Counters, by device; nil if there are none
	memberships [][]Membership // the devices' compatibility groups; nil if the pool has none
	size        uint16         // of the devices, if all have the same
	sizes       []uint16       // otherwise by device

	matches slots[PoolMatch]
	columns columns

	namesOnce sync.Once
	names     map[string]int // device name → index; only for pools larger than maxScan

	// Attached is a place for one value that a consumer derives from this very NodePool and something else
	// that it can recognize again. The inventory does not look at it.
	Attached atomic.Value
}

// maxScan is up to how many devices looking through the names is as fast as a map, which would cost memory on
// every node.
const maxScan = 16

func newNodePool(p *Pool, seen []*Slice, node *v1.Node) *NodePool {
	np := &NodePool{Pool: p, Slices: seen, starts: make([]int, len(seen))}
	n := 0
	for i, s := range seen {
		np.starts[i] = n
		n += len(s.Object.Spec.Devices)
	}
	np.devices = make([]*resourceapi.Device, 0, n)
	for i, s := range seen {
		for j := range s.Object.Spec.Devices {
			np.devices = append(np.devices, &s.Object.Spec.Devices[j])
		}
		if s.bindingConditions {
			np.bindingConditions = true
		}
		np.consumers = addAll(np.consumers, n, np.starts[i], s.consumers)
		np.unaccounted = addAll(np.unaccounted, n, np.starts[i], s.unaccounted)
		if s.skipsOperations && (!p.skipsOperations || !canSkipOperations(node)) {
			np.skipping = addAll(np.skipping, n, np.starts[i], bitset.Full(len(s.Object.Spec.Devices)))
		}
		if np.shareable = addAll(np.shareable, n, np.starts[i], s.shareable); s.capacities != nil {
			if np.capacities == nil {
				np.capacities = make([]*Capacity, n)
			}
			copy(np.capacities[np.starts[i]:], s.capacities)
		}
		np.apart = addAll(np.apart, n, np.starts[i], s.apart)
		if s.perDevice != nil {
			if np.visible == nil {
				np.visible = bitset.Full(n)
			}
			for j := range s.perDevice {
				if !s.perDevice[j].matches(node) {
					np.visible.Remove(np.starts[i] + j)
				}
			}
		}
	}
	np.unsupported = addAll(np.unaccounted.Clone(), n, 0, np.skipping)
	if p.Counters == nil {
		np.unsupported = addAll(np.unsupported, n, 0, np.consumers)
	}
	np.learnUses()
	np.measure()
	return np
}

// addAll adds the devices of one slice, the first of which has the index start, to a set of n, made when needed.
func addAll(set bitset.Set, n, start int, devices bitset.Set) bitset.Set {
	if devices == nil {
		return set
	}
	if set == nil {
		set = bitset.New(n)
	}
	set.OrAt(start, devices)
	return set
}

// learnUses finds what each device takes of the pool's counters.
func (p *NodePool) learnUses() {
	if p.Pool.Counters == nil || p.consumers == nil {
		return
	}
	p.uses = make([][]Use, len(p.devices))
	for i := p.consumers.Next(0); i >= 0; i = p.consumers.Next(i + 1) {
		p.uses[i] = p.Pool.UsesOf(Offer{p.devices[i], p.SliceOf(i)})
	}
	if !p.Pool.Counters.HasGroups() {
		return
	}
	p.memberships = make([][]Membership, len(p.devices))
	for i := p.consumers.Next(0); i >= 0; i = p.consumers.Next(i + 1) {
		p.memberships[i] = p.Pool.Counters.memberships(p.SliceOf(i), p.devices[i])
	}
}

// ID names the pool.
func (p *NodePool) ID() PoolID { return p.Pool.ID }

// Len is the number of devices, among them those that the node may not use.
func (p *NodePool) Len() int { return len(p.devices) }

// Visible is the number of devices that the node may use.
func (p *NodePool) Visible() int {
	if p.visible == nil {
		return len(p.devices)
	}
	return p.visible.Count()
}

// Device returns the device with index i. Read only.
func (p *NodePool) Device(i int) *resourceapi.Device { return p.devices[i] }

// SliceOf returns the slice that lists device i.
func (p *NodePool) SliceOf(i int) *Slice {
	return p.Slices[sort.SearchInts(p.starts, i+1)-1]
}

// NodeOf is the node for which device i is by the name in its slice, empty if its slice names none.
func (p *NodePool) NodeOf(i int) string { return nodeOf(p.SliceOf(i)) }

// Index returns the index of the device with the name, or -1.
func (p *NodePool) Index(name string) int {
	if len(p.devices) > maxScan {
		p.namesOnce.Do(func() {
			p.names = make(map[string]int, len(p.devices))
			for i, device := range p.devices {
				p.names[device.Name] = i
			}
		})
		if i, ok := p.names[name]; ok {
			return i
		}
		return -1
	}
	for i, device := range p.devices {
		if device.Name == name {
			return i
		}
	}
	return -1
}

// Consumers are the devices that take something of the pool's counters while they are held; nil if there are none.
// Read only.
func (p *NodePool) Consumers() bitset.Set {
	if p.Pool.Counters == nil {
		return nil
	}
	return p.consumers
}

// Uses returns what device i takes of the counters Pool.Counters, each counter once. Read only.
func (p *NodePool) Uses(i int) []Use {
	if p.uses == nil {
		return nil
	}
	return p.uses[i]
}

// Memberships returns the compatibility groups of device i, one for each of its consumptions of counters; nil if the
// pool has no groups. Read only.
func (p *NodePool) Memberships(i int) []Membership {
	if p.memberships == nil {
		return nil
	}
	return p.memberships[i]
}

// AllMemberships yields the names and memberships of all devices of the pool that consume counters: first those that
// the node sees, then the others.
func (p *NodePool) AllMemberships() iter.Seq2[string, []Membership] {
	return func(yield func(string, []Membership) bool) {
		for i := range p.memberships {
			if p.memberships[i] != nil && !yield(p.devices[i].Name, p.memberships[i]) {
				return
			}
		}
		for _, s := range p.Pool.slices {
			if s.holdsCounters() || slices.Contains(p.Slices, s) {
				continue
			}
			for i := s.consumers.Next(0); i >= 0; i = s.consumers.Next(i + 1) {
				device := &s.Object.Spec.Devices[i]
				if !yield(device.Name, p.Pool.Counters.memberships(s, device)) {
					return
				}
			}
		}
	}
}

// Shareable are the devices that allow multiple allocations; nil if there are none. Read only.
func (p *NodePool) Shareable() bitset.Set { return p.shareable }

// Apart are those of the shareable devices whose shares are one namespace's at a time, see [IsApart]; nil if there are none. Read only.
func (p *NodePool) Apart() bitset.Set { return p.apart }

// Capacity is what device i, which allows multiple allocations, has to give.
func (p *NodePool) Capacity(i int) *Capacity { return p.capacities[i] }

// Unsupported are the devices that cannot be used because they consume counters and that feature is off, or because
// they are NodeAllocatable or Skipping; nil if there are none. Read only.
func (p *NodePool) Unsupported() bitset.Set { return p.unsupported }

// NodeAllocatable are the devices that stand for CPU or memory of a node, or need some of it, unless that is
// accounted for; nil if there are none. Read only.
func (p *NodePool) NodeAllocatable() bitset.Set { return p.unaccounted }

// Skipping are the devices that need node operations to be skipped, which the node does not declare that it can, or
// which is not enabled; nil if there are none. Read only.
func (p *NodePool) Skipping() bitset.Set { return p.skipping }

// compare orders pools as their devices are tried: pools by driver and name, pools that have a
// device with binding conditions after all others.
func (p *NodePool) compare(o *NodePool) int {
	if p.bindingConditions != o.bindingConditions {
		if o.bindingConditions {
			return -1
		}
		return 1
	}
	return p.Pool.ID.compare(o.Pool.ID)
}
