// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import "slices"

// attempts are how often a smaller scenario is played before it counts as harmless: goroutines run in any order.
const attempts = 3

// playsToShrink bounds the search.
const playsToShrink = 200

// Shrink returns a smaller scenario that still fails. It takes away steps and nodes as long as that helps.
func Shrink(s Scenario, fails func(Scenario) bool) Scenario {
	plays := 0
	still := func(smaller Scenario) bool {
		for range attempts {
			if plays++; plays > playsToShrink {
				return false
			}
			if fails(smaller) {
				return true
			}
		}
		return false
	}
	for {
		before := len(s.Steps) + len(s.Nodes)
		for size := max(1, len(s.Steps)/2); size > 0; size /= 2 {
			for i := 0; i+size <= len(s.Steps); {
				smaller := s
				smaller.Steps = slices.Delete(slices.Clone(s.Steps), i, i+size)
				if still(smaller) {
					s = smaller
				} else {
					i += size
				}
			}
		}
		for i := 0; i < len(s.Nodes) && len(s.Nodes) > 1; {
			smaller := s
			smaller.Nodes = slices.Delete(slices.Clone(s.Nodes), i, i+1)
			if still(smaller) {
				s = smaller
			} else {
				i++
			}
		}
		if len(s.Steps)+len(s.Nodes) == before {
			return s
		}
	}
}
