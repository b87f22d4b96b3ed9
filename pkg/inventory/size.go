// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"math"

	resourceapi "k8s.io/api/resource/v1"

	"stowage.dev/stowage/pkg/inventory/amount"
)

// sizesPerOctave is how many sizes there are from one amount to twice as much. What one product says of itself differs by less
// than one of them, and different products by more.
const sizesPerOctave = 16

// deviceSize tells how large a device is, so that devices of different pools, drivers and kinds can be compared: by its largest
// capacity, on a logarithmic scale. Of a GPU and of a partition that is the memory, in bytes, beside which the numbers of engines are
// small. It is 0 for a device without capacity, of which nothing is known.
func deviceSize(device *resourceapi.Device) uint16 {
	var most int64
	for _, capacity := range device.Capacity {
		most = max(most, amount.Int64(capacity.Value))
	}
	if most <= 0 {
		return 0
	}
	return 1 + uint16(math.Log2(float64(most))*sizesPerOctave)
}

// measure finds how large the devices are.
func (p *NodePool) measure() {
	for i, device := range p.devices {
		size := deviceSize(device)
		switch {
		case i == 0:
			p.size = size
		case p.sizes != nil:
			p.sizes[i] = size
		case size != p.size:
			p.sizes = make([]uint16, len(p.devices))
			for j := range i {
				p.sizes[j] = p.size
			}
			p.sizes[i] = size
		}
	}
}

// SameSize tells whether all devices are equally large, as on most nodes; the size is 0 if nothing is known of it. What is larger has
// the larger number, in any pool, and more than that the numbers do not say.
func (p *NodePool) SameSize() (size int, same bool) { return int(p.size), p.sizes == nil }

// Size is how large device i is, 0 if nothing is known of it.
func (p *NodePool) Size(i int) int {
	if p.sizes == nil {
		return int(p.size)
	}
	return int(p.sizes[i])
}
