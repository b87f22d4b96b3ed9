// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"
	"math/rand/v2"
	"time"

	"stowage.dev/stowage/test/liveness/memoryapi"
)

// Random is a scenario that a seed decides.
func Random(seed uint64) Scenario {
	g := &generator{Rand: rand.New(rand.NewPCG(seed, 0)), more: rand.New(rand.NewPCG(seed, 3))}
	if rand.New(rand.NewPCG(seed, 2)).IntN(4) == 0 { // by itself, as what follows
		return g.contest()
	}
	g.Groups = rand.New(rand.NewPCG(seed, 1)).IntN(4) == 0 // by itself: what seeds without groups decide stays as it is
	// Each scenario has a few of all that can be special: what always happens at once hides what happens alone.
	g.preempting, g.sharing, g.extended, g.changing, g.failing, g.delayed = !g.one(3), g.one(3), g.one(4), g.one(3), g.one(3), g.one(4)
	g.kinds = pick(g, whole, whole, whole, halved, shared, whole|halved, whole|shared, halved|shared)
	g.guarded, g.growing = g.preempting && g.one(3), g.one(4)
	if g.one(4) {
		g.kinds |= attachable
	}
	if g.extended {
		g.kinds |= 1
	}
	g.NoFence = g.one(4)
	g.LateClasses = g.changing && g.one(2)
	for i := range pick(g, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6) { // in small ones more is short
		g.Nodes = append(g.Nodes, g.node(fmt.Sprintf("node-%d", i)))
	}
	if g.sharing {
		for range 1 + g.IntN(3) {
			g.claims = append(g.claims, fmt.Sprintf("shared-%d", len(g.claims)))
			g.add(Claim{Name: g.claims[len(g.claims)-1], Ask: g.ask()})
		}
	}
	for range 2 * (len(g.Nodes) - 2) {
		g.add(g.pod()) // otherwise little is short where there are many
	}
	for range 5 + g.IntN(15) {
		g.add(g.step())
		if g.sharing && g.more.IntN(4) == 0 {
			g.addOfAnother()
		}
		if g.one(2) {
			g.add(Wait{For: pick(g, 10*time.Millisecond, 300*time.Millisecond, time.Second, 3*time.Second, 3*time.Second, 20*time.Second)})
		}
	}
	if g.LateClasses {
		for _, name := range classNames {
			g.add(Class{Name: name})
		}
	}
	for _, node := range g.Nodes {
		if node.Late && !g.one(4) {
			g.add(pick[Step](g, Join{Node: node.Name}, Publish{Node: node.Name}))
			g.add(Join{Node: node.Name})
			g.add(Publish{Node: node.Name})
		}
	}
	return g.Scenario
}

// generator makes one scenario.
type generator struct {
	*rand.Rand
	Scenario
	// for what came later: what it decides leaves the rest of a seed's history as it was
	more                                                                        *rand.Rand
	preempting, sharing, extended, changing, failing, delayed, guarded, growing bool
	kinds                                                                       int
	pods, claims, groups                                                        []string
}

func (g *generator) add(step Step) { g.Steps = append(g.Steps, step) }

// one is true in one of n cases.
func (g *generator) one(n int) bool { return g.IntN(n) == 0 }

// pick returns one of several values.
func pick[T any](g *generator, values ...T) T { return values[g.IntN(len(values))] }

// has tells whether devices of a kind are there.
func (g *generator) has(kind int) bool { return g.kinds&kind != 0 }

const (
	whole = 1 << iota
	halved
	shared
	attachable
)

func (g *generator) node(name string) Node {
	n := Node{Name: name}
	if g.has(whole) {
		n.GPUs = 1 + g.IntN(2)
	}
	if g.has(halved) {
		n.Halved = 1
	}
	if g.has(shared) {
		n.Shared = 1
	}
	if g.has(attachable) {
		n.Attached = 1 + g.IntN(2)
	}
	n.Late = g.growing && g.one(2)
	return n
}

