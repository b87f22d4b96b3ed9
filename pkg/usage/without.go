// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"math"
	"slices"
	"sync/atomic"
)

// Without returns what would be held if, in the given pools, the holders for which gone is true had let go. All
// other pools are as they are. It is how one asks what a pod could have if other claims were released.
//
// The result is a view like any other: pools from which nothing is taken keep their identity, the others have a
// new one. Its Revision is one that no index ever reaches and no other view has.
//
// The cost grows with the number of devices held in the given pools.
func (v View) Without(pools []PoolID, gone func(ClaimRef) bool) View {
	without := View{pools: v.pools, devices: v.devices, revision: math.MaxUint64 - hypothetical.Add(1)}
	for _, id := range pools {
		pool := without.Pool(id)
		if pool == nil {
			continue
		}
		left := pool.without(gone)
		without.devices += left.Len() - pool.Len()
		switch {
		case left == nil:
			without.pools = without.pools.Delete(id)
		case left != pool:
			without.pools = without.pools.Set(id, left)
		}
	}
	return without
}

// hypothetical counts the views made by Without, to keep their revisions apart.
var hypothetical atomic.Uint64

// without returns the pool itself if nobody has gone, nil if nobody is left.
func (p *Pool) without(gone func(ClaimRef) bool) *Pool {
	type change struct {
		name string
		left *Device
	}
	var changes []change
	free := 0
	for name, device := range p.All() {
		left := device.without(gone)
		if left == device {
			continue
		}
		changes = append(changes, change{name, left})
		if left == nil {
			free++
		}
	}
	switch {
	case len(changes) == 0:
		return p
	case free == p.Len():
		return nil
	}
	devices := p.devices
	for _, c := range changes {
		if c.left == nil {
			devices = devices.Delete(c.name)
		} else {
			devices = devices.Set(c.name, c.left)
		}
	}
	return &Pool{devices: devices}
}

// without returns the device itself if nobody has gone, nil if nobody is left.
func (d *Device) without(gone func(ClaimRef) bool) *Device {
	isGone := func(h Holder) bool { return gone(h.Claim) }
	first := slices.IndexFunc(d.holders, isGone)
	switch {
	case first < 0:
		return d
	case len(d.holders) == 1:
		return nil
	}
	left := slices.DeleteFunc(slices.Clone(d.holders), isGone)
	if len(left) == 0 {
		return nil
	}
	return &Device{holders: left}
}
