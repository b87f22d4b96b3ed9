// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// Judge decides whether an allocation fits on top of those that were written
// before it. It looks at the devices alone: what they are, for which node, and
// whether the claim may have them, was the allocator's business.
//
//   - A device without a share is for one claim alone.
//   - What all shares of a device consume is at most its capacity (KEP-5075).
//   - What all held devices of a pool take of a shared counter is at most what
//     there is of it; a device takes it once, however many share it (KEP-4815).
//   - Where shares of a device are one namespace's, no other one has a share.
//   - Results with admin access take nothing (KEP-5018).
//
// What it costs grows with what the claim's devices have to do with, and not with
// what their pools hold.
type Judge struct {
	devices   func() *inventory.View
	strangers strangers
	// looks counts held devices and holds that were looked at, which is what judging costs.
	looks int
}

var _ tracker.Judge = &Judge{}

// NewJudge returns a Judge that knows of devices what the view says that it gets.
func NewJudge(devices func() *inventory.View) *Judge {
	return &Judge{devices: devices}
}

// Taken implements [tracker.Judge].
func (j *Judge) Taken(allocation *resourceapi.AllocationResult) { j.strangers.taken(allocation) }

// Judge implements [tracker.Judge].
func (j *Judge) Judge(c tracker.Case) tracker.Verdict {
	b := newBench(c, j)
	verdict := b.judge(false)
	if verdict.Outcome != tracker.Fits {
		return verdict
	}
	// Would it fit if all came first of which we do not know?
	if verdict = b.judge(true); verdict.Outcome == tracker.Lost {
		verdict.Outcome = tracker.Undecided
	}
	return verdict
}

// bench is one case with the devices that it is about.
type bench struct {
	tracker.Case
	by        *Judge
	inventory *inventory.View
	// node is the one for which the allocation is, empty if that may be several.
	node string
	// wants is what the claim takes, by device, in the order of its results.
	wants []want
	// either tells that holds count that may be earlier, not only those that are.
	either bool
}

// want is what a claim takes of one device.
type want struct {
	device usage.DeviceID
	// alone tells that the claim takes the device for itself.
	alone bool
	// shares are the claim's shares of the device.
	shares []*resourceapi.DeviceRequestAllocationResult
}

func newBench(c tracker.Case, j *Judge) *bench {
	b := &bench{Case: c, by: j, inventory: j.devices(), node: nodeOf(c.Allocation)}
	for i := range c.Allocation.Devices.Results {
		result := &c.Allocation.Devices.Results[i]
		if ptr.Deref(result.AdminAccess, false) {
			continue
		}
		device := usage.DeviceOf(result)
		at := slices.IndexFunc(b.wants, func(w want) bool { return w.device == device })
		if at < 0 {
			at = len(b.wants)
			b.wants = append(b.wants, want{device: device})
		}
		if w := &b.wants[at]; result.ShareID == nil {
			w.alone = true
		} else {
			w.shares = append(w.shares, result)
		}
	}
	return b
}

// judge decides with or without the holds that may be earlier. What is certain
// goes before what is not.
func (b *bench) judge(either bool) tracker.Verdict {
	b.either = either
	var unclear []tracker.Verdict
	for _, check := range []func() tracker.Verdict{b.checkHolders, b.checkNamespaces, b.checkCapacity, b.checkCounters} {
		switch verdict := check(); verdict.Outcome {
		case tracker.Lost:
			return verdict
		case tracker.Undecided:
			unclear = append(unclear, verdict)
		case tracker.Fits:
		}
	}
	if len(unclear) > 0 {
		return unclear[0]
	}
	return fits
}

var fits = tracker.Verdict{Outcome: tracker.Fits}

// before returns the holds on a device that count as earlier.
func (b *bench) before(id usage.DeviceID, device *usage.Device) []usage.Holder {
	var found []usage.Holder
	for _, holder := range device.Holders() {
		b.by.looks++
		switch b.Precedence(id, holder) {
		case tracker.Earlier:
			found = append(found, holder)
		case tracker.EitherWay:
			if b.either {
				found = append(found, holder)
			}
		case tracker.Later:
		}
	}
	return found
}

// unforeseen returns the first of the holds that was not there when the allocation
// was decided, nil if all were.
func (b *bench) unforeseen(id usage.DeviceID, holds []usage.Holder) *usage.Holder {
	decidedOn := b.DecidedOn.Device(id).Holders()
	at := slices.IndexFunc(holds, func(h usage.Holder) bool {
		return !slices.ContainsFunc(decidedOn, func(then usage.Holder) bool {
			then.InFlight = h.InFlight
			return then.Equal(h)
		})
	})
	if at < 0 {
		return nil
	}
	return &holds[at]
}