// step is one of what can happen in this scenario, most often a pod that comes or goes.
func (g *generator) step() Step {
	kinds := 14
	if g.Groups {
		kinds = 18
	}
	for {
		switch g.IntN(kinds) {
		case 0, 1, 2, 3:
			return g.pod()
		case 4, 5, 6:
			if len(g.pods) > 0 {
				return Delete{Pod: pick(g, g.pods...), Now: g.one(2)}
			}
		case 7:
			if g.sharing {
				return pick[Step](g, DeleteClaim{Name: pick(g, g.claims...)}, Deallocate{Claim: pick(g, g.claims...)},
					Claim{Name: pick(g, g.claims...), Ask: g.ask()})
			}
		case 8, 9:
			if g.changing {
				return g.change()
			}
		case 10:
			if g.failing {
				return g.fail()
			}
		case 11:
			if g.delayed {
				return g.delay()
			}
		case 12:
			if g.guarded {
				return Budget{Allows: int32(g.IntN(3))}
			}
		case 13:
			if g.growing {
				node := pick(g, g.Nodes...).Name
				return pick[Step](g, Join{Node: node}, Publish{Node: node})
			}
		case 14, 15, 16:
			return g.group()
		case 17:
			if len(g.groups) > 0 {
				return DeleteGroup{Name: pick(g, g.groups...)}
			}
		}
	}
}

// addOfAnother adds what another scheduler does with a shared claim: it reserves it for a pod of its
// own, takes that back, or its pod is deleted.
func (g *generator) addOfAnother() {
	claim, pod := g.claims[g.more.IntN(len(g.claims))], fmt.Sprintf("another-%d", g.more.IntN(2))
	reserve := []Step{Pod{Name: pod, Claims: []string{claim}, Foreign: true}, Reserve{Claim: claim, Pod: pod}}
	steps := [][]Step{
		reserve, reserve,
		{Unreserve{Claim: claim, Pod: pod}},
		{Unreserve{Claim: claim, Pod: pod}},
		{Delete{Pod: pod, Now: true}},
	}
	g.Steps = append(g.Steps, steps[g.more.IntN(len(steps))]...)
}

// group is a group of two pods, each of which uses what is common to both and, or, a claim of its own.
// Which of the three comes first is random.
func (g *generator) group() Step {
	group := Group{Name: fmt.Sprintf("g%d", len(g.groups)), Gang: pick(g, 0, 2, 2), Whole: g.one(3)}
	g.groups = append(g.groups, group.Name)
	member := Pod{Group: group.Name, Grace: g.grace()}
	if g.preempting {
		group.Priority = pick[int32](g, 0, 0, 10, 20)
		member.Priority = group.Priority
	}
	switch {
	case g.one(2):
		group.Ask, member.Common = g.ask(), true
	case g.sharing:
		member.Claims = []string{pick(g, g.claims...)}
		if g.one(2) {
			group.Claims = member.Claims
		}
	}
	steps := []Step{group}
	for range 2 {
		pod := member
		pod.Name = g.podName()
		if g.extended && g.one(2) {
			pod.Extended = 1
		}
		if pod.Extended+len(pod.Claims) == 0 && !pod.Common || g.one(4) {
			pod.Ask = g.ask()
		}
		steps = append(steps, pod)
	}
	if g.one(3) {
		g.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
	}
	for _, step := range steps[:2] {
		g.add(step)
		if g.one(4) {
			g.add(Wait{For: 300 * time.Millisecond})
		}
	}
	return steps[2]
}

func (g *generator) podName() string {
	g.pods = append(g.pods, fmt.Sprintf("p%d", len(g.pods)))
	return g.pods[len(g.pods)-1]
}

func (g *generator) grace() time.Duration {
	return pick(g, 0, time.Second, 10*time.Second, 30*time.Second, 24*time.Hour)
}

func (g *generator) pod() Step {
	pod := Pod{Name: g.podName(), Grace: g.grace()}
	if g.preempting {
		pod.Priority = pick[int32](g, 0, 0, 10, 20)
	}
	pod.Guarded = g.guarded && g.one(2)
	if g.extended && g.one(2) {
		pod.Extended = 1 + g.IntN(2)
		if g.has(halved) && g.more.IntN(2) == 0 {
			pod.ExtendedHalves = 1
		}
	}
	if g.sharing && g.one(2) {
		pod.Claims = []string{pick(g, g.claims...)}
		if other := pick(g, g.claims...); g.one(3) {
			pod.Claims = append(pod.Claims, other)
		}
	}
	if pod.Extended+len(pod.Claims) == 0 || g.one(4) {
		pod.Ask = g.ask()
	}
	return pod
}

func (g *generator) ask() Ask {
	for {
		switch g.IntN(3) {
		case 0:
			if g.has(whole | halved | attachable) {
				return Ask{GPUs: 1 + g.IntN(2)}
			}
		case 1:
			if g.has(halved) {
				return Ask{Halves: 1 + g.IntN(2)}
			}
		case 2:
			if g.has(shared) {
				return Ask{Share: pick(g, 30, 50, 100)}
			}
		}
	}
}

