// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package cycle is what is known of a pod in one attempt to schedule it, and handed from one extension point to the next
// in the framework's state of the cycle. What a cycle of the pod's group knows of its pods is here, too. It decides nothing.
package cycle

import (
	"context"
	"errors"
	"fmt"

	v1 "k8s.io/api/core/v1"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/usage"
)

// key is where the plugin has its part of a state. It is the plugin's name.
const key fwk.StateKey = "DeviceClaims"

// State is the plugin's part of the CycleState.
type State struct {
	*Plan
	contention.Situation
	// Placed tells that the pod has been given devices on trial.
	Placed bool
	// Nominees are the pods that devices were kept for on trial. They are the same in the end, though more are known then: the scheduling
	// queue says of a pod that is nominated what it needs while it has that pod, and it has none of those that are being tried.
	Nominees []*v1.Pod
	Results  *Results
	// Binding is what was done for the pod from Reserve on. One goroutine at a time uses it.
	Binding *Progress
}

// Clone implements [fwk.StateData]. Preemption tries nodes on clones, in parallel.
func (c *State) Clone() fwk.StateData {
	return &State{Plan: c.Plan, Situation: c.Situation, Results: NewResults(c.Results), Binding: c.Binding}
}

// Findings are where Filter notes what it finds out. What it finds out in a dry run stays in the clone. A clone that only has nominated
// pods added is how the framework asks for the node as it is.
func (c *State) Findings() *Results {
	r := c.Results
	for !c.WhatIf.IsDryRun() && r.parent != nil {
		r = r.parent
	}
	return r
}

// Read returns the pod's state, nil if PreFilter found nothing to do or refused the pod.
func Read(state fwk.CycleState) (*State, error) { return read[*State](state.Read) }

// read returns the plugin's part of a state, nil if it has none.
func read[T any](from func(fwk.StateKey) (fwk.StateData, error)) (part T, err error) {
	data, err := from(key)
	switch {
	case errors.Is(err, fwk.ErrNotFound):
		return part, nil
	case err != nil:
		return part, fmt.Errorf("read the state of %s: %w", key, err)
	}
	part, ok := data.(T)
	if !ok {
		return part, fmt.Errorf("the state of %s has type %T", key, data)
	}
	return part, nil
}

// Write begins an attempt with what is known of the pod.
func (c *State) Write(state fwk.CycleState) { state.Write(key, c) }

// Forget takes what is known of an earlier attempt out of the state.
func Forget(state fwk.CycleState) { state.Delete(key) }

// WantedOn says what a node has to satisfy. The status refuses the node.
func (c *State) WantedOn(resources *extended.Resources, node fwk.NodeInfo) (*extended.Variant, *fwk.Status) {
	if c.Extended == nil {
		return c.Base, nil
	}
	wanted, refusal := resources.On(c.Extended, extended.Question{
		Node: node, Inventory: c.Inventory, Usage: func() usage.View { return c.View(context.Background(), nil) }, Evaluate: c.Budget.Evaluate,
	})
	if refusal == nil {
		return wanted, nil
	}
	switch refusal.Cause {
	case extended.OfAgent:
		c.Findings().SetUnseen(node.Node().Name)
	case extended.OfClass:
		c.Findings().Classless.Store(true)
	case extended.OfTime:
		c.Results.Undecided.Store(true)
	case extended.OfNode:
	}
	return nil, fwk.NewStatus(fwk.UnschedulableAndUnresolvable, refusal.Reason)
}

// DecidedFor returns what Filter found that the node has to satisfy.
func (c *State) DecidedFor(resources *extended.Resources, node fwk.NodeInfo) (*extended.Variant, *fwk.Status) {
	if result, ok := c.Results.Get(node.Node().Name); ok {
		return result.Variant, nil
	}
	return c.WantedOn(resources, node)
}

// WithoutUnseen returns the view as if claims had the devices of the node that pods may have from device plugins.
func (c *State) WithoutUnseen(node *v1.Node, view usage.View) usage.View {
	if result, ok := c.Results.Get(node.Name); ok && result.Unseen != nil {
		return extended.WithUnseen(view, result.Unseen)
	}
	return view
}