// checkHolders finds somebody who has a device that the claim wants alone, or who
// has one alone of which the claim wants a share.
func (b *bench) checkHolders() tracker.Verdict {
	for _, w := range b.wants {
		for _, holder := range b.before(w.device, b.Usage.Device(w.device)) {
			if w.alone || holder.ShareID == nil {
				return verdict(tracker.Lost, w.device, holder.Claim, "")
			}
		}
	}
	return fits
}

// checkNamespaces finds a share of another namespace where shares of a device are one namespace's. A claim that had the device when it was
// decided about is in use. It may come from a time when the node gave the device's shares to several, and would give way for ever.
func (b *bench) checkNamespaces() tracker.Verdict {
	for _, w := range b.wants {
		if slices.ContainsFunc(b.DecidedOn.Device(w.device).Holders(), func(h usage.Holder) bool { return h.Claim.UID == b.Claim.UID }) {
			continue
		}
		for _, holder := range b.before(w.device, b.Usage.Device(w.device)) {
			if holder.Claim.Namespace != b.Claim.Namespace && b.isApart(w.device) {
				return verdict(tracker.Lost, w.device, holder.Claim, "its shares are one namespace's")
			}
		}
	}
	return fits
}

func (b *bench) isApart(id usage.DeviceID) bool {
	devices := b.devicesOf(id)
	return len(devices) > 0 && !slices.ContainsFunc(devices, func(o inventory.Offer) bool { return !inventory.IsApart(id.Driver, o.Device) })
}

// checkCapacity adds up the shares of each device.
func (b *bench) checkCapacity() tracker.Verdict {
	unclear := fits
	for _, w := range b.wants {
		holds := b.before(w.device, b.Usage.Device(w.device))
		if len(holds) == 0 {
			continue
		}
		devices := b.devicesOf(w.device)
		if other := b.unforeseen(w.device, holds); other != nil && len(devices) == 0 {
			unclear = verdict(tracker.Undecided, w.device, other.Claim, "the device's capacity is not known")
		}
		var lacking resourceapi.QualifiedName
		for _, device := range devices {
			if lacking = overdrawn(device.Device, holds, w.shares); lacking == "" {
				break
			}
		}
		if lacking != "" {
			return verdict(tracker.Lost, w.device, holds[0].Claim, fmt.Sprintf("too little is left of capacity %s", lacking))
		}
	}
	return unclear
}

// overdrawn returns a capacity of which holds and shares together take more than
// the device has, "" if there is none.
func overdrawn(device *resourceapi.Device, holds []usage.Holder,
	shares []*resourceapi.DeviceRequestAllocationResult,
) resourceapi.QualifiedName {
	for name, capacity := range device.Capacity {
		left := amount.Of(capacity.Value)
		for i := range holds {
			left = left.Sub(amount.Of(holds[i].ConsumedCapacity[name]))
		}
		for _, share := range shares {
			left = left.Sub(amount.Of(share.ConsumedCapacity[name]))
		}
		if left.IsNegative() {
			return name
		}
	}
	return ""
}

// poolOf returns what is known of a pool, nil if that is nothing, or not all of it.
func (b *bench) poolOf(id usage.PoolID) *inventory.Pool {
	pool := b.inventory.Pool(inventory.PoolID(id))
	if pool == nil || pool.Problem != nil {
		return nil
	}
	return pool
}

// devicesOf returns what is known of a device that the claim wants, nothing if it is not known. Several nodes may have
// one of the name: then it is the allocation's node's, or else one for more than one node. If there are only those of
// others, its own is of another generation. Where the allocation is not for one node by name, the claim has what it
// wants if one of them is enough: a node must not keep others off with a device that nobody has.
func (b *bench) devicesOf(id usage.DeviceID) []inventory.Offer {
	pool := b.poolOf(id.PoolID())
	if pool == nil {
		return nil
	}
	all := pool.Devices(id.Device)
	for _, node := range []string{b.node, ""} {
		if of := offersOf(node, all); len(of) > 0 {
			return of
		}
	}
	if b.node != "" {
		return nil
	}
	return all
}

// offersOf are those that are for the node, or for more than one if it is empty.
func offersOf(node string, all []inventory.Offer) []inventory.Offer {
	return slices.DeleteFunc(slices.Clone(all), func(o inventory.Offer) bool { return o.Node() != node })
}

// nodeOf is the node for which an allocation is by its name, empty if there is none: it is for that node if a device is.
func nodeOf(allocation *resourceapi.AllocationResult) string {
	if allocation.NodeSelector == nil || len(allocation.NodeSelector.NodeSelectorTerms) != 1 {
		return ""
	}
	for _, field := range allocation.NodeSelector.NodeSelectorTerms[0].MatchFields {
		if field.Key == metav1.ObjectNameField && field.Operator == v1.NodeSelectorOpIn && len(field.Values) == 1 {
			return field.Values[0]
		}
	}
	return ""
}

func verdict(outcome tracker.Outcome, device usage.DeviceID, other usage.ClaimRef, detail string) tracker.Verdict {
	return tracker.Verdict{Outcome: outcome, Device: device, Other: other, Detail: detail}
}
