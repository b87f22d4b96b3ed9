// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package cycle

import (
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/binding"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// Progress is what was done for a pod from Reserve on, for Unreserve to undo.
type Progress struct {
	// Reserved are the allocations in flight, of which others of the pod's group have decided the first ones.
	Reserved        []tracker.Reservation
	DecidedByOthers int
	// Joined are claims that others of the pod's group have had allocated since PreFilter. They are like any claim
	// that is allocated already: the pod does not hold the devices, and never writes the allocation again.
	Joined []*resourceapi.ResourceClaim
	// Usage is that on which this pod's were decided.
	Usage usage.View
	// Writes are the claims that PreBind tried to change.
	Writes []*binding.Write
	// Sent tells that PreBind has succeeded, so that the pod may have been sent to be bound.
	Sent bool
	// Why PreBind has failed, empty if it has not.
	Why string
	// GaveWay tells that it was at the fence, so that the pod makes a pause.
	GaveWay bool
	// Extended is about the claim for the pod's extended resources.
	Extended extended.Binding
}

// Allocation returns the allocation that was decided for the claim, nil if it had one already.
func (b *Progress) Allocation(claim *resourceapi.ResourceClaim) *resourceapi.AllocationResult {
	for _, r := range b.Reserved {
		if r.Claim.UID == claim.UID {
			return r.Allocation
		}
	}
	return nil
}

// DecidedOn returns the usage on which the claim's allocation was decided for this pod, empty if it was not.
func (b *Progress) DecidedOn(claim *resourceapi.ResourceClaim) usage.View {
	for _, r := range b.Reserved[b.DecidedByOthers:] {
		if r.Claim.UID == claim.UID {
			return b.Usage
		}
	}
	return usage.View{}
}

// BindingClaims are the pod's claims as they were when it was reserved, with the one that has been made for its extended resources.
func (c *State) BindingClaims() []podclaims.Claim {
	claims := slices.Clone(c.Claims)
	for i := range claims {
		for _, joined := range c.Binding.Joined {
			if joined.UID == claims[i].Claim.UID {
				claims[i].Claim = joined
			}
		}
	}
	if created := c.Binding.Extended.Created; created != nil {
		claims = append(claims, podclaims.Claim{Claim: created, User: podclaims.UserOf(c.Extended.Pod)})
	}
	return claims
}

// BoundClaims are the pod's claims as they were written last or, if there was nothing to write, as they were found.
func (c *State) BoundClaims() []*resourceapi.ResourceClaim {
	bound := c.BindingClaims()
	claims := make([]*resourceapi.ResourceClaim, len(bound))
	for i, pc := range bound {
		claims[i] = pc.Claim
		for _, w := range c.Binding.Writes {
			if w.Planned.UID == pc.Claim.UID {
				claims[i] = w.Written
			}
		}
	}
	return claims
}

// UserOf returns whom a claim of the pod is reserved for.
func (c *State) UserOf(claim types.UID) types.UID {
	for _, pc := range c.BindingClaims() {
		if pc.Claim.UID == claim {
			return pc.User.UID
		}
	}
	return ""
}

// ChangesExtendedClaims tells whether PreBind has to make or to remove a claim for extended resources.
func (c *State) ChangesExtendedClaims() bool {
	wanted := c.Binding.Extended.Variant
	return c.Extended != nil && (len(c.Extended.Leftovers) > 0 || wanted != nil && wanted.Claim != nil)
}
