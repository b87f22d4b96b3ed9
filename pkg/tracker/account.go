// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"maps"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/pkg/usage"
)

// Account is the whole state of a tracker at one moment, for comparing it with
// the API.
type Account struct {
	// Version is the resource version up to which the list and the watch have
	// been applied, "" before the first list. What is known of a claim may be
	// later: the answer to a write of ours.
	Version string
	// Claims are all claims known, in no particular order.
	Claims []*resourceapi.ResourceClaim
	// InFlight are the allocations decided and not known to be written.
	InFlight []InFlight
	// Usage is who holds what.
	Usage usage.View
}

// InFlight is an allocation that has been decided and is not known to be written.
type InFlight struct {
	Claim      usage.ClaimRef
	Allocation *resourceapi.AllocationResult
	// Owners are the pods that have an interest in it, ordered.
	Owners []types.UID
}

// Account returns the whole state. It costs in proportion to the number of
// claims, with the lock held: it is for what runs every few minutes.
func (t *Tracker) Account() Account {
	t.mutex.Lock()
	defer t.mutex.Unlock()
	account := Account{
		Version: t.claims.observed,
		Claims:  slices.Collect(maps.Values(t.claims.byName)),
		Usage:   t.index.View(),
	}
	for _, pending := range t.inFlight {
		account.InFlight = append(account.InFlight,
			InFlight{Claim: pending.claim, Allocation: pending.allocation, Owners: sets.List(pending.owners)})
	}
	return account
}
