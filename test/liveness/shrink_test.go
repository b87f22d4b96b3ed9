// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// What is left is what the failure needs, and the search ends.
func TestShrink(t *testing.T) {
	many := func() (s Scenario) {
		for i := range 6 {
			s.Nodes = append(s.Nodes, Node{Name: fmt.Sprintf("n%d", i), GPUs: 2})
		}
		for i := range 80 {
			s.Steps = append(s.Steps, Wait{time.Duration(i) * time.Second})
		}
		return s
	}
	wait := func(i int) Step { return Wait{time.Duration(i) * time.Second} }
	has := func(s Scenario, steps ...int) bool {
		return !slices.ContainsFunc(steps, func(i int) bool { return !slices.Contains(s.Steps, wait(i)) })
	}
	on := func(nodes ...int) (all []Node) {
		for _, i := range nodes {
			all = append(all, many().Nodes[i])
		}
		return all
	}
	for name, tc := range map[string]struct {
		fails func(s Scenario, play int) bool
		want  Scenario
	}{
		"one step": {
			fails: func(s Scenario, _ int) bool { return has(s, 37) },
			want:  Scenario{Nodes: on(5), Steps: []Step{wait(37)}},
		},
		"two steps, and two nodes": {
			fails: func(s Scenario, _ int) bool {
				return has(s, 3, 76) && slices.Contains(s.Nodes, on(1)[0]) && slices.Contains(s.Nodes, on(4)[0])
			},
			want: Scenario{Nodes: on(1, 4), Steps: []Step{wait(3), wait(76)}},
		},
		"a step that is needed only as long as a later one is there": {
			fails: func(s Scenario, _ int) bool { return has(s, 79) && (has(s, 10) || !has(s, 78)) },
			want:  Scenario{Nodes: on(5), Steps: []Step{wait(79)}},
		},
		"in every third play": {
			fails: func(s Scenario, play int) bool { return has(s, 37) && play%attempts == 0 },
			want:  Scenario{Nodes: on(5), Steps: []Step{wait(37)}},
		},
		"never again":         {fails: func(Scenario, int) bool { return false }, want: many()},
		"all steps and nodes": {fails: func(s Scenario, _ int) bool { return len(s.Steps) == 80 && len(s.Nodes) == 6 }, want: many()},
		"whatever happens":    {fails: func(Scenario, int) bool { return true }, want: Scenario{Nodes: on(5)}},
	} {
		t.Run(name, func(t *testing.T) {
			given, plays := many(), 0
			got := Shrink(given, func(s Scenario) bool {
				plays++
				return tc.fails(s, plays)
			})
			if diff := cmp.Diff(tc.want.Code(), got.Code()); diff != "" {
				t.Errorf("made small (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(many().Code(), given.Code()); diff != "" {
				t.Errorf("what was given is changed:\n%s", diff)
			}
			if plays > playsToShrink {
				t.Errorf("%d plays, at most %d are allowed", plays, playsToShrink)
			}
		})
	}
}
