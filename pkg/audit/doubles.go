// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"iter"
	"slices"
	"time"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/usage"
)

// DoubleHold is a device that several claims hold of which one holds it for itself alone, or of which, or of what it takes, too
// much is held.
type DoubleHold struct {
	Device usage.DeviceID
	// Claims are those that must not hold it together, ordered by UID: at least two, unless What is set.
	Claims []usage.ClaimRef
	// What is the capacity or counter of which there is too little, empty if a device is held twice.
	What string
	// Since is when it was first seen.
	Since time.Time
}

// Claimants returns the claims that have the device in the API, if they must not have it together: several claims, of
// which at least one holds the device for itself alone (KEP-5075). Admin access holds nothing, and what is in
// flight is not written.
func Claimants(device *usage.Device) []usage.ClaimRef {
	var claims []usage.ClaimRef
	alone := false
	for _, h := range device.Holders() {
		if h.InFlight {
			continue
		}
		alone = alone || h.ShareID == nil
		if !slices.Contains(claims, h.Claim) {
			claims = append(claims, h.Claim)
		}
	}
	if !alone || len(claims) < 2 {
		return nil
	}
	return claims
}

// Doubles remembers which devices are held twice, and since when. Two schedulers that allocate the same device at the
// same time are no finding, because one of them gives way (pkg/fence): a double hold counts when it has lasted for the
// grace period. Not safe for concurrent use.
type Doubles struct {
	grace time.Duration
	known map[usage.DeviceID]*double
}

type double struct {
	hold DoubleHold
	told bool
}

// NewDoubles returns a memory of nothing.
func NewDoubles(grace time.Duration) *Doubles {
	return &Doubles{grace: grace, known: map[usage.DeviceID]*double{}}
}

// Look looks at the given devices, and at those that were held twice the last time. It returns the double holds that
// have lasted for the grace period and were not returned before, ordered by device; with another claim on the device a
// hold is another one. over are those returned before that are no more. The cost depends on how many devices are held in
// the pools of the given ones.
func (d *Doubles) Look(now time.Time, view usage.View, inv *inventory.View, devices iter.Seq[usage.DeviceID]) (found, over []DoubleHold) {
	for device := range devices {
		if claims, _ := conflict(device, view, inv); d.known[device] == nil && claims != nil {
			d.known[device] = &double{}
		}
	}
	for device, known := range d.known {
		claims, what := conflict(device, view, inv)
		if claims == nil && known.told && known.hold.What != "" && poolOf(device, inv) == nil && len(written(view.Device(device))) > 0 {
			continue // what there is of it is not known just now
		}
		if !slices.Equal(claims, known.hold.Claims) || what != known.hold.What {
			if known.told && claims == nil {
				over = append(over, known.hold)
			}
			*known = double{hold: DoubleHold{Device: device, Claims: claims, What: what, Since: now}}
		}
		switch {
		case claims == nil:
			delete(d.known, device)
		case !known.told && now.Sub(known.hold.Since) >= d.grace:
			known.told = true
			found = append(found, known.hold)
		}
	}
	slices.SortFunc(found, byDevice)
	slices.SortFunc(over, byDevice)
	return found, over
}

// conflict returns the claims that must not hold a device together.
func conflict(device usage.DeviceID, view usage.View, inv *inventory.View) (claims []usage.ClaimRef, what string) {
	if claims := Claimants(view.Device(device)); claims != nil {
		return claims, ""
	}
	return Overdrawn(device, view, inv)
}

// Next says when Look may find something without any change: at the end of a grace period. False means never.
func (d *Doubles) Next() (next time.Time, ok bool) {
	for _, known := range d.known {
		if end := known.hold.Since.Add(d.grace); !known.told && (!ok || end.Before(next)) {
			next, ok = end, true
		}
	}
	return next, ok
}

// Len returns the number of devices found to be held twice and not over yet.
func (d *Doubles) Len() int {
	n := 0
	for _, known := range d.known {
		if known.told {
			n++
		}
	}
	return n
}

func byDevice(a, b DoubleHold) int { return a.Device.Compare(b.Device) }
