// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package liveness

import (
	"fmt"
	"strings"
	"time"

	"stowage.dev/stowage/test/liveness/memoryapi"
)

// Scenario is a cluster and what happens to it.
type Scenario struct {
	Nodes []Node
	// LateClasses leaves the classes out, until a step [Class] makes them.
	LateClasses bool
	// NoFence switches the fence off.
	NoFence bool
	// Groups switches groups of pods on.
	Groups bool
	// BindingTimeout is the plugin's argument, if it is not 0.
	BindingTimeout time.Duration
	// LateQueue is how much later than all others the scheduling queue hears that a pod is nominated, or not any more.
	LateQueue time.Duration
	// LateCache is how much later than all others the scheduler's cache hears that a pod is gone that had a node.
	LateCache time.Duration
	Steps     []Step
}

// Node is a node with its devices.
type Node struct {
	Name string
	// GPUs can be had as a whole.
	GPUs int
	// Halved are GPUs that can be had as a whole, or one or both of their halves.
	Halved int
	// Shared are GPUs of which claims take a part of 100.
	Shared int
	// Attached are GPUs that can be had as a whole and have to be attached to the node first. Attaching the second one fails at first.
	Attached int
	// Unready are GPUs that are attached like these, but never.
	Unready int
	// Late leaves the node and its devices out, until the steps [Join] and [Publish] make them.
	Late bool
}

// Ask is what a claim asks for.
type Ask struct {
	GPUs   int // whole ones
	Halves int
	Share  int // so many parts of 100 of one shared GPU
}

// Step is one thing that happens.
type Step interface {
	// do makes it happen. It may name what is not there, since shrinking takes steps away.
	do(h *history)
}

// Pod makes a pod. It is preempted or deleted within Grace.
type Pod struct {
	Name     string
	Priority int32
	Grace    time.Duration
	// Ask is for a claim of its own, made from a template, Claims are claims that several pods may use, one perhaps twice, and Extended is how
	// many nvidia.com/gpu it asks for, ExtendedHalves how many nvidia.com/half.
	Ask            Ask
	Claims         []string
	Extended       int
	ExtendedHalves int
	// Guarded is for pods of which a [Budget] says how many may be disrupted.
	Guarded bool
	// Foreign is for pods of another scheduler, which stands still: what it does is in the steps [Reserve] and [Unreserve].
	Foreign bool
	// Group is the group that it belongs to. Common is for pods that use the claim of their group's own.
	Group  string
	Common bool
}

// Group makes a group of pods, which are tried together. They have its priority.
type Group struct {
	Name     string
	Priority int32
	// Gang is how many of its pods get nodes together, or none does. With 0 each gets what it can.
	Gang int
	// Ask is for a claim of the group's own, made from a template. Claims are reserved for the group and not for its pods.
	Ask    Ask
	Claims []string
	// Whole is for groups whose pods are evicted together.
	Whole bool
}

// DeleteGroup deletes a group. It goes when it has no pods.
type DeleteGroup struct{ Name string }

// Budget says how many guarded pods may be disrupted.
type Budget struct{ Allows int32 }

// Join makes a node that is late, Publish its devices.
type Join struct{ Node string }

// Publish makes the slices of a node that is late.
type Publish struct{ Node string }

// Leave takes a node away with its devices. Pods that it has stay where they are.
type Leave struct{ Node string }

// Delete deletes a pod, which ends after its Grace. Now does not wait for that.
type Delete struct {
	Pod string
	Now bool
}

// Claim makes a claim that pods can share.
type Claim struct {
	Name string
	Ask  Ask
}

// DeleteClaim deletes a claim. It goes when nobody uses it.
type DeleteClaim struct{ Name string }

// Deallocate takes the devices of a claim, as another component does that sees that its users are gone.
type Deallocate struct{ Claim string }

// Reserve reserves a claim that is allocated for a foreign pod, as its scheduler does before it binds the pod.
type Reserve struct{ Claim, Pod string }

// Unreserve takes that back and leaves the allocation, as kube-scheduler does when the pod cannot be bound. kube-controller-manager leaves
// it, too: it takes only what it finds reserved for pods that are gone.
type Unreserve struct{ Claim, Pod string }

// Class makes a class, or changes it. A broken one selects by an attribute that no device has.
type Class struct {
	Name   string
	Broken bool
}

// Taint taints a device, or takes its taint away.
type Taint struct {
	Node   string
	Device string
	Lifted bool
}

// Cordon makes a node unschedulable, or schedulable again.
type Cordon struct {
	Node   string
	Lifted bool
}

// Restart ends the scheduler and starts another one.
type Restart struct{}

// Hold keeps the informers of a resource from hearing anything, until Release.
type Hold struct{ Resource string }

// Release lets informers hear what was held back.
type Release struct{ Resource string }

// Reconnect ends all watches. Informers begin where they were, or, as the API does not know that version any more, from what there is.
type Reconnect struct{ Expired bool }

// Fail has the scheduler's next requests of a kind fail, after some that do not.
type Fail struct {
	Verb, What string // as in memoryapi.FaultFunc
	After      int
	Times      int
	With       memoryapi.Fault
	Kill       Kill
}

// Kill says when a failing request's scheduler ends, as by kill -9. Another one starts a second later.
type Kill int

const (
	Never  Kill = iota
	Before      // it ends while the request is under way: it hears no answer
	After       // it ends soon after the answer
)

func (k Kill) String() string { return [...]string{"Never", "Before", "After"}[k] }

// Undo does nothing. What a scheduler writes from here on are the writes of undoing that fail in the fault matrix.
type Undo struct{}

// Wait lets time pass.
type Wait struct{ For time.Duration }

// Code is the scenario as a Go literal.
func (s Scenario) Code() string {
	var b strings.Builder
	b.WriteString("Scenario{\n")
	if s.NoFence {
		b.WriteString("\tNoFence: true,\n")
	}
	if s.Groups {
		b.WriteString("\tGroups: true,\n")
	}
	if s.BindingTimeout > 0 {
		fmt.Fprintf(&b, "\tBindingTimeout: %s,\n", literal(s.BindingTimeout))
	}
	if s.LateQueue > 0 {
		fmt.Fprintf(&b, "\tLateQueue: %s,\n", literal(s.LateQueue))
	}
	if s.LateCache > 0 {
		fmt.Fprintf(&b, "\tLateCache: %s,\n", literal(s.LateCache))
	}
	if s.LateClasses {
		b.WriteString("\tLateClasses: true,\n")
	}
	b.WriteString("\tNodes: []Node{\n")
	for _, node := range s.Nodes {
		fmt.Fprintf(&b, "\t\t%s,\n", strings.TrimPrefix(literal(node), "Node"))
	}
	b.WriteString("\t},\n\tSteps: []Step{\n")
	for _, step := range s.Steps {
		fmt.Fprintf(&b, "\t\t%s,\n", literal(step))
	}
	b.WriteString("\t},\n}")
	return b.String()
}
