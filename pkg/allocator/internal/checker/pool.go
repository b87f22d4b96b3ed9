// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package checker

import (
	"fmt"
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/utils/ptr"
)

type poolID struct{ driver, pool string }

func (id poolID) String() string { return id.driver + "/" + id.pool }

type deviceID struct {
	poolID
	name string
}

func (id deviceID) String() string { return id.poolID.String() + "/" + id.name }

// pool is one generation of a pool, as one node sees it: the newest of which the node sees something.
type pool struct {
	id poolID
	// problem is why nothing of the pool may be used on the node; empty if it may.
	problem string
	// slicesOnNode are those of which the node would see something.
	slicesOnNode int
	devices      []*device
	counterSets  map[string]*resourceapi.CounterSet
}

// device is one device of that generation, on any node.
type device struct {
	*resourceapi.Device
	slice  *resourceapi.ResourceSlice
	onNode bool
}

// poolsFor finds for every pool the newest generation of which the node sees something, and what that is. An outdated
// generation counts only where it is whole: all its slices are there and are for the node. Strictly, only the newest
// counts anywhere (ResourcePool API); upstream's scheduler sees it as is done here, and so do we.
func poolsFor(c Cluster) map[poolID]*pool {
	members := make(map[poolID]map[int64][]*resourceapi.ResourceSlice)
	for _, slice := range c.Slices {
		id := poolID{slice.Spec.Driver, slice.Spec.Pool.Name}
		if members[id] == nil {
			members[id] = make(map[int64][]*resourceapi.ResourceSlice)
		}
		members[id][slice.Spec.Pool.Generation] = append(members[id][slice.Spec.Pool.Generation], slice)
	}
	pools := make(map[poolID]*pool)
	for id, generations := range members {
		numbers := slices.Sorted(maps.Keys(generations))
		slices.Reverse(numbers)
		for i, number := range numbers {
			p := newPool(c, id, generations[number])
			isWhole := p.slicesOnNode == len(generations[number]) && int64(p.slicesOnNode) == generations[number][0].Spec.Pool.ResourceSliceCount
			if i == 0 || isWhole {
				pools[id] = p
			}
			if p.slicesOnNode > 0 {
				break
			}
		}
	}
	return pools
}

func newPool(c Cluster, id poolID, members []*resourceapi.ResourceSlice) *pool {
	p := &pool{id: id, counterSets: make(map[string]*resourceapi.CounterSet)}
	usable := 0
	for _, slice := range members {
		sliceOnNode, err := onNode(c.Node, slice.Spec.NodeName, slice.Spec.AllNodes, slice.Spec.NodeSelector)
		p.fail(err)
		perDevice := ptr.Deref(slice.Spec.PerDeviceNodeSelection, false)
		if !c.Features.PartitionableDevices && (slice.Spec.PerDeviceNodeSelection != nil || len(slice.Spec.SharedCounters) > 0) {
			sliceOnNode, perDevice = false, false // not understood, so for no node
		}
		if c.Features.CompatibilityGroups || !hasGroups(slice) {
			usable++
		} else {
			sliceOnNode, perDevice = false, false
		}
		if slice.Spec.Pool.ResourceSliceCount != members[0].Spec.Pool.ResourceSliceCount {
			p.fail(fmt.Errorf("slices disagree about their number"))
		}
		forNode := sliceOnNode
		if len(slice.Spec.SharedCounters) > 0 {
			for i := range slice.Spec.SharedCounters {
				set := &slice.Spec.SharedCounters[i]
				if p.counterSets[set.Name] != nil {
					p.fail(fmt.Errorf("counter set %s is there twice", set.Name))
				}
				p.counterSets[set.Name] = set
			}
		} else {
			for i := range slice.Spec.Devices {
				d := &device{Device: &slice.Spec.Devices[i], slice: slice, onNode: sliceOnNode}
				if perDevice {
					d.onNode, err = onNode(c.Node, d.NodeName, d.AllNodes, d.NodeSelector)
					p.fail(err)
					forNode = forNode || d.onNode
				}
				p.devices = append(p.devices, d)
			}
		}
		if forNode {
			p.slicesOnNode++
		}
	}
	if want := members[0].Spec.Pool.ResourceSliceCount; int64(usable) != want {
		p.fail(fmt.Errorf("has %d of %d slices", usable, want))
	}
	p.checkNames()
	if c.Features.PartitionableDevices {
		p.checkCounters()
	}
	return p
}

func (p *pool) fail(err error) {
	if err != nil && p.problem == "" {
		p.problem = err.Error()
	}
}

// checkNames makes sure that a name means one device, among those on the node.
func (p *pool) checkNames() {
	seen := make(map[string]bool)
	for _, d := range p.devices {
		if !d.onNode {
			continue
		}
		if seen[d.Name] {
			p.fail(fmt.Errorf("device %s is there twice", d.Name))
		}
		seen[d.Name] = true
	}
}

// checkCounters makes sure that what devices consume exists.
func (p *pool) checkCounters() {
	for _, d := range p.devices {
		for _, consumption := range d.ConsumesCounters {
			set := p.counterSets[consumption.CounterSet]
			if set == nil {
				p.fail(fmt.Errorf("device %s consumes from counter set %s, which does not exist", d.Name, consumption.CounterSet))
				continue
			}
			for name := range consumption.Counters {
				if _, ok := set.Counters[name]; !ok {
					p.fail(fmt.Errorf("device %s consumes counter %s, which counter set %s does not have", d.Name, name, set.Name))
				}
			}
		}
	}
}

func hasGroups(slice *resourceapi.ResourceSlice) bool {
	for i := range slice.Spec.Devices {
		for _, consumption := range slice.Spec.Devices[i].ConsumesCounters {
			if len(consumption.CompatibilityGroups) > 0 {
				return true
			}
		}
	}
	return false
}

// onNode tells whether a slice or device with these fields is for the node.
func onNode(node *v1.Node, name *string, all *bool, selector *v1.NodeSelector) (bool, error) {
	switch {
	case ptr.Deref(name, "") != "":
		return *name == node.Name, nil
	case ptr.Deref(all, false):
		return true, nil
	case selector != nil:
		compiled, err := nodeaffinity.NewNodeSelector(selector)
		if err != nil {
			return false, err
		}
		return compiled.Match(node), nil
	}
	return false, nil
}
