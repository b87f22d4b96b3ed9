package inventory

import (
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
	advanced          bitset.Set // the devices that consume counters or allow multiple allocations; nil if none
	bindingConditions bool

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
		if s.advanced != nil {
			if np.advanced == nil {
				np.advanced = bitset.New(n)
			}
			np.advanced.OrAt(np.starts[i], s.advanced)
		}
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
	return np
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

// Advanced are the devices that consume counters or allow multiple allocations. Read only.
func (p *NodePool) Advanced() bitset.Set { return p.advanced }

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
