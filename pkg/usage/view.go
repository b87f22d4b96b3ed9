// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"iter"

	"github.com/benbjohnson/immutable"

	"stowage.dev/stowage/internal/sharded"
)

// View is an immutable picture of all held devices at one moment. It is a small
// value: copy it, keep it as long as needed, read it from any goroutine. The
// zero View holds nothing.
type View struct {
	pools    sharded.Map[PoolID, *Pool]
	revision uint64
	devices  int
}

// Revision counts the changes of usage up to this view. Of two views taken from
// one index, the one with the larger revision is the later one, and equal
// revisions mean equal usage.
func (v View) Revision() uint64 { return v.revision }

// Len returns the number of devices that are held.
func (v View) Len() int { return v.devices }

// Pool returns what is held in a pool, nil if nothing is.
func (v View) Pool(id PoolID) *Pool {
	pool, _ := v.pools.Get(id)
	return pool
}

// Place says where a pool is to be found in any view.
type Place struct{ slot sharded.Slot }

// PlaceOf returns the pool's place.
func PlaceOf(id PoolID) Place { return Place{sharded.SlotOf(id)} }

// Mark stands for what is held in the pools of one place: as long as two views have the same mark there, they have the
// same *Pool for each of them. To compare marks is much cheaper than to look a pool up. The zero Mark is that of a place
// where nothing is held.
type Mark = sharded.Mark[PoolID, *Pool]

// Mark returns the mark of a place.
func (v View) Mark(p Place) Mark { return v.pools.Mark(p.slot) }

// Device returns who holds a device, nil if it is free.
func (v View) Device(id DeviceID) *Device {
	return v.Pool(id.PoolID()).Device(id.Device)
}

// All iterates over all held devices. Devices of a pool come together and by
// name, the order of pools is arbitrary.
func (v View) All() iter.Seq2[DeviceID, *Device] {
	return func(yield func(DeviceID, *Device) bool) {
		for id, pool := range v.pools.All() {
			for name, device := range pool.All() {
				if !yield(DeviceID{Driver: id.Driver, Pool: id.Pool, Device: name}, device) {
					return
				}
			}
		}
	}
}

// Pool is an immutable picture of what is held in one pool.
//
// Its address is an identity: two views return the same *Pool exactly as long as
// no hold on a device of the pool came, went or changed between them, so the
// address can key a cache, and comparing two addresses tells whether a decision
// about the pool still stands. A pool in which nothing is held is nil; all
// methods accept that.
type Pool struct {
	devices *immutable.SortedMap[string, *Device]
}

// Device returns who holds the named device, nil if it is free.
func (p *Pool) Device(name string) *Device {
	if p == nil {
		return nil
	}
	device, _ := p.devices.Get(name)
	return device
}

// Len returns the number of devices held in the pool.
func (p *Pool) Len() int {
	if p == nil {
		return 0
	}
	return p.devices.Len()
}

// All iterates over the held devices of the pool, by name.
func (p *Pool) All() iter.Seq2[string, *Device] {
	return func(yield func(string, *Device) bool) {
		if p == nil {
			return
		}
		for itr := p.devices.Iterator(); !itr.Done(); {
			name, device, _ := itr.Next()
			if !yield(name, device) {
				return
			}
		}
	}
}

// Device is an immutable list of the holders of one device, never empty.
type Device struct {
	holders []Holder
}

// Holders returns the holders ordered by claim UID. Read only. A nil Device has
// none.
func (d *Device) Holders() []Holder {
	if d == nil {
		return nil
	}
	return d.holders
}

// Count returns the number of holders. It is more than one for a shared device,
// and for a device that was handed out twice.
func (d *Device) Count() int { return len(d.Holders()) }
