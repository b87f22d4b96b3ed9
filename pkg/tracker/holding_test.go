// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/usage"
)

func TestHolding(t *testing.T) {
	allocatedClaim, free := claim("allocated", "ua", 4, gpu1), claim("free", "uf", 5)
	ofGroup, unborn := claim("of-group", "ug", 6), claim("unborn", "uu", 0)
	unborn.ResourceVersion = ""
	tr := listed(t, 10, allocatedClaim, free, ofGroup)
	must(t, tr.Reserve(tr.Snapshot().Usage, "member", []Reservation{
		{Claim: unborn, Allocation: allocation(), Group: "g"}, {Claim: ofGroup, Allocation: allocation(), Group: "g"},
	}))
	born := claim("unborn", "ub", 11)
	must(t, tr.Move(unborn.UID, born))
	reserve(t, tr, podB, free, gpu0)
	if _, ok := tr.Share("uf", podA); !ok {
		t.Fatal("nothing is in flight")
	}
	tests := map[string]struct {
		ref      usage.ClaimRef
		claim    *resourceapi.ResourceClaim
		inFlight bool
		owners   []types.UID
		group    types.UID
	}{
		"allocated":                 {ref: usage.RefOf(allocatedClaim), claim: allocatedClaim},
		"in flight for two pods":    {ref: usage.RefOf(free), claim: free, inFlight: true, owners: []types.UID{podA, podB}},
		"in flight for a group":     {ref: usage.RefOf(ofGroup), claim: ofGroup, inFlight: true, owners: []types.UID{"member"}, group: "g"},
		"created, for a group":      {ref: usage.RefOf(born), inFlight: true, owners: []types.UID{"member"}, group: "g"},
		"another claim of a name":   {ref: usage.ClaimRef{UID: "other", Namespace: free.Namespace, Name: free.Name}},
		"a claim that is not there": {ref: usage.ClaimRef{UID: "gone", Namespace: "x", Name: "gone"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			got := tr.Holding(tc.ref)
			if got.Claim != tc.claim {
				t.Errorf("claim %v, want %v", got.Claim, tc.claim)
			}
			if (got.InFlight != nil) != tc.inFlight {
				t.Errorf("in flight %v, want any: %t", got.InFlight, tc.inFlight)
			}
			if diff := cmp.Diff(tc.owners, got.Owners); diff != "" {
				t.Errorf("owners (-want +got):\n%s", diff)
			}
			if got.Group != tc.group {
				t.Errorf("group %q, want %q", got.Group, tc.group)
			}
		})
	}
	if diff := cmp.Diff([]usage.ClaimRef{usage.RefOf(free)}, tr.InFlightFor(podA)); diff != "" {
		t.Errorf("in flight for pod A (-want +got):\n%s", diff)
	}
	tr.Release("uf", podA)
	if got := tr.InFlightFor(podA); len(got) != 0 {
		t.Errorf("in flight for pod A after it has let go: %v", got)
	}
	if got := tr.Holding(usage.RefOf(free)).Owners; !cmp.Equal(got, []types.UID{podB}) {
		t.Errorf("owners after pod A has let go: %v", got)
	}
}
