// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// comparison is one row of the table: one pod filtered over all nodes of a world.
type comparison struct {
	name  string
	world func() *world
	// target is the least ratio of upstream's time to ours; 0 if limit counts.
	target float64
	// limit is the longest that ours may take; 0 if target counts.
	limit time.Duration
	// alike tells that pods of the same template came before. Otherwise only pods of other kinds did.
	alike bool
}

func comparisons() []comparison {
	return []comparison{
		{name: "1 GPU over 5,000 nodes × 8 GPUs, half of them held", world: func() *world { return plain(5000) }, target: 100},
		{name: "8 GPUs with matchAttribute over 500 nodes × 32, three quarters held", world: matching, target: 50},
		{name: "the same, for a third pod of one template", world: matching, target: 50, alike: true},
		{name: "MIG 3g of 7 profiles × placements, counters, over 500 nodes × 8, half full", world: partitions, target: 50},
		{name: "consumable capacity, 1,000 shares over 100 nodes × 8", world: shares, target: 20},
		{name: "impossible: 21 of 20 devices", world: tooMany, limit: time.Millisecond},
		{name: "impossible: 4 requests with crossed selectors on 64 devices", world: crossed, limit: time.Millisecond},
		{name: "impossible: matchAttribute without solution on 128 devices", world: unmatched, limit: time.Millisecond},
	}
}

// plain has nodes with 8 GPUs, each of which is held with probability one half.
func plain(nodes int) *world {
	w := newWorld()
	for range nodes {
		name := w.addGPUs(gpus(8, 4))
		for i := range 8 {
			if w.random.IntN(2) == 0 {
				w.hold(name, fmt.Sprintf("gpu-%d", i), nil)
			}
		}
	}
	w.request(1)
	return w
}

// matching has nodes with 4 roots of 8 GPUs, of which 8 are free: on every other node all on one root.
func matching() *world {
	w := newWorld()
	for n := range 500 {
		name := w.addGPUs(gpus(32, 8))
		free := w.random.Perm(32)[:8]
		if n%2 == 0 {
			root := w.random.IntN(4)
			for i := range free {
				free[i] = root*8 + i
			}
		}
		isFree := make(map[int]bool)
		for _, i := range free {
			isFree[i] = true
		}
		for i := range 32 {
			if !isFree[i] {
				w.hold(name, fmt.Sprintf("gpu-%d", i), nil)
			}
		}
	}
	w.request(8)
	w.matchAttribute(rootAttribute)
	return w
}

// profile is a MIG profile of a GPU with 8 memory slices: how many it takes, and where it may begin.
type profile struct {
	name       string
	compute    int64
	memory     int
	placements []int
}

// profiles are those of an A100 with 80 GB.
var profiles = []profile{
	{"1g.10gb", 1, 1, []int{0, 1, 2, 3, 4, 5, 6}},
	{"1g.10gb+me", 1, 1, []int{0, 1, 2, 3, 4, 5, 6}},
	{"1g.20gb", 1, 2, []int{0, 2, 4, 6}},
	{"2g.20gb", 2, 2, []int{0, 2, 4}},
	{"3g.40gb", 3, 4, []int{0, 4}},
	{"4g.40gb", 4, 4, []int{0}},
	{"7g.80gb", 7, 8, []int{0}},
}

