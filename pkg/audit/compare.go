// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"cmp"
	"fmt"
	"slices"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/sets"

	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// Kind says in what way an account is wrong.
type Kind string

// Kinds of differences.
const (
	// Missing: the API has a claim that is not known.
	Missing Kind = "missing"
	// Gone: a claim is known that the API does not have.
	Gone Kind = "gone"
	// Outdated: a claim is known in a version that is not the API's.
	Outdated Kind = "outdated"
	// Usage: what a claim is said to hold is not what its allocations name.
	Usage Kind = "usage"
)

// Kinds are all kinds of differences.
var Kinds = []Kind{Missing, Gone, Outdated, Usage}

// Difference is one thing that is wrong.
type Difference struct {
	Kind   Kind
	Claim  usage.ClaimRef
	Detail string
}

// Compare compares an account with all claims that the API had at the account's version, ordered by claim.
//
// A claim that is known in a version later than that has been written by ourselves since, and is not compared with the
// list. The usage is computed anew from the account's claims and what is in flight.
func Compare(account tracker.Account, listed []*resourceapi.ResourceClaim) []Difference {
	var found []Difference
	inAPI := make(map[types.UID]string, len(listed))
	for _, claim := range listed {
		inAPI[claim.UID] = claim.ResourceVersion
	}
	known := sets.New[types.UID]()
	replaced := sets.New[types.NamespacedName]()
	index := usage.NewIndex()
	flying := map[types.UID]tracker.InFlight{}
	for _, f := range account.InFlight {
		flying[f.Claim.UID] = f
	}
	for _, claim := range account.Claims {
		ref := usage.RefOf(claim)
		known.Insert(claim.UID)
		index.Set(ref, claim.Status.Allocation, flying[claim.UID].Allocation)
		delete(flying, claim.UID)
		if later(claim.ResourceVersion, account.Version) {
			replaced.Insert(nameOf(claim))
			continue
		}
		switch version, ok := inAPI[claim.UID]; {
		case !ok:
			found = append(found, Difference{Gone, ref, "known in version " + claim.ResourceVersion})
		case version != claim.ResourceVersion:
			found = append(found, Difference{Outdated, ref, fmt.Sprintf("known in version %s, the API has %s", claim.ResourceVersion, version)})
		}
	}
	for _, f := range flying {
		index.Set(f.Claim, nil, f.Allocation)
	}
	for _, claim := range listed {
		// Of a claim that was deleted and created again since, only the later one is known.
		if !known.Has(claim.UID) && !replaced.Has(nameOf(claim)) {
			found = append(found, Difference{Missing, usage.RefOf(claim), "the API has version " + claim.ResourceVersion})
		}
	}
	found = append(found, compareUsage(account.Usage, index.View())...)
	slices.SortFunc(found, func(a, b Difference) int {
		return cmp.Or(cmp.Compare(a.Claim.String(), b.Claim.String()), cmp.Compare(a.Claim.UID, b.Claim.UID), cmp.Compare(a.Kind, b.Kind),
			cmp.Compare(a.Detail, b.Detail))
	})
	return found
}

// compareUsage returns a difference for each claim and device that is said to be held in another way than it is.
func compareUsage(said, computed usage.View) []Difference {
	var found []Difference
	compare := func(id usage.DeviceID) {
		a, b := said.Device(id).Holders(), computed.Device(id).Holders()
		if slices.EqualFunc(a, b, usage.Holder.Equal) {
			return
		}
		told := sets.New[usage.ClaimRef]()
		for _, h := range slices.Concat(a, b) {
			if told.Has(h.Claim) {
				continue
			}
			told.Insert(h.Claim)
			is, should := holdsOf(h.Claim, a), holdsOf(h.Claim, b)
			switch {
			case slices.EqualFunc(is, should, usage.Holder.Equal):
			case len(should) == 0:
				found = append(found, Difference{Usage, h.Claim, "device " + id.String() + " is said to be held, and is not allocated"})
			case len(is) == 0:
				found = append(found, Difference{Usage, h.Claim, "device " + id.String() + " is allocated, and not said to be held"})
			default:
				found = append(found, Difference{Usage, h.Claim, "device " + id.String() + " is held in another way than it is said to be"})
			}
		}
	}
	for id := range said.All() {
		compare(id)
	}
	for id := range computed.All() {
		if said.Device(id) == nil {
			compare(id)
		}
	}
	return found
}

func holdsOf(claim usage.ClaimRef, holders []usage.Holder) []usage.Holder {
	return slices.DeleteFunc(slices.Clone(holders), func(h usage.Holder) bool { return h.Claim != claim })
}

// later tells whether resource version a comes after b.
func later(a, b string) bool {
	order, err := resourceversion.CompareResourceVersion(a, b)
	return err == nil && order > 0
}

func nameOf(claim *resourceapi.ResourceClaim) types.NamespacedName {
	return types.NamespacedName{Namespace: claim.Namespace, Name: claim.Name}
}
