// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"slices"
	"time"

	"stowage.dev/stowage/test/liveness/memoryapi"
)

// The fault matrix: each write of a scheduler fails in each way, with and without the scheduler's end around it.

// situations are what a write can fail in: each of the pairs, which stay or are deleted, and each of the undoings.
func situations() map[string]Scenario {
	all := map[string]Scenario{}
	for name, undoing := range undoings {
		all[name] = undoing.then(settle)
	}
	for name, pair := range pairs {
		for when, steps := range aftermaths {
			all[name+when] = pair.then(steps...)
		}
	}
	return all
}

// then is the scenario with more steps in the end.
func (s Scenario) then(steps ...Step) Scenario {
	s.Steps = slices.Concat(s.Steps, steps)
	return s
}

// settle is time for all writes: what has been tried again, and undone, has been by then.
var settle = Wait{40 * time.Second}

// pairs are the situations in which a write can fail: two of something each.
var pairs = map[string]Scenario{
	"two pods and one claim": {
		Nodes: []Node{{Name: "a", GPUs: 2}, {Name: "b", GPUs: 2}},
		Steps: []Step{
			Claim{Name: "c", Ask: Ask{GPUs: 1}},
			Pod{Name: "p", Claims: []string{"c"}},
			Pod{Name: "q", Claims: []string{"c"}},
		},
	},
	"two claims and one pod": {
		Nodes: []Node{{Name: "a", GPUs: 2}, {Name: "b", GPUs: 2}},
		Steps: []Step{
			Claim{Name: "c", Ask: Ask{GPUs: 1}},
			Claim{Name: "d", Ask: Ask{GPUs: 1}},
			Pod{Name: "p", Claims: []string{"c", "d"}},
		},
	},
	"two pods with extended resources": {
		Nodes: []Node{{Name: "a", GPUs: 1}, {Name: "b", GPUs: 1}},
		Steps: []Step{Pod{Name: "p", Extended: 1}, Pod{Name: "q", Extended: 1}},
	},
	"a group of two and its claim": {
		Groups: true,
		Nodes:  []Node{{Name: "a", GPUs: 2}, {Name: "b", GPUs: 2}},
		Steps: []Step{
			Group{Name: "g", Gang: 2, Ask: Ask{GPUs: 1}},
			Wait{time.Millisecond},
			Pod{Name: "p", Group: "g", Common: true},
			Pod{Name: "q", Group: "g", Common: true},
		},
	},
	"a pod that preempts": {
		Nodes: []Node{{Name: "a", GPUs: 1}},
		Steps: []Step{
			Pod{Name: "p", Ask: Ask{GPUs: 1}, Grace: time.Second}, Wait{For: time.Second}, Pod{Name: "q", Ask: Ask{GPUs: 1}, Priority: 10},
		},
	},
}

// aftermaths are what follows: nothing, or the end of the pods, and of their group, while a fault is dealt with, or after.
var aftermaths = map[string][]Step{
	"":                       {settle},
	", both deleted at once": {Wait{150 * time.Millisecond}, Delete{Pod: "p"}, Delete{Pod: "q"}, DeleteGroup{Name: "g"}, settle},
	", both deleted later":   {Wait{20 * time.Second}, Delete{Pod: "p"}, Delete{Pod: "q"}, DeleteGroup{Name: "g"}, settle},
}

// needsFence tells whether only the fence keeps devices from being held twice: what a process that is dead
// wrote, and what comes late, nobody else sees.
func needsFence(s Scenario) bool {
	return s.NoFence && slices.ContainsFunc(s.Steps, func(step Step) bool {
		fail, ok := step.(Fail)
		return ok && fail.With == memoryapi.Late && fail.Kill != Never
	})
}

// matrix returns a situation with each write failing, as its first step. writes are those of a history without that.
func matrix(situation Scenario, writes []request, undoing int) []Scenario {
	var all []Scenario
	count := map[request]int{}
	for i, write := range writes {
		if count[write]++; i < undoing {
			continue
		}
		for _, fault := range []memoryapi.Fault{
			memoryapi.None, memoryapi.Refused, memoryapi.Conflict, memoryapi.NoAnswer, memoryapi.Lost,
			memoryapi.Late, memoryapi.Slow,
		} {
			for _, kill := range []Kill{Never, Before, After} {
				if fault == memoryapi.None && kill == Never {
					continue // nothing fails
				}
				s := situation
				s.Steps = slices.Insert(slices.Clone(s.Steps), 0, Step(Fail{
					Verb: write.verb, What: write.what, After: count[write] - 1, With: fault, Times: 1, Kill: kill,
				}))
				if !needsFence(s) {
					all = append(all, s)
				}
			}
		}
	}
	return all
}