// partitions has nodes with 8 GPUs of which one half are, partly, in use.
func partitions() *world {
	w := newWorld()
	for range 500 {
		var lists [][]resourceapi.Device
		var counterSets []resourceapi.CounterSet
		for gpu := range 8 {
			set := resourceapi.CounterSet{
				Name:     fmt.Sprintf("gpu-%d", gpu),
				Counters: map[string]resourceapi.Counter{"compute": {Value: resource.MustParse("7")}},
			}
			for i := range 8 {
				set.Counters[fmt.Sprintf("memory-%d", i)] = resourceapi.Counter{Value: resource.MustParse("1")}
			}
			counterSets = append(counterSets, set)
			lists = append(lists, migDevices(gpu))
		}
		name := w.addNode(counterSets, lists...)
		for gpu := range 8 {
			// A 3g on the first half, and 1g's on the second half of every other one, leave no room for one more.
			if w.random.IntN(2) == 0 {
				w.hold(name, fmt.Sprintf("gpu-%d-3g-0", gpu), nil)
				w.hold(name, fmt.Sprintf("gpu-%d-1g-5", gpu), nil)
			}
		}
	}
	w.request(1, `device.attributes["gpu.nvidia.com"].profile == "3g.40gb"`)
	return w
}

func migDevices(gpu int) []resourceapi.Device {
	var devices []resourceapi.Device
	for _, p := range profiles {
		for _, start := range p.placements {
			counters := map[string]resourceapi.Counter{"compute": {Value: *resource.NewQuantity(p.compute, resource.DecimalSI)}}
			for i := range p.memory {
				counters[fmt.Sprintf("memory-%d", start+i)] = resourceapi.Counter{Value: resource.MustParse("1")}
			}
			short := p.name[:2]
			if len(p.name) > 7 {
				short += "-me"
			} else if p.name == "1g.20gb" {
				short += "-20"
			}
			all := attributes("mig", gpu, gpu/4)
			all["profile"] = resourceapi.DeviceAttribute{StringValue: ptr.To(p.name)}
			devices = append(devices, resourceapi.Device{
				Name: fmt.Sprintf("gpu-%d-%s-%d", gpu, short, start), Attributes: all,
				ConsumesCounters: []resourceapi.DeviceCounterConsumption{{
					CounterSet: fmt.Sprintf("gpu-%d", gpu), Counters: counters,
				}},
			})
		}
	}
	return devices
}

// shares has nodes with 8 GPUs of 80Gi whose memory is shared by 10 claims on each node.
func shares() *world {
	w := newWorld()
	memory := func(text string) map[resourceapi.QualifiedName]resource.Quantity {
		return map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse(text)}
	}
	for range 100 {
		devices := gpus(8, 4)
		for i := range devices {
			devices[i].AllowMultipleAllocations = ptr.To(true)
			devices[i].Capacity["memory"] = resourceapi.DeviceCapacity{
				Value: resource.MustParse("80Gi"),
				RequestPolicy: &resourceapi.CapacityRequestPolicy{
					Default:    ptr.To(resource.MustParse("1Gi")),
					ValidRange: &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(resource.MustParse("1Gi")), Step: ptr.To(resource.MustParse("1Gi"))},
				},
			}
		}
		name := w.addGPUs(devices)
		for i := range 10 {
			w.hold(name, fmt.Sprintf("gpu-%d", i%8), memory("36Gi"))
		}
	}
	w.request(1).Capacity = &resourceapi.CapacityRequirements{Requests: memory("40Gi")}
	return w
}

func tooMany() *world {
	w := newWorld()
	w.addGPUs(gpus(20, 4))
	w.request(21)
	return w
}

// crossed wants 28 devices in all, and each request has 16 or more to choose from, but they are the same 24.
func crossed() *world {
	w := newWorld()
	w.addGPUs(gpus(64, 8))
	for _, roots := range []string{
		`"pci0000:00", "pci0000:01"`, `"pci0000:01", "pci0000:02"`, `"pci0000:00", "pci0000:02"`,
		`"pci0000:00", "pci0000:01", "pci0000:02"`,
	} {
		w.request(7, `device.attributes["resource.kubernetes.io"].pcieRoot in [`+roots+`]`)
	}
	return w
}

// unmatched wants 16 devices of one root, of which each has 15.
func unmatched() *world {
	w := newWorld()
	w.addGPUs(gpus(128, 15))
	w.request(16)
	w.matchAttribute(rootAttribute)
	return w
}
