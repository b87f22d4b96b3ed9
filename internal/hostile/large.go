// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// Large is what a large pool has most of.
type Large int

// The API bounds what a slice has, and not how many slices a pool has. These are as large as a scheduler looks at: 1,024 slices, or
// 16,384 devices, counters and uses of counters.
const (
	LargeInDevices Large = iota
	LargeInCounters
	LargeInSlices
	// AllLarge is how many there are.
	AllLarge
)

// LargePool returns the slices of a whole pool that is as large as one may be.
func (g *Generator) LargePool(in Large) []*resourceapi.ResourceSlice {
	const (
		most       = 16 << 10
		manySlices = 1 << 10
		countersOf = resourceapi.ResourceSliceMaxCounterSets * resourceapi.ResourceSliceMaxCountersPerCounterSet
		usesOf     = resourceapi.ResourceSliceMaxDeviceCounterConsumptionsPerDevice *
			resourceapi.ResourceSliceMaxCountersPerDeviceCounterConsumption
		counterSets = 8 // slices of these
		consumers   = (most - counterSets*countersOf) / (resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures * (1 + usesOf))
	)
	n, perSlice := manySlices, one(g, 1, most/manySlices)
	switch in {
	case LargeInDevices:
		n, perSlice = most/resourceapi.ResourceSliceMaxDevices, resourceapi.ResourceSliceMaxDevices
	case LargeInCounters:
		n, perSlice = counterSets+consumers, resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
	case LargeInSlices, AllLarge:
	}
	driver, pool, whose := g.driver(), fmt.Sprint("large-", g.next()), g.r.IntN(4)
	if in == LargeInCounters && whose == 0 {
		whose = 1 // counters of a node are not for others
	}
	var all []*resourceapi.ResourceSlice
	for i := range n {
		slice := &resourceapi.ResourceSlice{
			ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("slice-%s-%04d", pool, i)},
			Spec: resourceapi.ResourceSliceSpec{
				Driver: driver, Pool: resourceapi.ResourcePool{Name: pool, Generation: 1, ResourceSliceCount: int64(n)},
			},
		}
		spec := &slice.Spec
		switch whose {
		case 0: // one for each node, whether there are as many or not
			spec.NodeName = ptr.To(fmt.Sprint(g.Nodes[0], "-", i))
		case 1:
			spec.NodeName = ptr.To(g.Nodes[0])
		case 2:
			spec.AllNodes = ptr.To(true)
		case 3:
			spec.NodeSelector = g.nodeSelector()
		}
		if in == LargeInCounters && i < counterSets {
			for j := range resourceapi.ResourceSliceMaxCounterSets {
				spec.SharedCounters = append(spec.SharedCounters, resourceapi.CounterSet{
					Name: fmt.Sprintf("set-%d-%d", i, j), Counters: alike(resourceapi.ResourceSliceMaxCountersPerCounterSet, "8Ei"),
				})
			}
		} else {
			for j := range perSlice {
				spec.Devices = append(spec.Devices, g.deviceOfMany(in, i, j))
			}
		}
		all = append(all, slice)
	}
	return all
}

func (g *Generator) deviceOfMany(in Large, slice, number int) resourceapi.Device {
	d := resourceapi.Device{
		Name: fmt.Sprintf("device-%d-%d", slice, number),
		Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"a1": {StringValue: ptr.To(one(g, Strings...))}, // a version that nobody can read would make the pool invalid
		},
	}
	if in != LargeInCounters {
		return d
	}
	for i := range resourceapi.ResourceSliceMaxDeviceCounterConsumptionsPerDevice {
		set := g.r.IntN(resourceapi.ResourceSliceMaxCounterSets)
		if i > 0 { // not that of the first
			set = resourceapi.ResourceSliceMaxCounterSets - 1 - set
		}
		d.ConsumesCounters = append(d.ConsumesCounters, resourceapi.DeviceCounterConsumption{
			CounterSet: fmt.Sprintf("set-%d-%d", (number+i)%resourceapi.ResourceSliceMaxCounterSets, set),
			Counters:   alike(resourceapi.ResourceSliceMaxCountersPerDeviceCounterConsumption, "1"),
		})
	}
	return d
}

// alike are n counters of the same value.
func alike(n int, value string) map[string]resourceapi.Counter {
	all := map[string]resourceapi.Counter{}
	for i := range n {
		all[fmt.Sprintf("counter-%d", i)] = resourceapi.Counter{Value: resource.MustParse(value)}
	}
	return all
}
