// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"iter"
	"slices"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// strangers are the devices of pools that are held and that the slices do not
// have. To find them takes a look at all that a pool holds. So that is done once
// for each change of its slices, and what is taken later is added.
type strangers struct {
	pools map[usage.PoolID]*strangersOf
	sweep int // when there are so many, those of pools that have gone are dropped
}

// strangersOf are those of one pool as its slices are, by name, in order. Some
// may not be held any more.
type strangersOf struct {
	pool  *inventory.Pool
	names []string
}

// taken adds the devices of an allocation.
func (s *strangers) taken(allocation *resourceapi.AllocationResult) {
	if allocation == nil {
		return
	}
	for i := range allocation.Devices.Results {
		device := usage.DeviceOf(&allocation.Devices.Results[i])
		known := s.pools[device.PoolID()]
		if known == nil || len(known.pool.Devices(device.Device)) > 0 {
			continue
		}
		if at, found := slices.BinarySearch(known.names, device.Device); !found {
			known.names = slices.Insert(known.names, at, device.Device)
		}
	}
}

// strangersIn returns the devices, by name, that a pool holds and does not have.
func (b *bench) strangersIn(id usage.PoolID, pool *inventory.Pool) []string {
	s, in := &b.by.strangers, b.Usage.Pool(id)
	known := s.pools[id]
	if known == nil || known.pool != pool {
		known = &strangersOf{pool: pool}
		for name := range b.held(in) {
			if len(pool.Devices(name)) == 0 {
				known.names = append(known.names, name)
			}
		}
		s.put(id, known, b.inventory)
	}
	known.names = slices.DeleteFunc(known.names, func(name string) bool { return in.Device(name) == nil })
	return known.names
}

func (s *strangers) put(id usage.PoolID, known *strangersOf, view *inventory.View) {
	if len(s.pools) >= s.sweep {
		pools := map[usage.PoolID]*strangersOf{}
		for id, known := range s.pools {
			if view.Pool(inventory.PoolID(id)) == known.pool {
				pools[id] = known
			}
		}
		s.pools, s.sweep = pools, 2*len(pools)
	}
	s.pools[id] = known
}

// held yields the devices that a pool holds, by name.
func (b *bench) held(in *usage.Pool) iter.Seq[string] {
	return func(yield func(string) bool) {
		for name := range in.All() {
			if b.by.looks++; !yield(name) {
				return
			}
		}
	}
}
