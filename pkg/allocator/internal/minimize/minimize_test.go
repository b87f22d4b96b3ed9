// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package minimize

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// atLeast admits sets whose weights add up to what is wanted.
func atLeast(wanted int, weights ...int) func([]int) Answer {
	return func(set []int) Answer {
		total := 0
		for _, i := range set {
			total += weights[i]
		}
		if total >= wanted {
			return Yes
		}
		return No
	}
}

func TestMinimize(t *testing.T) {
	// Releasing 2 uncovers something that spoils what 0 makes possible.
	spoiled := func(set []int) Answer {
		if slices.Contains(set, 0) && !slices.Contains(set, 2) || slices.Contains(set, 1) && slices.Contains(set, 2) {
			return Yes
		}
		return No
	}
	asked := 0
	undecided := func(set []int) Answer {
		if asked++; asked > 2 {
			return Unknown
		}
		return atLeast(4, 1, 1, 1, 1, 1)(set)
	}
	tests := map[string]struct {
		n, budget int
		admits    func([]int) Answer
		want      []int
	}{
		"one is enough, and the first such one is taken":   {n: 4, budget: 100, admits: atLeast(2, 1, 2, 2, 3), want: []int{1}},
		"as few as possible, though they weigh more":       {n: 6, budget: 100, admits: atLeast(8, 1, 1, 2, 3, 4, 4), want: []int{4, 5}},
		"of as many the first are taken":                   {n: 5, budget: 100, admits: atLeast(4, 1, 1, 1, 1, 1), want: []int{0, 1, 2, 3}},
		"all are needed":                                   {n: 3, budget: 100, admits: atLeast(6, 1, 2, 3), want: []int{0, 1, 2}},
		"all are not enough":                               {n: 3, budget: 100, admits: atLeast(7, 1, 2, 3)},
		"nobody there":                                     {n: 0, budget: 100, admits: atLeast(1)},
		"more does not always help":                        {n: 3, budget: 100, admits: spoiled, want: []int{0}},
		"out of questions before anything is known":        {n: 5, budget: 3, admits: atLeast(4, 1, 1, 1, 1, 1)},
		"out of time before anything is known":             {n: 5, budget: 100, admits: undecided},
		"out of questions with a set that is good already": {n: 5, budget: 20, admits: atLeast(4, 1, 1, 1, 1, 1), want: []int{0, 1, 2, 3}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, Set(tc.n, tc.budget, tc.admits)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Whatever is asked of it: the set is admitted, none of it can be left out, and the budget is kept.
func TestMinimizeIsMinimalAndBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 8).Draw(t, "n")
		admitted := rapid.SliceOfN(rapid.Bool(), 1<<n, 1<<n).Draw(t, "admitted")
		if rapid.Bool().Draw(t, "grows") {
			for set := range admitted {
				for i := range n {
					admitted[set] = admitted[set] || set&(1<<i) != 0 && admitted[set&^(1<<i)]
				}
			}
		}
		admitted[0] = false
		budget := rapid.IntRange(1, 400).Draw(t, "budget")
		asked := 0
		admits := func(set []int) Answer {
			asked++
			bits := 0
			for _, i := range set {
				bits |= 1 << i
			}
			if admitted[bits] {
				return Yes
			}
			return No
		}
		got := Set(n, budget, admits)
		if asked > budget {
			t.Fatalf("asked %d times, may ask %d times", asked, budget)
		}
		if got == nil {
			if all := admitted[1<<n-1]; all && budget == 400 {
				t.Fatal("found nothing although all together are admitted")
			}
			return
		}
		if admits(got) != Yes {
			t.Fatalf("%v is not admitted", got)
		}
		for i := range got {
			if without := slices.Delete(slices.Clone(got), i, i+1); admits(without) == Yes {
				t.Fatalf("%v is enough, got %v", without, got)
			}
		}
	})
}

// Of more claims than are tried alone, the last one would do alone: it is found all the same.
func TestMinimizeBeyondWhatIsTriedAlone(t *testing.T) {
	const n = maxSingles + 2
	asked := 0
	got := Set(n, 1000, func(set []int) Answer {
		asked++
		for _, i := range set {
			if i == n-1 {
				return Yes
			}
		}
		return No
	})
	if diff := cmp.Diff([]int{n - 1}, got); diff != "" {
		t.Error(diff)
	}
	if asked > maxSingles+20 {
		t.Errorf("asked %d times, want at most %d", asked, maxSingles+20)
	}
}
