// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package advertise

import (
	"strings"

	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// Withhold returns the resources without the devices of GPUs that are not to be offered by claims, and without their counters.
// The resources stay as they are.
func Withhold(resources resourceslice.DriverResources, withheld func(gpu string) bool) resourceslice.DriverResources {
	left := resourceslice.DriverResources{Pools: make(map[string]resourceslice.Pool, len(resources.Pools))}
	for name, pool := range resources.Pools {
		var kept []resourceslice.Slice
		for _, slice := range pool.Slices {
			now := slice
			now.Devices, now.SharedCounters = nil, nil
			for _, device := range slice.Devices {
				if !withheld(GPUOf(device.Name)) {
					now.Devices = append(now.Devices, device)
				}
			}
			for _, counters := range slice.SharedCounters {
				if !withheld(counters.Name) { // a set has its GPU's name
					now.SharedCounters = append(now.SharedCounters, counters)
				}
			}
			if len(now.Devices)+len(now.SharedCounters) > 0 {
				kept = append(kept, now)
			}
		}
		if len(kept) == 0 {
			kept = []resourceslice.Slice{{}} // which tells that the driver runs
		}
		pool.Slices = kept
		left.Pools[name] = pool
	}
	return left
}

// GPUOf is the GPU that the device of that name is, or is a part of: gpu-0000-1b-00-0 of gpu-0000-1b-00-0-mig-1g10gb-6.
func GPUOf(device string) string {
	const parts = 5 // "gpu", and the four of a PCI address
	words := strings.SplitN(device, "-", parts+1)
	return strings.Join(words[:min(parts, len(words))], "-")
}
