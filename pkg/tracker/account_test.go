// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/usage"
)

// An account is all layers at one moment.
func TestAccount(t *testing.T) {
	if got := newTracker(t).Account(); got.Version != "" || len(got.Claims)+len(got.InFlight) > 0 || got.Usage.Len() > 0 {
		t.Errorf("account of a tracker that has seen nothing: %+v", got)
	}

	tr := listed(t, 10, claim("a", "ua", 5, gpu1), claim("b", "ub", 6))
	a := allocation(gpu0)
	must(t, tr.Reserve(tr.Snapshot().Usage, podB, []Reservation{{Claim: claim("b", "ub", 6), Allocation: a}}))
	tr.Share("ub", podA)
	must(t, tr.Assume(claim("c", "uc", 12, gpu2))) // ahead of the watch
	must(t, tr.Store().(store).Bookmark("11"))
	got := tr.Account()

	if got.Version != "11" {
		t.Errorf("version %q, want that of the watch, 11", got.Version)
	}
	claims := map[types.UID]string{}
	for _, c := range got.Claims {
		claims[c.UID] = c.ResourceVersion
	}
	if diff := cmp.Diff(map[types.UID]string{"ua": "5", "ub": "6", "uc": "12"}, claims); diff != "" {
		t.Errorf("claims (-want +got):\n%s", diff)
	}
	want := []InFlight{{Claim: usage.RefOf(claim("b", "ub", 6)), Allocation: a, Owners: []types.UID{podA, podB}}}
	if diff := cmp.Diff(want, got.InFlight); diff != "" {
		t.Errorf("in flight (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string][]string{gpu0.String(): {"ub*"}, gpu1.String(): {"ua"}, gpu2.String(): {"uc"}}, heldOf(got.Usage)); diff != "" {
		t.Errorf("usage (-want +got):\n%s", diff)
	}
	must(t, tr.Store().Delete(claim("a", "ua", 13)))
	if n := len(got.Claims); n != 3 {
		t.Errorf("the account has changed: %d claims", n)
	}
}
