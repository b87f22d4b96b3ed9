package main

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
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
		atLeast float64
		only    string
		want    bool
		line    string
	}{
		"all are killed":                          {results: []result{kill, kill, kill}, atLeast: 100, want: true, line: "100.0 % killed"},
		"one survives":                            {results: []result{kill, miss, kill}, atLeast: 50, line: "SURVIVED   a.go:2"},
		"one survives and is explained":           {results: []result{kill, miss, kill}, notes: listed("a.go F: drop y"), atLeast: 66, want: true, line: "1 with one: 66.7 % killed"},
		"too many survive, though explained":      {results: []result{kill, miss, kill}, notes: listed("a.go F: drop y"), atLeast: 90},
		"explained, and killed":                   {results: []result{kill, kill, kill}, notes: listed("a.go F: drop y"), line: "WRONGLY LISTED"},
		"explained, and not there":                {results: []result{kill, kill, kill}, notes: listed("a.go F: drop"), line: "NO SUCH MUTANT: a.go F: drop"},
		"not there, but only some were looked at": {results: []result{kill, kill, kill}, notes: listed("a.go F: drop"), only: "drop", want: true},
		"tests that do not end are told apart":    {results: []result{kill, {killed: true, by: doNotEnd}, kill}, want: true, line: "3 mutants killed (1 because the tests did not end)"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			results := map[int]result{}
			for i, r := range tc.results {
				results[i+1] = r
			}
			var out strings.Builder
			if got := report(&out, options{atLeast: tc.atLeast, every: 1, only: tc.only}, "pkg", tc.notes, mutants, []int{1, 2, 3}, results); got != tc.want {
				t.Errorf("ok: %t, want %t", got, tc.want)
			}
			if !strings.Contains(out.String(), tc.line) {
				t.Errorf("output lacks %q:\n%s", tc.line, &out)
			}
		})
	}
}

func TestTimesOf(t *testing.T) {
	output := `=== RUN   TestOne
--- PASS: TestOne (0.20s)
    --- PASS: TestOne/a (0.10s)
    --- PASS: TestOne/b (0.05s)
--- PASS: TestParallel (0.00s)
    --- PASS: TestParallel/a (1.50s)
        --- PASS: TestParallel/a/b (1.40s)
    --- PASS: TestParallel/b (1.00s)
--- SKIP: TestSkipped (0.00s)
PASS
`
	got, err := timesOf(output)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]time.Duration{"TestOne": 200 * time.Millisecond, "TestParallel": 2500 * time.Millisecond}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("times differ (-want +got):\n%s", diff)
	}
}
