// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"maps"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/reconcile"
)

// withheld is what keeps claims off devices that are well.
type withheld struct {
	mu       sync.Mutex
	occupied []occupiedPlace
	// notReady is why claims cannot be prepared on the node, in a word; empty if they can.
	notReady string
	// foreign is who uses GPUs that no claim has, by GPU.
	foreign map[string]foreignUse
	// listed is how many devices device plugins had when that was found out.
	listed int
}

// setOccupied tells what is held by claims that are not allocated any more, and reports whether that was something else before. The list
// must not be changed afterwards.
func (w *withheld) setOccupied(places []occupiedPlace) (changed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	changed = !slices.EqualFunc(w.occupied, places, func(a, b occupiedPlace) bool { return a.equals(b) })
	w.occupied = places
	return changed
}

// setNotReady tells why claims cannot be prepared, "" if they can, and reports whether that is news.
func (w *withheld) setNotReady(why string) (changed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	changed = w.notReady != why
	w.notReady = why
	return changed
}

func (w *withheld) foreignUses() map[string]foreignUse {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.foreign
}

// listedByPlugins is how many devices device plugins had by the last look that has found that out.
func (w *withheld) listedByPlugins() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.listed
}

// setForeign tells who uses GPUs without a claim, and how many devices device plugins have. It reports whether that changes what is
// published. The map must not be changed afterwards.
func (w *withheld) setForeign(uses map[string]foreignUse, listed int) (changed bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	tainted := func(uses map[string]foreignUse) map[string]resourceapi.DeviceTaint {
		taints := map[string]resourceapi.DeviceTaint{}
		for gpu, use := range uses {
			if use.takesOut() {
				taints[gpu] = use.taint()
			}
		}
		return taints
	}
	changed = w.listed != listed || !maps.Equal(tainted(w.foreign), tainted(uses))
	w.foreign, w.listed = uses, listed
	return changed
}

// of returns what keeps claims off the GPU, or off a place of it, and off the node.
func (w *withheld) of(gpu string) (occupied []occupiedPlace, foreign *foreignUse, notReady string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, place := range w.occupied {
		if place.gpu == "" || place.gpu == gpu {
			occupied = append(occupied, place)
		}
	}
	if use, ok := w.foreign[gpu]; ok {
		foreign = &use
	}
	return occupied, foreign, w.notReady
}

// taints are those of a device of the GPU.
func (w *withheld) taints(gpu *discovery.GPU, offer *discovery.Offer) (list []resourceapi.DeviceTaint) {
	occupied, foreign, notReady := w.of(gpu.Name)
	if notReady != "" {
		list = append(list, notReadyTaint(notReady))
	}
	// One is enough: of a key and an effect there can be one only.
	if i := slices.IndexFunc(occupied, func(o occupiedPlace) bool { return o.excludes(gpu, offer) }); i >= 0 {
		list = append(list, occupied[i].taint())
	}
	if foreign != nil && foreign.takesOut() {
		list = append(list, foreign.taint())
	}
	return list
}

// reasonOccupied is the key of the taint of what is held by a claim which is not allocated any more. The scheduler takes it for
// free, and no other claim could be prepared.
const reasonOccupied health.Reason = "occupied"

// occupiedPlace is what such a claim holds: a place on a GPU or, if at is nil, all of it. Without a name it is each of the node's GPUs.
type occupiedPlace struct {
	gpu   string
	at    *ledger.Partition
	claim types.UID
	// quarantined: something of the claim, if there is one, could not be undone. Otherwise why tells why the claim keeps it.
	quarantined bool
	why         reconcile.Why
	// since is zero if that is not recorded.
	since time.Time
}

// excludes tells whether a device of the GPU cannot be had beside it.
func (o *occupiedPlace) excludes(gpu *discovery.GPU, offer *discovery.Offer) bool {
	return o.at.Overlaps(placeOf(offer)) || o.at.Size > 0 && o.at.ComputeSize == 0 && !gpu.Beside(o.at.ProfileID, offer)
}

func (o *occupiedPlace) equals(p occupiedPlace) bool {
	if (o.at == nil) != (p.at == nil) || o.at != nil && *o.at != *p.at {
		return false
	}
	return o.gpu == p.gpu && o.claim == p.claim && o.quarantined == p.quarantined && o.why == p.why
}

func (o *occupiedPlace) taint() resourceapi.DeviceTaint {
	return resourceapi.DeviceTaint{
		Key: TaintKey(reasonOccupied), Value: string(o.claim), Effect: resourceapi.DeviceTaintEffectNoSchedule,
		TimeAdded: addedAt(o.since),
	}
}

// placeOf is where an offer is on its GPU, nil if it is all of it.
func placeOf(offer *discovery.Offer) *ledger.Partition {
	p := offer.Partition
	if p == nil {
		return nil
	}
	at := &ledger.Partition{Profile: p.Profile.Name, ProfileID: p.Profile.ID, Start: p.At.Start, Size: p.At.Size}
	if p.Compute != nil {
		at.ComputeStart, at.ComputeSize = p.Compute.Start, p.Compute.Size
	}
	return at
}

// taintEffects by severity (resource.k8s.io/v1, DeviceTaintEffect).
var taintEffects = map[health.Severity]resourceapi.DeviceTaintEffect{
	health.Notice: resourceapi.DeviceTaintEffectNone,
	health.Avoid:  resourceapi.DeviceTaintEffectNoSchedule,
	health.Evict:  resourceapi.DeviceTaintEffectNoExecute,
}

// TaintKey is the key of the taint for a reason, such as "gpu.nvidia.com/xid".
func TaintKey(reason health.Reason) string { return Name + "/" + string(reason) }

// reasonNotReady is the key of the taint of all devices while claims cannot be prepared on the node.
const reasonNotReady health.Reason = "not-ready"

func notReadyTaint(why string) resourceapi.DeviceTaint {
	return resourceapi.DeviceTaint{Key: TaintKey(reasonNotReady), Value: why, Effect: resourceapi.DeviceTaintEffectNoSchedule}
}

// taints are what a device's faults ask for, one for each reason: several MIG devices of a GPU may have a fault of the same. A taint is as
// old as the oldest of its faults: the API server would take the time at which it is written, anew whenever the slices were deleted.
func taints(verdict health.Verdict) []resourceapi.DeviceTaint {
	var list []resourceapi.DeviceTaint
	at := map[health.Reason]int{}
	for _, fault := range verdict.Faults {
		since := addedAt(fault.Since)
		if i, ok := at[fault.Reason]; ok {
			if since.Before(list[i].TimeAdded) {
				list[i].TimeAdded = since
			}
			continue
		}
		at[fault.Reason] = len(list)
		list = append(list, resourceapi.DeviceTaint{
			Key:       TaintKey(fault.Reason),
			Value:     fault.Value,
			Effect:    taintEffects[fault.Severity()],
			TimeAdded: since,
		})
	}
	return list
}

// addedAt is a time as the API keeps it; nil if it is not known.
func addedAt(t time.Time) *metav1.Time {
	if t.IsZero() {
		return nil
	}
	return &metav1.Time{Time: t.Truncate(time.Second)}
}
