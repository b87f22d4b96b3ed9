// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"math"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
)

// With returns what would be held if the claim had the allocation in flight on top of everything else. It is how one asks
// what is left once a pod that is about to be scheduled has taken its devices.
//
// The result is a view like any other: pools that the allocation does not name keep their identity, the others have a
// new one. Its Revision is one that no index ever reaches and no other view has. The view itself is returned if the
// allocation holds nothing.
//
// The cost grows with the number of devices named.
func (v View) With(claim ClaimRef, allocation *resourceapi.AllocationResult) View {
	holds := holdsOf(claim, nil, allocation)
	if len(holds) == 0 {
		return v
	}
	with := View{pools: v.pools, devices: v.devices, revision: math.MaxUint64 - hypothetical.Add(1)}
	for len(holds) > 0 {
		var inPool []hold
		id := holds[0].device.PoolID()
		inPool, holds = split(holds, func(h hold) bool { return h.device.PoolID() == id })
		pool := with.Pool(id)
		devices := noDevices
		if pool != nil {
			devices = pool.devices
		}
		for len(inPool) > 0 {
			var onDevice []hold
			name := inPool[0].device.Device
			onDevice, inPool = split(inPool, func(h hold) bool { return h.device.Device == name })
			device, _ := devices.Get(name)
			holders := slices.Clone(device.Holders())
			for _, h := range onDevice {
				holders = append(holders, h.holder)
			}
			slices.SortStableFunc(holders, Holder.compare)
			devices = devices.Set(name, &Device{holders: holders})
		}
		with.devices += devices.Len() - pool.Len()
		with.pools = with.pools.Set(id, &Pool{devices: devices})
	}
	return with
}
