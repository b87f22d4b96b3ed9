// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
)

// Nobody is tried again and again, or with all others, for what only one can have.
func TestStorms(t *testing.T) {
	const waiting, ends = 20, 10
	places := []Step{Claim{Name: "c", Ask: Ask{GPUs: 1}}}
	for i := range resourceapi.ResourceClaimReservedForMaxSize + waiting {
		places = append(places, Pod{Name: fmt.Sprintf("p%d", i), Claims: []string{"c"}})
		if i == 0 || i == resourceapi.ResourceClaimReservedForMaxSize-1 {
			places = append(places, Wait{time.Second})
		}
	}
	for i := range ends {
		places = append(places, Wait{20 * time.Second}, Delete{Pod: fmt.Sprintf("p%d", i), Now: true})
	}
	for name, tc := range map[string]struct {
		scenario Scenario
		bound    int
		attempts int64 // at most
	}{
		"one place in a claim is for one of those that wait": {
			scenario: Scenario{Nodes: []Node{{Name: "a", GPUs: 1}}, Steps: places},
			bound:    resourceapi.ResourceClaimReservedForMaxSize + ends,
			attempts: resourceapi.ResourceClaimReservedForMaxSize + waiting + 2*ends, // each when it comes, and one for each place
		},
	} {
		t.Run(name, func(t *testing.T) {
			h, differences := run(t, tc.scenario, logger())
			for _, difference := range differences {
				t.Error(difference)
			}
			if len(h.bound) != tc.bound {
				t.Errorf("%d pods are bound, want %d", len(h.bound), tc.bound)
			}
			t.Logf("%d attempts", h.attempts)
			if h.attempts > tc.attempts {
				t.Errorf("%d attempts, want at most %d", h.attempts, tc.attempts)
			}
		})
	}
}
