// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package discovery

import (
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"stowage.dev/stowage/pkg/agent/nvml"
)

// unit is something that a GPU has a number of and its partitions have a share of.
type unit struct {
	// capacity is NVIDIA's name for it, counter that of the counter (a DNS label).
	capacity resourceapi.QualifiedName
	counter  string
	of       func(*nvml.MIGProfile) uint32
}

// CapacityMultiprocessors of a partition.
const CapacityMultiprocessors resourceapi.QualifiedName = "multiprocessors"

var units = []unit{
	{CapacityMultiprocessors, "multiprocessors", func(p *nvml.MIGProfile) uint32 { return p.Multiprocessors }},
	{"copyEngines", "copy-engines", func(p *nvml.MIGProfile) uint32 { return p.CopyEngines }},
	{"decoders", "decoders", func(p *nvml.MIGProfile) uint32 { return p.Decoders }},
	{"encoders", "encoders", func(p *nvml.MIGProfile) uint32 { return p.Encoders }},
	{"jpegEngines", "jpeg-engines", func(p *nvml.MIGProfile) uint32 { return p.JPEGEngines }},
	{"ofaEngines", "ofa-engines", func(p *nvml.MIGProfile) uint32 { return p.OFAEngines }},
}

func sliceCapacity(slice uint32) resourceapi.QualifiedName {
	return resourceapi.QualifiedName(fmt.Sprintf("memorySlice%d", slice))
}

func sliceCounter(slice uint32) string { return fmt.Sprintf("memory-slice-%d", slice) }

// counted tells whether the GPU's devices exclude each other, so that they need counters.
func (g *GPU) counted() bool {
	return len(g.Offers) > 1 && slices.ContainsFunc(g.Offers, func(o Offer) bool { return o.Partition == nil || o.Partition.UUID == "" })
}

// counterSet is all of the GPU; of one that cannot be partitioned it is itself. Each memory slice is a counter of its
// own, so that places that overlap exclude each other exactly; of the other units there are as many as the partitions of
// one profile, or the largest, have together.
func (g *GPU) counterSet() resourceapi.CounterSet {
	set := resourceapi.CounterSet{Name: g.Name, Counters: map[string]resourceapi.Counter{}}
	if g.MIG == nil || len(g.MIG.Profiles) == 0 {
		set.Counters[wholeCounter] = counter(1)
		return set
	}
	taken := g.divided()
	for _, u := range units {
		var less uint32
		for _, p := range taken {
			less += u.of(p.Profile)
		}
		count(set.Counters, u.counter, g.most(u)-min(g.most(u), less))
	}
	for slice := range g.memorySlices() {
		if !slices.ContainsFunc(taken, func(p *Partition) bool { return slice >= p.At.Start && slice < p.At.Start+p.At.Size }) {
			set.Counters[sliceCounter(slice)] = counter(1)
		}
	}
	return set
}

// Beside tells whether the GPU has enough of all for a partition that is made beside one of the profile with that ID, which has other
// memory slices: of some engines there is one.
func (g *GPU) Beside(profileID uint32, o *Offer) bool {
	if g.MIG == nil || o.Partition == nil || o.Partition.UUID != "" {
		return true
	}
	other, wanted := g.MIG.profile(profileID), o.Partition.Profile
	return other == nil || !slices.ContainsFunc(units, func(u unit) bool { return u.of(wanted) > 0 && u.of(other)+u.of(wanted) > g.most(u) })
}

// most is how many the partitions of one profile, or the largest, have together.
func (g *GPU) most(u unit) (most uint32) {
	for i := range g.MIG.Profiles {
		p := &g.MIG.Profiles[i]
		most = max(most, p.Max*u.of(p))
	}
	return most
}

// divided are the places whose compute slices an administrator has given to several devices, or not all to one. These devices have
// what is in the place in common and consume no counters: the set is without it.
func (g *GPU) divided() []*Partition {
	var places []*Partition
	for i := range g.Offers {
		p := g.Offers[i].Partition
		if p != nil && p.Compute != nil && !slices.ContainsFunc(places, func(q *Partition) bool { return q.At == p.At }) {
			places = append(places, p)
		}
	}
	return places
}

// memorySlices is how many the GPU has.
func (g *GPU) memorySlices() (slices uint32) {
	for _, p := range g.MIG.Profiles {
		for _, at := range p.Placements {
			slices = max(slices, at.Start+at.Size)
		}
	}
	return slices
}

// consumes is what the device takes of the GPU's counter set.
func (g *GPU) consumes(o *Offer) []resourceapi.DeviceCounterConsumption {
	all := g.counterSet()
	if o.Partition != nil && o.Partition.Compute != nil {
		return nil
	}
	if o.Partition == nil {
		return []resourceapi.DeviceCounterConsumption{{CounterSet: g.Name, Counters: all.Counters}}
	}
	part := map[string]resourceapi.Counter{}
	for _, u := range units {
		count(part, u.counter, u.of(o.Partition.Profile))
	}
	for slice := o.Partition.At.Start; slice < o.Partition.At.Start+o.Partition.At.Size; slice++ {
		part[sliceCounter(slice)] = counter(1)
	}
	return []resourceapi.DeviceCounterConsumption{{CounterSet: g.Name, Counters: part}}
}

// count leaves out what there is none of.
func count(counters map[string]resourceapi.Counter, name string, n uint32) {
	if n > 0 {
		counters[name] = counter(n)
	}
}

func counter(n uint32) resourceapi.Counter {
	return resourceapi.Counter{Value: *resource.NewQuantity(int64(n), resource.DecimalSI)}
}
