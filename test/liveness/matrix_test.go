// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"flag"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/go-logr/logr"
)

var everyNth = flag.Int("every", 61, "play every n-th entry of the fault matrix")

// However a write fails, and whenever the scheduler ends: no device is held for nobody, none is held twice, and nobody waits who
// could run.
func TestFaultMatrix(t *testing.T) {
	begin, played, entry, byChance := time.Now(), 0, 0, 0
	every := *everyNth
	if testing.Short() {
		every *= 4
	}
	all := situations()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		t.Run(name, func(t *testing.T) {
			for _, noFence := range []bool{false, true} {
				situation := all[name]
				situation.NoFence = noFence
				if needsFence(situation) {
					continue
				}
				h, differences := run(t, situation, logr.Discard())
				if len(differences)+len(h.unmet) > 0 {
					t.Fatalf("without another fault: %q, not met: %v\n%s", differences, h.unmet, situation.Code())
				}
				writes := h.requests[h.undoing:]
				if len(writes) == 0 {
					t.Error("it has no writes that could fail")
				}
				t.Logf("writes: %v", writes)
				for _, scenario := range matrix(situation, h.requests, h.undoing) {
					if entry++; entry%every != 0 {
						continue
					}
					played++
					met, differences := playEntry(t, scenario)
					if len(differences) > 0 {
						t.Errorf("%q\n%s", differences, scenario.Code())
					}
					switch {
					case met:
					case comesByChance(t, situation, scenario.Steps[0].(Fail)):
						byChance++
					default:
						t.Errorf("its fault was not met\n%s", scenario.Code())
					}
				}
			}
		})
	}
	t.Logf("%d of %d entries, %.1f per second; %d were not met because their write comes by chance", played, entry, float64(played)/time.Since(begin).Seconds(), byChance)
	if played > 100 && byChance*20 > played {
		t.Error("more than a twentieth was not met")
	}
}

// plays are how often an entry of the matrix is played until its fault is met: the write may come in one play and not in another one.
const plays = 10

// playEntry plays an entry of the matrix until its fault is met, which is its first step.
func playEntry(t *testing.T, scenario Scenario) (met bool, differences []string) {
	for range plays {
		h, found := run(t, scenario, logr.Discard())
		met, differences = !slices.Contains(h.unmet, 0), append(differences, found...)
		if met || len(differences) > 0 {
			break
		}
	}
	return met, differences
}

// comesByChance tells whether the write that an entry has fail does not come each time in its situation, even if nothing fails.
func comesByChance(t *testing.T, situation Scenario, fail Fail) bool {
	for range 2 * plays {
		h, _ := run(t, situation, logr.Discard())
		writes := slices.DeleteFunc(h.requests, func(r request) bool { return r != request{fail.Verb, fail.What} })
		if len(writes) <= fail.After {
			return true
		}
	}
	return false
}
