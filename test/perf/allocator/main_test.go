// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestARatioThatFallsByMoreThanAFifthIsFound(t *testing.T) {
	recorded := floors{"case": 200}
	ratio := comparison{name: "case", target: 100}
	absolute := comparison{name: "impossible", limit: time.Millisecond}
	tests := map[string]struct {
		c    comparison
		t    times
		want string
	}{
		"as recorded":             {ratio, times{ratio: 200}, ""},
		"a fifth less":            {ratio, times{ratio: 161}, ""},
		"more than a fifth less":  {ratio, times{ratio: 159}, "was 200×"},
		"below the target, too":   {ratio, times{ratio: 99}, "was 200×"},
		"another answer":          {ratio, times{ratio: 300, fit: 1, upstreamFit: 2}, "upstream says 2 nodes"},
		"within the limit":        {absolute, times{ratio: 1, ours: time.Millisecond}, ""},
		"a slow processor":        {absolute, times{ratio: 1, ours: 5 * time.Millisecond}, ""},
		"longer than any takes":   {absolute, times{ratio: 1000, ours: 6 * time.Millisecond}, "takes longer than 5ms"},
		"a case without a record": {comparison{name: "new", target: 10}, times{ratio: 10}, ""},
		"a new one that is slow":  {comparison{name: "new", target: 10}, times{ratio: 9}, "misses the target of 10×"},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			if got := recorded.judge(test.c, test.t); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestWhatMissesItsTargetIsTold(t *testing.T) {
	ratio, absolute := comparison{target: 100}, comparison{limit: time.Millisecond}
	for name, test := range map[string]struct {
		c    comparison
		t    times
		want bool
	}{
		"the target":       {ratio, times{ratio: 100}, false},
		"below the target": {ratio, times{ratio: 99}, true},
		"the limit":        {absolute, times{ratio: 1, ours: time.Millisecond}, false},
		"beyond the limit": {absolute, times{ratio: 1000, ours: 2 * time.Millisecond}, true},
	} {
		if got := missed(test.c, test.t); got != test.want {
			t.Errorf("%s: missed %t, want %t", name, got, test.want)
		}
	}
}

func TestRecordedRatiosAreReadAsTheyWereWritten(t *testing.T) {
	file := filepath.Join(t.TempDir(), "floors.json")
	want := floors{"one": 12, "two": 345.5}
	if err := want.write(file); err != nil {
		t.Fatal(err)
	}
	got, err := readFloors(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want, +got):\n%s", diff)
	}
	if _, err := readFloors(file + ".missing"); err == nil || !strings.Contains(err.Error(), "floors.json.missing") {
		t.Errorf("an error that names the file is wanted, got %v", err)
	}
}

func TestEveryComparisonHasAWorldInWhichBothAgree(t *testing.T) {
	recorded, err := readFloors("floors.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range comparisons() {
		if (c.target > 0) == (c.limit > 0) {
			t.Errorf("%s: has target %v and limit %v, wants one of them", c.name, c.target, c.limit)
		}
		if was, ok := recorded[c.name]; ok != (c.target > 0) || was < c.target {
			t.Errorf("%s: recorded %v (%.0f×), want %v, and no less than the target of %.0f×", c.name, ok, was, c.target > 0, c.target)
		}
	}
	for _, c := range comparisons()[2:4] { // the others are too large or too slow for a test
		w := c.world()
		ours, err := w.filterOurs()
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		upstream, err := w.filterUpstream(time.Minute)
		if err != nil || upstream != ours {
			t.Errorf("%s: ours fits on %d nodes, upstream's on %d (%v)", c.name, ours, upstream, err)
		}
	}
}
