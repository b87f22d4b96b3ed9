// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"cmp"
	"slices"
	"strings"

	"github.com/benbjohnson/immutable"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// Index counts holders by device. It is a fold over claims: each claim
// contributes the holders that follow from what Set said last about it, so a
// device is free exactly when the last of its holders has gone, and no order of
// calls can leave a hold behind.
//
// An Index is not safe for concurrent use, not even its method View; the views taken from it are.
type Index struct {
	// view is the present one, but for the devices of pools that have changed since View was called.
	view    View
	changed map[PoolID]*immutable.SortedMap[string, *Device]
	holds   map[types.UID][]hold // by claim: its holds, in the order of hold.compare
}

// NewIndex returns an index in which nothing is held.
func NewIndex() *Index {
	return &Index{changed: map[PoolID]*immutable.SortedMap[string, *Device]{}, holds: map[types.UID][]hold{}}
}

// View returns the present usage. Later changes of the index do not show in it.
// The cost grows with the number of pools that have changed since the last call:
// many changes, as of a list of all claims, are put into the view together.
func (x *Index) View() View {
	if len(x.changed) == 0 {
		return x.view
	}
	for id, devices := range x.changed {
		if devices.Len() == 0 {
			x.view.pools = x.view.pools.Delete(id)
		} else {
			x.view.pools = x.view.pools.Set(id, &Pool{devices: devices})
		}
	}
	x.changed = map[PoolID]*immutable.SortedMap[string, *Device]{} // to clear one that was large takes long each time
	return x.view
}

// Len returns the number of devices that are held.
func (x *Index) Len() int { return x.view.devices }

// devicesOf returns what is held in a pool.
func (x *Index) devicesOf(id PoolID) *immutable.SortedMap[string, *Device] {
	if devices := x.changed[id]; devices != nil {
		return devices
	}
	if pool := x.view.Pool(id); pool != nil {
		return pool.devices
	}
	return noDevices
}

// Set says what a claim holds from now on: the devices of its allocation as the
// API has it, and those of an allocation in flight; either or both may be nil.
// What is in both is one hold, and no longer in flight. It replaces what the
// claim held before, in one step; a claim that holds nothing is forgotten.
//
// Set returns the devices that the claim held before and does not hold now, in
// order. Such a device may have other holders still.
//
// The cost grows with the number of devices named and with the logarithm of the
// number of devices held in all.
func (x *Index) Set(claim ClaimRef, allocated, inFlight *resourceapi.AllocationResult) (released []DeviceID) {
	before, after := x.holds[claim.UID], holdsOf(claim, allocated, inFlight)
	if slices.EqualFunc(before, after, hold.equal) {
		return nil
	}
	if len(after) == 0 {
		delete(x.holds, claim.UID)
	} else {
		x.holds[claim.UID] = after
	}

	x.view.revision++
	for len(before) > 0 || len(after) > 0 {
		var poolBefore, poolAfter []hold
		pool := first(before, after, func(h hold) PoolID { return h.device.PoolID() }, PoolID.Compare)
		poolBefore, before = split(before, func(h hold) bool { return h.device.PoolID() == pool })
		poolAfter, after = split(after, func(h hold) bool { return h.device.PoolID() == pool })
		if !slices.EqualFunc(poolBefore, poolAfter, hold.equal) {
			released = append(released, x.setPool(claim.UID, pool, poolBefore, poolAfter)...)
		}
	}
	return released
}

// setPool replaces what a claim holds in one pool.
func (x *Index) setPool(claim types.UID, id PoolID, before, after []hold) (released []DeviceID) {
	devices := x.devicesOf(id)
	held := devices.Len()

	for len(before) > 0 || len(after) > 0 {
		var deviceBefore, deviceAfter []hold
		name := first(before, after, func(h hold) string { return h.device.Device }, strings.Compare)
		deviceBefore, before = split(before, func(h hold) bool { return h.device.Device == name })
		deviceAfter, after = split(after, func(h hold) bool { return h.device.Device == name })

		device, _ := devices.Get(name)
		if next := device.with(claim, deviceAfter); next != nil {
			devices = devices.Set(name, next)
		} else {
			devices = devices.Delete(name)
		}
		if len(deviceAfter) == 0 {
			released = append(released, deviceBefore[0].device)
		}
	}

	x.view.devices += devices.Len() - held
	if devices.Len() == 0 && x.view.Pool(id) == nil {
		delete(x.changed, id) // with nodes pools come and go, while nobody may call View for months: in a scheduler that does not lead
	} else {
		x.changed[id] = devices
	}
	return released
}

// with returns the device with the claim's holds replaced, nil if nobody holds
// it any more.
func (d *Device) with(claim types.UID, holds []hold) *Device {
	others := d.Holders()
	holders := make([]Holder, 0, len(others)+len(holds))
	for _, h := range others {
		if h.Claim.UID != claim {
			holders = append(holders, h)
		}
	}
	if len(holders)+len(holds) == 0 {
		return nil
	}
	for _, h := range holds {
		holders = append(holders, h.holder)
	}
	slices.SortStableFunc(holders, Holder.compare)
	return &Device{holders: holders}
}

// hold is a holder together with the device that it holds.
type hold struct {
	device DeviceID
	holder Holder
}

func (h hold) equal(other hold) bool {
	return h.device == other.device && h.holder.Equal(other.holder)
}

func (h hold) compare(other hold) int {
	return cmp.Or(h.device.Compare(other.device), h.holder.compare(other.holder))
}

// holdsOf returns the holds of one claim, ordered.
func holdsOf(claim ClaimRef, allocated, inFlight *resourceapi.AllocationResult) []hold {
	holds := allocationHolds(claim, allocated)
	confirmed := holds
	for _, h := range allocationHolds(claim, inFlight) {
		if !slices.ContainsFunc(confirmed, h.equal) {
			h.holder.InFlight = true
			holds = append(holds, h)
		}
	}
	slices.SortStableFunc(holds, hold.compare)
	return holds
}

// allocationHolds returns one hold per result, except for results with admin
// access: they look at a device that somebody else may hold.
func allocationHolds(claim ClaimRef, allocation *resourceapi.AllocationResult) []hold {
	if allocation == nil {
		return nil
	}
	holds := make([]hold, 0, len(allocation.Devices.Results))
	for i := range allocation.Devices.Results {
		result := &allocation.Devices.Results[i]
		if ptr.Deref(result.AdminAccess, false) {
			continue
		}
		holds = append(holds, hold{
			device: DeviceOf(result),
			holder: Holder{Claim: claim, ShareID: result.ShareID, ConsumedCapacity: result.ConsumedCapacity},
		})
	}
	return holds
}

// first returns the smaller one of the keys that two ordered lists begin with,
// at least one of which is not empty.
func first[K any](a, b []hold, key func(hold) K, compare func(K, K) int) K {
	switch {
	case len(a) == 0:
		return key(b[0])
	case len(b) == 0:
		return key(a[0])
	default:
		return slices.MinFunc([]K{key(a[0]), key(b[0])}, compare)
	}
}

// split cuts off the leading holds for which in is true.
func split(holds []hold, in func(hold) bool) (head, tail []hold) {
	n := slices.IndexFunc(holds, func(h hold) bool { return !in(h) })
	if n < 0 {
		n = len(holds)
	}
	return holds[:n], holds[n:]
}

// noDevices is where the devices of every pool begin.
var noDevices = immutable.NewSortedMap[string, *Device](deviceNames{})

// deviceNames orders the keys of Pool.devices.
type deviceNames struct{}

func (deviceNames) Compare(a, b string) int { return strings.Compare(a, b) }
