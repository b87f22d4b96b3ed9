package driver

import (
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/health"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/reconcile"
)

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

// overlaps tells whether it keeps others from that place of the GPU.
func (o *occupiedPlace) overlaps(gpu string, at *ledger.Partition) bool {
	return (o.gpu == "" || o.gpu == gpu) && o.at.Overlaps(at)
}

func (o *occupiedPlace) equals(p occupiedPlace) bool {
	if (o.at == nil) != (p.at == nil) || o.at != nil && *o.at != *p.at {
		return false
	}
	return o.gpu == p.gpu && o.claim == p.claim && o.quarantined == p.quarantined && o.why == p.why
}

func (o *occupiedPlace) taint() resourceapi.DeviceTaint {
	return resourceapi.DeviceTaint{Key: TaintKey(reasonOccupied), Value: string(o.claim), Effect: resourceapi.DeviceTaintEffectNoSchedule, TimeAdded: addedAt(o.since)}
}

// setOccupied tells what is held by claims that are not allocated any more, and reports whether that was something else before. The list
// must not be changed afterwards.
func (h *Hardware) setOccupied(places []occupiedPlace) (changed bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	changed = !slices.EqualFunc(h.occupied, places, func(a, b occupiedPlace) bool { return a.equals(b) })
	h.occupied = places
	return changed
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

// placeOf is where a device of a ResourceSlice is. Of one that is not offered now no more is known than the GPU.
func (h *Hardware) placeOf(device string) (gpu string, at *ledger.Partition) {
	h.mu.Lock()
	node := h.node
	h.mu.Unlock()
	if node != nil {
		if found, offer, err := node.Find(device); err == nil {
			return found.Name, placeOf(offer)
		}
	}
	return h.gpuOf(device), nil
}
