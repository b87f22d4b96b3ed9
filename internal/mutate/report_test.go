// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	mutants := []mutant{
		{file: "a.go", function: "F", line: 1, what: "drop x"},
		{file: "a.go", function: "F", line: 2, what: "drop y"},
		{file: "a.go", function: "G", line: 9, what: "drop z"},
	}
	kill, miss := result{killed: true, by: "TestX"}, result{}
	listed := func(names ...string) (n notes) {
		for _, name := range names {
			n.Equivalent = append(n.Equivalent, struct {
				Mutant string `json:"mutant"`
				Reason string `json:"reason"`
			}{name, "it is the same"})
		}
		return n
	}
	tests := map[string]struct {
		results []result
		notes   notes
		options options
		chosen  []int // all, if it is empty
		want    bool
		line    string
	}{
		"all are killed":                          {results: []result{kill, kill, kill}, options: options{atLeast: 100}, want: true, line: "100.0 % killed"},
		"one survives":                            {results: []result{kill, miss, kill}, options: options{atLeast: 50}, line: "SURVIVED   a.go:2"},
		"one survives and is explained":           {results: []result{kill, miss, kill}, notes: listed("a.go F: drop y"), options: options{atLeast: 66}, want: true, line: "1 with one: 66.7 % killed"},
		"too many survive, though explained":      {results: []result{kill, miss, kill}, notes: listed("a.go F: drop y"), options: options{atLeast: 90}},
		"explained, and killed":                   {results: []result{kill, kill, kill}, notes: listed("a.go F: drop y"), line: "WRONGLY LISTED"},
		"explained, and not there":                {results: []result{kill, kill, kill}, notes: listed("a.go F: drop"), line: "NO SUCH MUTANT: a.go F: drop"},
		"not there, but only some were looked at": {results: []result{kill, kill, kill}, notes: listed("a.go F: drop"), options: options{only: "drop"}, want: true},
		"one survives and need not be explained":  {results: []result{kill, miss, kill}, options: options{atLeast: 66, unlisted: true}, want: true, line: "1 survived without an explanation, 0 with one: 66.7 % killed (at least"},
		"too many survive unexplained":            {results: []result{kill, miss, kill}, options: options{atLeast: 67, unlisted: true}},
		"some are drawn":                          {results: []result{kill, miss, kill}, chosen: []int{1, 3}, want: true, line: "100.0 % killed in a sample of 2 of 3 (of all of them it is 34.2 to 100.0 %, with 95 % confidence)"},
		"not there, but a sample is drawn":        {results: []result{kill, miss, kill}, chosen: []int{1, 3}, notes: listed("a.go F: drop"), want: true},
		"tests that do not end are told apart":    {results: []result{kill, {killed: true, by: doNotEnd}, kill}, want: true, line: "3 mutants killed (1 because the tests did not end)"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			results := map[int]result{}
			for i, r := range tc.results {
				results[i+1] = r
			}
			var out strings.Builder
			if tc.chosen == nil {
				tc.chosen = []int{1, 2, 3}
			}
			if got := report(&out, tc.options, "pkg", tc.notes, mutants, tc.chosen, results); got != tc.want {
				t.Errorf("ok: %t, want %t", got, tc.want)
			}
			if !strings.Contains(out.String(), tc.line) {
				t.Errorf("output lacks %q:\n%s", tc.line, &out)
			}
		})
	}
}

func TestInterval(t *testing.T) {
	for _, tc := range []struct {
		hits, n   int
		low, high float64
	}{{285, 300, 0.919, 0.969}, {300, 300, 0.987, 1}, {0, 10, 0, 0.278}} {
		if low, high := interval(tc.hits, tc.n); math.Abs(low-tc.low) > 0.001 || math.Abs(high-tc.high) > 0.001 {
			t.Errorf("%d of %d: %.3f to %.3f, want %.3f to %.3f", tc.hits, tc.n, low, high, tc.low, tc.high)
		}
	}
}

func TestChoose(t *testing.T) {
	var mutants []mutant
	for i := range 1000 {
		mutants = append(mutants, mutant{what: fmt.Sprint("drop ", i%2)})
	}
	if ids := choose(options{}, mutants); len(ids) != 1000 || ids[0] != 1 || ids[999] != 1000 {
		t.Errorf("all: %v", ids)
	}
	sample := choose(options{sample: 100, seed: 7, only: "drop 1"}, mutants)
	if len(sample) != 100 || !slices.IsSorted(sample) || len(slices.Compact(slices.Clone(sample))) != 100 || slices.ContainsFunc(sample, func(id int) bool { return id%2 != 0 }) {
		t.Errorf("100 of the even ones: %v", sample)
	}
	if !slices.Equal(sample, choose(options{sample: 100, seed: 7, only: "drop 1"}, mutants)) || slices.Equal(sample, choose(options{sample: 100, seed: 8, only: "drop 1"}, mutants)) {
		t.Error("the seed does not say which ones")
	}
	if ids := choose(options{sample: 2000}, mutants); len(ids) != 1000 {
		t.Errorf("more than there are: %d", len(ids))
	}
}
