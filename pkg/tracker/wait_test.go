// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package tracker

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestWaitObserved(t *testing.T) {
	tests := map[string]struct {
		version string
		before  []storeStep
		after   []storeStep // each must leave it waiting but the last one
	}{
		"the event was faster": {
			version: "12", before: []storeStep{seesList(10), sees(claim("a", "ua", 12, gpu0))},
		},
		"a later event was faster": {
			version: "12", before: []storeStep{seesList(10), sees(claim("a", "ua", 14, gpu0))},
		},
		"the write changed nothing, its version is an old one": {
			version: "7", before: []storeStep{seesList(10, claim("a", "ua", 7, gpu0))},
		},
		"the event comes": {
			version: "12", before: []storeStep{seesList(10)},
			after: []storeStep{sees(claim("b", "ub", 11)), sees(claim("a", "ua", 12, gpu0))},
		},
		"an event of another claim comes": {
			version: "12", before: []storeStep{seesList(10)},
			after: []storeStep{sees(claim("b", "ub", 13))},
		},
		"the answer to the write is known": {
			version: "12", before: []storeStep{seesList(10, claim("a", "ua", 5))},
			after: []storeStep{assumes(claim("a", "ua", 12, gpu0)), sees(claim("a", "ua", 12, gpu0))},
		},
		"a bookmark comes": {
			version: "12", before: []storeStep{seesList(10)},
			after: []storeStep{func(tb testing.TB, tr *Tracker) { must(tb, tr.Store().(store).Bookmark("15")) }},
		},
		"the claim is deleted": {
			version: "12", before: []storeStep{seesList(10, claim("a", "ua", 5))},
			after: []storeStep{seesDeletion(claim("a", "ua", 13, gpu0))},
		},
		"lists come": {
			version: "12", before: []storeStep{seesList(10)},
			after: []storeStep{seesList(11), seesList(20)},
		},
		"the first list comes": {
			version: "12",
			after:   []storeStep{seesList(20)},
		},
		"a version with more digits": {
			version: "100", before: []storeStep{seesList(99)},
			after: []storeStep{sees(claim("a", "ua", 100, gpu0))},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tr := newTracker(t)
				for _, step := range tc.before {
					step(t, tr)
				}
				done := make(chan error, 1)
				go func() { done <- tr.WaitObserved(t.Context(), tc.version) }()
				for _, step := range tc.after {
					synctest.Wait()
					select {
					case err := <-done:
						t.Fatalf("returned too early: %v", err)
					default:
					}
					step(t, tr)
				}
				synctest.Wait()
				select {
				case err := <-done:
					must(t, err)
				default:
					t.Fatal("still waits")
				}
				if !tr.mutex.TryLock() {
					t.Fatal("the tracker is locked")
				}
				if len(tr.waiters) > 0 {
					t.Error("the tracker still knows who waited")
				}
			})
		})
	}
}

func TestWaitObservedEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := listed(t, 10)
		cause := errors.New("patience is over")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, cause)
		defer cancel()
		err := tr.WaitObserved(ctx, "11")
		if !errors.Is(err, cause) || !strings.Contains(err.Error(), `at resourceVersion "10", not yet at 11`) {
			t.Errorf("error %v", err)
		}
		if len(tr.waiters) > 0 {
			t.Error("the tracker still knows who waited")
		}
	})
}

func TestWaitObservedRefusesWhatCannotBeCompared(t *testing.T) {
	tr := listed(t, 10)
	for _, version := range []string{"", "0", "x", "007"} {
		if err := tr.WaitObserved(t.Context(), version); !errors.Is(err, ErrClaimVersion) {
			t.Errorf("version %q: %v", version, err)
		}
	}
}
