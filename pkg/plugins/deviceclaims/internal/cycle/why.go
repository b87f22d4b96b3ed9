// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cycle

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/tracker"
)

// WhyChosen says by which rule the devices were chosen.
func (c *State) WhyChosen(pod *v1.Pod, node string) string {
	why := "first devices that fit"
	if c.Policy == allocator.SmallestFit {
		why = "smallest devices that fit"
	}
	if pod.Status.NominatedNodeName == node {
		why += ", on the node that the pod is nominated to"
	}
	if c.Failed != nil {
		why += ", without those that failed for the pod if possible"
	}
	return why
}

// WhyGivenBack says why what was done for a pod is undone.
func (b *Progress) WhyGivenBack() string {
	switch {
	case b.Why != "":
		return b.Why
	case b.Sent:
		return "the pod could not be bound"
	}
	return "another plugin kept the pod from being bound"
}

// Taken are the claims that were allocated or reserved for the pod, the last one first: written, or in flight.
func (b *Progress) Taken() []tracker.Reservation {
	var taken []tracker.Reservation
	known := sets.New[types.UID]()
	for _, w := range slices.Backward(b.Writes) {
		known.Insert(w.Planned.UID)
		stoodThere := w.Allocation == nil || w.Written != nil // else the API server has refused it, which is the end of what was in flight
		if !w.MayStand() && !w.Withdrawn && stoodThere {
			continue
		}
		taken = append(taken, tracker.Reservation{Claim: w.Planned, Allocation: w.Result()})
	}
	for _, r := range slices.Backward(b.Reserved) {
		if !known.Has(r.Claim.UID) {
			taken = append(taken, r)
		}
	}
	return taken
}