// contest is about two nodes with few GPUs and pods that take them from each other: who is evicted takes long to end, others
// are deleted meanwhile, and what the evicted leave goes to somebody else, or is tainted. Of all that can be special little
// happens besides, because much of it has to come together: two nominees, one of which the API does not show; a pod of higher
// priority that ends beside one that was evicted.
func (g *generator) contest() Scenario {
	g.kinds, g.preempting = whole, true
	g.Nodes = []Node{{Name: "node-0", GPUs: 2}, {Name: "node-1", GPUs: 1 + g.IntN(2), Late: g.one(2)}}
	for range 8 + g.IntN(14) {
		switch g.IntN(10) {
		case 0, 1, 2, 3:
			pod := Pod{Name: g.podName(), Priority: pick[int32](g, 0, 0, 10, 20), Ask: Ask{GPUs: pick(g, 1, 1, 2)}}
			pod.Grace = pick(g, 0, 10*time.Second, 30*time.Second, 24*time.Hour, 24*time.Hour)
			if pod.Priority > 0 && g.one(3) {
				g.add(Fail{
					Verb: "patch", What: "pods/status", Times: 1,
					With: pick(g, memoryapi.Lost, memoryapi.Lost, memoryapi.Refused, memoryapi.Late),
				})
			}
			g.add(pod)
		case 4, 5, 6:
			if len(g.pods) > 0 {
				g.add(Delete{Pod: pick(g, g.pods...), Now: g.one(3)})
			}
		case 7, 8:
			node := pick(g, g.Nodes...)
			g.add(Taint{Node: node.Name, Device: fmt.Sprintf("gpu-%d", g.IntN(node.GPUs)), Lifted: g.one(2)})
		case 9:
			if node := g.Nodes[1].Name; g.Nodes[1].Late {
				g.add(Join{Node: node})
				g.add(Publish{Node: node})
			}
		}
		if g.one(2) {
			g.add(Wait{For: pick(g, 300*time.Millisecond, 3*time.Second, 12*time.Second, 31*time.Second)})
		}
	}
	return g.Scenario
}

// change is something that happens to the cluster.
func (g *generator) change() Step {
	node := pick(g, g.Nodes...)
	switch g.IntN(3) {
	case 0:
		return Class{Name: pick(g, classNames...), Broken: g.one(3)}
	case 1:
		return Cordon{Node: node.Name, Lifted: g.one(2)}
	default:
		devices := node.slices()[0].Spec.Devices
		return Taint{Node: node.Name, Device: devices[g.IntN(len(devices))].Name, Lifted: g.one(2)}
	}
}

// fail is something that goes wrong with a request, or with the scheduler.
func (g *generator) fail() Step {
	if g.one(4) {
		return Restart{}
	}
	verbs := [][2]string{
		{"update", "resourceclaims"},
		{"update", "resourceclaims/status"},
		{"update", "resourceclaims/status"},
		{"create", "pods/binding"},
		{"patch", "pods/status"},
		{"get", "pods"},
		{"get", "resourceclaims"},
		{"delete", "pods"},
		{"create", "resourceclaims"},
		{"delete", "resourceclaims"},
	}
	if g.Groups {
		verbs = append(verbs, [2]string{"patch", "podgroups/status"})
	}
	verb := pick(g, verbs...)
	faults := []memoryapi.Fault{memoryapi.Refused, memoryapi.Lost}
	if verb[0] != "get" {
		faults = append(faults, memoryapi.Conflict, memoryapi.NoAnswer, memoryapi.Late, memoryapi.Slow)
	}
	fail := Fail{
		Verb: verb[0], What: verb[1], With: pick(g, faults...), Times: pick(g, 1, 1, 2, 5),
		Kill: pick(g, Never, Never, Never, Before, After),
	}
	if g.NoFence && fail.With == memoryapi.Late {
		fail.Kill = Never // what a process that is dead wrote, and what comes late, only the fence sees
	}
	return fail
}

// delay has informers hear later than others.
func (g *generator) delay() Step {
	held := []string{"pods", "nodes", "resourceclaims", "resourceslices", "deviceclasses"}
	if g.Groups {
		held = append(held, "podgroups")
	}
	resource := pick(g, held...)
	return pick[Step](g, Hold{Resource: resource}, Hold{Resource: resource}, Release{Resource: resource}, Release{Resource: resource},
		Reconnect{}, Reconnect{Expired: true})
}
