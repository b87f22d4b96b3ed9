// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package packing

import "testing"

// Parts give two, four, six and so on up to 28 of one of four kinds, 210 in all. That they cannot give 53, 51, 53 and 53 takes more steps
// than there are: it counts as possible.
func TestPackingGivesUp(t *testing.T) {
	for budget, want := range map[int]bool{maxPacking: true, 100 * maxPacking: false} {
		p := &Packing{failed: map[packed]struct{}{}, budget: budget, Need: Load{53, 51, 53, 53}, weights: [3][MaxKinds]int{{1, 1, 1, 1}}}
		for n := uint8(28); n > 0; n -= 2 {
			p.Loads = append(p.Loads, []Load{{n}, {0, n}, {0, 0, n}, {0, 0, 0, n}})
		}
		p.sum()
		if got := p.fits(0, p.Need); got != want {
			t.Errorf("with %d steps: %t, want %t", budget, got, want)
		}
	}
}
