// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/types"
	clocktesting "k8s.io/utils/clock/testing"
)

func TestGapsAreMeasured(t *testing.T) {
	// Each step happens a second after the one before.
	want := func(n int) func(*gapMeter) { return func(g *gapMeter) { g.want(n) } }
	add := func(uids ...types.UID) func(*gapMeter) {
		return func(g *gapMeter) {
			for _, uid := range uids {
				g.added(uid)
			}
		}
	}
	remove := func(uids ...types.UID) func(*gapMeter) {
		return func(g *gapMeter) {
			for _, uid := range uids {
				g.deleted(uid)
			}
		}
	}
	tests := map[string]struct {
		steps []func(*gapMeter)
		want  []time.Duration
	}{
		"the first time is no gap":    {steps: []func(*gapMeter){want(2), add("a"), add("b")}},
		"a kubelet deletes them all":  {steps: []func(*gapMeter){want(2), add("a", "b"), remove("a", "b"), add("c"), add("d")}, want: []time.Duration{2 * time.Second}},
		"twice":                       {steps: []func(*gapMeter){want(1), add("a"), remove("a"), add("b"), remove("b"), add("c")}, want: []time.Duration{time.Second, time.Second}},
		"one of them":                 {steps: []func(*gapMeter){want(2), add("a", "b"), remove("b"), add("a"), add("c")}, want: []time.Duration{2 * time.Second}},
		"fewer are wanted":            {steps: []func(*gapMeter){want(2), add("a", "b"), want(1), remove("b")}, want: nil},
		"more are wanted":             {steps: []func(*gapMeter){want(1), add("a"), want(2), add("b"), remove("b"), add("c")}, want: []time.Duration{time.Second}},
		"what is wanted stays so":     {steps: []func(*gapMeter){want(1), add("a"), remove("a"), want(1), add("b")}, want: []time.Duration{2 * time.Second}},
		"deleted again before enough": {steps: []func(*gapMeter){want(2), add("a", "b"), remove("a", "b"), add("c"), remove("c"), add("d", "e")}, want: []time.Duration{3 * time.Second}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			c := clocktesting.NewFakeClock(time.Now())
			g := newGapMeter(c)
			var got []time.Duration
			g.observe = func(gap time.Duration) { got = append(got, gap) }
			for _, step := range tc.steps {
				c.Step(time.Second)
				step(g)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("gaps (-want +got):\n%s", diff)
			}
		})
	}
}
