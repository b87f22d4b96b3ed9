// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"testing"
	"time"
)

func TestStagesOf(t *testing.T) {
	tests := []test{
		{"A", quick / 2, map[int]bool{1: true, 2: true}},
		{"B", quick, map[int]bool{1: true}},
		{"C", 3 * quick, map[int]bool{1: true}},
		{"D", 60 * quick, map[int]bool{1: true, 3: true}},
	}
	stages := map[int][]string{
		1: {"A|B", "C", "D"},
		2: {"A"},
		3: {"D"},
		4: nil, // it makes no difference to any
	}
	for id, want := range stages {
		var got []string
		for _, stage := range stagesOf(options{patience: time.Minute}, tests, id) {
			got = append(got, stage.run)
			if stage.patience > time.Minute || stage.run == "A" && stage.patience != slowdown*quick/2+grace {
				t.Errorf("%s may take %s", stage.run, stage.patience)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("mutant %d: %q, want %q", id, got, want)
		}
	}
}

func TestPartsOf(t *testing.T) {
	const output = "=== RUN   TestA\n=== RUN   TestA/one_(1)\n    a_test.go:1: === RUN   TestA/none\n=== RUN   TestA/two/x\n" +
		"=== RUN   TestA/two/x/deep\n=== RUN   TestA/two/y\n=== PAUSE TestA/two/y\n--- PASS: TestA (0.00s)\n"
	for pattern, want := range map[string][]string{
		"^TestA$":                  {`^TestA$/^one_\(1\)$`, "^TestA$/^two$"},
		"^TestA$/^two$":            {"^TestA$/^two$/^x$", "^TestA$/^two$/^y$"},
		"^TestA$/^two$/^x$/^deep$": nil,
	} {
		if got := partsOf(pattern, output); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", pattern, got, want)
		}
	}
}

func TestTheStartIsTakenFromATest(t *testing.T) {
	for name, tc := range map[string]struct{ took, start, want time.Duration }{
		"it starts quickly":                   {210, 10, 200},
		"it only starts":                      {10, 10, 5},
		"the start alone took longer than it": {210, 900, 105},
	} {
		t.Run(name, func(t *testing.T) {
			if got := withoutStart(tc.took, tc.start); got != tc.want {
				t.Errorf("%d, want %d", got, tc.want)
			}
		})
	}
}
