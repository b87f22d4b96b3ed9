// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The packages in testdata are compiled, and their tests run with each mutant.
func TestRun(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles packages: run without -short")
	}
	tests := map[string]struct {
		pkg     string
		options options
		want    []string // lines of the output
		wantErr string   // in the error, which is nil if it is empty
	}{
		"what survives is listed": {
			pkg: "covered", options: options{atLeast: 80},
			want: []string{
				"killed     max.go:6           Max: a > b is always true  [TestMax]",
				"killed     max.go:6           Max: a > b is always false  [TestMax]",
				"equivalent max.go:6           Max: a > b with >=  (of equal numbers either is the larger one)",
				"killed     max.go:7           Max: drop return a  [TestMax]",
				"killed     max.go:7           Max: return the zero value instead of a  [TestMax]",
				"killed     max.go:9           Max: return the zero value instead of b  [TestMax]",
				": 5 mutants killed (0 because the tests did not end), 0 survived without an explanation, 1 with one: 83.3 % killed (at least 80 % wanted)",
			},
		},
		"what survives is not listed, and what is listed does not survive": {
			pkg: "uncovered",
			want: []string{
				"killed     max.go:9           Max: return the zero value instead of b  [TestTheSecondIsLarger]",
				"SURVIVED   max.go:7           Max: drop return a",
				"WRONGLY LISTED as equivalent  max.go:6           max.go Max: a > b is always true",
				"NO SUCH MUTANT: max.go Min: a < b with <=",
			},
			wantErr: "1 of 1 packages failed",
		},
		"only tests are run to which a mutant makes a difference, and if there are none it survives": {
			pkg: "unreached", options: options{unlisted: true, atLeast: 50},
			want: []string{
				"killed     max.go:4           Max: return the zero value instead of max(a, b)  [TestMax]",
				"SURVIVED   max.go:7           Min: return the zero value instead of min(a, b)",
				"SURVIVED   max.go:10          Positive: n > 0 is always true",
				"killed     max.go:10          Positive: n > 0 is always false  [TestPositive]",
				"SURVIVED   max.go:10          Positive: n > 0 with >=",
				"killed     max.go:13          Twice: ask() && ask() is always true  [TestTwice]",
				"killed     max.go:13          Twice: without ask() in ask() && ask()  [TestTwice]",
			},
		},
		"the tests are in another package": {
			pkg: "random", options: options{unlisted: true, tests: "./testdata/random/elsewhere"},
			want: []string{"killed     max.go:5           Max: return the zero value instead of a  [TestTwoIsMore]"},
		},
		"tests that sleep may sleep as long with a mutant": {
			pkg: "sleepy", options: options{unlisted: true, only: "a > b with >="},
			want: []string{"SURVIVED   max.go:6           Max: a > b with >="},
		},
		"tests that fail by themselves tell nothing": {
			pkg: "broken", wantErr: "the tests fail without a mutant: TestOne",
		},
		"a seeded bug is caught": {
			pkg: "covered", options: options{seedsOnly: true},
			want: []string{`"the smaller one" caught by TestMax; all: TestMax`},
		},
		"a seeded bug is not caught by the test that is named": {
			pkg: "uncovered", options: options{seedsOnly: true},
			want:    []string{`"never the first one" caught by NOT by TestNothing`},
			wantErr: "1 of 1 packages failed",
		},
		"what the original fails, too, or what fails only once, catches no bug": {
			pkg: "random", options: options{seedsOnly: true, random: 6, run: "^$", parallel: 1}, // the first of all runs is the first bug's
			want: []string{
				`"never the first one" caught by TestRandom (seed 4, after 4 histories) (the original fails at seed 2, too) (it fails only once at seed 3)`,
				`"the first one is taken for the second" caught by TestRandom (seed 6, which is known)`,
				`"where the original fails" caught by TestRandom (seed 4, after 4 histories) (not at seed 2, where it was) (the original fails at seed 2, too)`,
				`"caught elsewhere" caught by TestTwoIsMore`,
				`"the same in other words" caught by NOT by TestRandom (after 6 histories) (the original fails at seed 2, too)`,
			},
			wantErr: "1 of 1 packages failed",
		},
		"no package": {
			pkg: "missing", wantErr: "./testdata/missing: listing the package",
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			tc.options.parallel, tc.options.patience = cmp.Or(tc.options.parallel, 2), 30*time.Second
			t.Setenv("FAILED_ONCE", filepath.Join(t.TempDir(), "once"))
			var out strings.Builder
			err := run(t.Context(), &out, tc.options, []string{"./testdata/" + tc.pkg})
			if (err != nil) != (tc.wantErr != "") || err != nil && !strings.Contains(err.Error(), tc.wantErr) {
				t.Errorf("error %v, want %q", err, tc.wantErr)
			}
			for _, want := range tc.want {
				if !strings.Contains(out.String(), want+"\n") {
					t.Errorf("the output lacks %q", want)
				}
			}
			if t.Failed() {
				t.Logf("output:\n%s", &out)
			}
		})
	}
	if left, err := filepath.Glob("testdata/*/testdata/rapid"); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if err := run(t.Context(), &strings.Builder{}, options{}, nil); err == nil {
		t.Error("no package is named, and there is no error")
	}
}
