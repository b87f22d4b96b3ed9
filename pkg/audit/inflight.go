// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// Ages remembers since when allocations are in flight. Not safe for concurrent use.
type Ages struct {
	since map[types.UID]time.Time // by claim
}

// NewAges returns a memory of nothing.
func NewAges() *Ages { return &Ages{since: map[types.UID]time.Time{}} }

// Stale is an allocation that is in flight for nobody.
type Stale struct {
	tracker.InFlight
	// Since is when it was first seen.
	Since time.Time
}

// Look notes what is in flight. It returns what has been so for longer than the limit although none of the pods is being
// bound, ordered by claim. The binding of a pod may itself take long.
func (a *Ages) Look(now time.Time, inFlight []tracker.InFlight, limit time.Duration, binding func(pod types.UID) bool) []Stale {
	next := make(map[types.UID]time.Time, len(inFlight))
	var found []Stale
	for _, f := range inFlight {
		since, ok := a.since[f.Claim.UID]
		if !ok {
			since = now
		}
		next[f.Claim.UID] = since
		if now.Sub(since) > limit && !slices.ContainsFunc(f.Owners, binding) {
			found = append(found, Stale{InFlight: f, Since: since})
		}
	}
	a.since = next
	slices.SortFunc(found, func(a, b Stale) int { return compareRefs(a.Claim, b.Claim) })
	return found
}

func compareRefs(a, b usage.ClaimRef) int {
	return slices.Compare([]string{a.String(), string(a.UID)}, []string{b.String(), string(b.UID)})
}
