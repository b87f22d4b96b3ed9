package liveness

import (
	"time"

	"stowage.dev/stowage/test/liveness/memoryapi"
)

// The fault matrix: each write of a scheduler fails in each way, with and without the scheduler's end around it.

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

// What follows the fault: nothing, the end of the pods, and of their group, while it is dealt with, or after.
var aftermaths = [][]Step{
	nil,
	{Wait{For: 100 * time.Millisecond}, Delete{Pod: "p"}, Delete{Pod: "q"}, DeleteGroup{Name: "g"}},
	{Wait{For: 20 * time.Second}, Delete{Pod: "p"}, Delete{Pod: "q"}, DeleteGroup{Name: "g"}},
}

// matrix returns a pair with each write failing. writes are those of a history without faults, as "verb what".
func matrix(pair Scenario, writes []request) []Scenario {
	var all []Scenario
	count := map[request]int{}
	for _, write := range writes {
		count[write]++
		for _, fault := range []memoryapi.Fault{memoryapi.None, memoryapi.Refused, memoryapi.Conflict, memoryapi.NoAnswer, memoryapi.Lost, memoryapi.Late, memoryapi.Slow} {
			for _, kill := range []Kill{Never, Before, After} {
				if fault == memoryapi.None && kill == Never {
					continue // nothing fails
				}
				for _, aftermath := range aftermaths {
					for _, noFence := range []bool{false, true} {
						if noFence && fault == memoryapi.Late && kill != Never {
							continue // what a process that is dead wrote, and what comes late, only the fence sees
						}
						s := Scenario{Nodes: pair.Nodes, Groups: pair.Groups, NoFence: noFence}
						s.Steps = append(s.Steps, Fail{Verb: write.verb, What: write.what, After: count[write] - 1, With: fault, Times: 1, Kill: kill})
						s.Steps = append(s.Steps, pair.Steps...)
						s.Steps = append(s.Steps, aftermath...)
						all = append(all, s)
					}
				}
			}
		}
	}
	return all
}
