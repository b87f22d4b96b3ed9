// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	v1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot"
)

// whatIfOutput is the output of whatif as an object.
type whatIfOutput struct {
	header
	Items   []*simulate.Outcome `json:"items"`
	Evicted []string            `json:"evicted,omitempty"`
	Lost    []string            `json:"lost,omitempty"`
	Kept    []simulate.Kept     `json:"kept,omitempty"`
	Added   []string            `json:"addedNodes,omitempty"`
}

// whatIf are the flags of whatif.
type whatIf struct {
	engine
	files, nodes, drains, deletes []string
	priority                      int32
	prioritySet                   bool
}

func (c *cli) whatifCommand() *cobra.Command {
	var w whatIf
	command := &cobra.Command{
		Use: "whatif", Short: "Place manifests, or the pods that wait, on a changed copy of the cluster",
		Long: `Place manifests, or the pods that wait, on a changed copy of the cluster, with the scheduler's own plugins.

Nodes are added and drained, and pods deleted, before anything is placed. Pods are placed by priority, then in the order of the files;
without -f they are those that wait already. Where preemption evicts others, they are named. Nothing is changed in the cluster.
The exit code is 3 if a pod has no place, or a disruption budget keeps one on a drained node.`,
		Example: `  kubectl stowage whatif -f job.yaml
  kubectl stowage whatif --add-node p5.48xlarge=2        # do the pods that wait fit then? Also by the name of a node
  kubectl stowage whatif --drain worker-3                # where would its pods go?
  kubectl stowage whatif -f job.yaml --delete team-b/notebook --priority 1000`,
		Args: none,
		RunE: func(command *cobra.Command, _ []string) error {
			w.prioritySet = command.Flags().Changed("priority")
			if c.file == "-" && slices.Contains(w.files, "-") {
				return usageError{errors.New("--filename: --snapshot has the standard input")}
			}
			s, err := c.read(command.Context())
			if err != nil {
				return err
			}
			change := simulate.NewChange(&s.Objects)
			pods, err := c.change(change, &w)
			if err != nil {
				return err
			}
			opts, err := w.options()
			if err != nil {
				return err
			}
			outcomes, err := simulate.Place(command.Context(), change, pods, opts)
			if err != nil {
				return err
			}
			return c.printWhatIf(change, outcomes)
		},
	}
	c.printFlags(command, false)
	w.addFlags(command)
	flags := command.Flags()
	flags.StringSliceVarP(&w.files, "filename", "f", nil, "manifests to place; - is the standard input")
	flags.StringSliceVar(&w.nodes, "add-node", nil, "PROFILE=N: N empty nodes like the node of that name, or of that instance type")
	flags.StringSliceVar(&w.drains, "drain", nil, "take the pods off this node")
	flags.StringSliceVar(&w.deletes, "delete", nil, "POD or NAMESPACE/POD: take this pod away")
	_ = command.RegisterFlagCompletionFunc("drain", c.offer(nodeNames, "nodes"))
	_ = command.RegisterFlagCompletionFunc("delete", c.offer(c.podNames, "pods"))
	_ = command.RegisterFlagCompletionFunc("add-node", c.offer(profiles, "nodes"))
	flags.Int32Var(&w.priority, "priority", 0, "priority of the pods that are placed, whatever their class")
	return command
}

// change carries out the flags, and returns the pods to place.
func (c *cli) change(change *simulate.Change, w *whatIf) ([]*v1.Pod, error) {
	for _, text := range w.nodes {
		profile, number, ok := strings.Cut(text, "=")
		n, err := strconv.Atoi(number)
		if !ok || err != nil {
			return nil, usageError{fmt.Errorf("--add-node: Invalid value: %q: want PROFILE=N", text)}
		}
		if err := change.AddNodes(profile, n); err != nil {
			return nil, fmt.Errorf("--add-node: %w", err)
		}
	}
	for _, text := range w.deletes {
		namespace, name := c.podOf(text)
		if err := change.Delete(namespace, name); err != nil {
			return nil, fmt.Errorf("--delete: %w", err)
		}
	}
	var pods []*v1.Pod
	for _, node := range w.drains {
		back, err := change.Drain(node)
		if err != nil {
			return nil, fmt.Errorf("--drain: %w", err)
		}
		pods = append(pods, back...)
	}
	for _, name := range w.files {
		more, err := c.apply(change, name)
		if err != nil {
			return nil, fmt.Errorf("--filename: %w", err)
		}
		pods = append(pods, more...)
	}
	if len(w.files) == 0 && len(w.drains) == 0 {
		pods = simulate.Waiting(&change.Objects)
	}
	if w.prioritySet {
		change.SetPriority(pods, w.priority)
	}
	return pods, nil
}

func (c *cli) apply(change *simulate.Change, name string) ([]*v1.Pod, error) {
	var r io.Reader = c.In
	if name != "-" {
		file, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		defer file.Close()
		r = file
	}
	pods, err := change.Apply(r, c.namespace())
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return pods, nil
}

func (c *cli) printWhatIf(change *simulate.Change, outcomes []*simulate.Outcome) error {
	without := 0
	for _, out := range outcomes {
		if out.Node == "" {
			without++
		}
	}
	if c.output == "json" || c.output == "yaml" {
		if err := c.writeObject(&whatIfOutput{
			header{snapshot.APIVersion, "WhatIf"},
			outcomes, change.Evicted, change.Lost, change.Kept,
			change.Added,
		}); err != nil {
			return err
		}
	} else if err := c.printPlaces(change, outcomes, without); err != nil {
		return err
	}
	if without > 0 || len(change.Kept) > 0 {
		return errNo
	}
	return nil
}

func (c *cli) printPlaces(change *simulate.Change, outcomes []*simulate.Outcome, without int) error {
	t := &table{headers: []string{"NAMESPACE", "POD", "NODE", "EVICTS", "DEVICES"}}
	for _, out := range outcomes {
		var devices []string
		for _, d := range out.Devices {
			devices = append(devices, d.Device)
		}
		node := cell{text: out.Node, style: green}
		if out.Node == "" {
			node = cell{text: "none", style: red}
		}
		t.add(text(out.Namespace), text(out.Pod), node, or(strings.Join(out.Victims, ",")), or(strings.Join(devices, ",")))
	}
	if len(outcomes) > 0 {
		if err := t.write(c.Out, c.terminalOf(), !c.noHeaders); err != nil {
			return err
		}
	}
	if c.noHeaders {
		return nil
	}
	p := c.paragraphs()
	if len(outcomes) > 0 {
		fmt.Fprintln(c.Out)
	}
	p.print(0, bold, "%s: %d would have a place, %d would not. Nothing was changed.", count(len(outcomes), "pod"),
		len(outcomes)-without, without)
	if len(change.Evicted) > 0 {
		p.print(0, yellow, "Evicted: %s.", strings.Join(change.Evicted, ", "))
	}
	if len(change.Lost) > 0 {
		p.print(0, red, "Nobody makes them again, as they have no controller: %s. kubectl drain evicts them with --force alone.",
			strings.Join(change.Lost, ", "))
	}
	for _, kept := range change.Kept {
		p.print(0, yellow, "Not evicted: %s: %s. kubectl drain waits.", kept.Pod, kept.Reason)
	}
	for _, out := range outcomes {
		if out.Node == "" {
			fmt.Fprintln(c.Out)
			p.print(0, bold, "%s/%s:", out.Namespace, out.Pod)
			c.printOutcome(p, out, 2)
		}
	}
	return nil
}
