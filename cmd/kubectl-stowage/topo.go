// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"stowage.dev/stowage/pkg/clusterview"
	"stowage.dev/stowage/pkg/snapshot"
)

// topology is the output of topo as an object.
type topology struct {
	header
	Node string             `json:"node"`
	GPUs []*clusterview.GPU `json:"gpus"`
	// Links[i][j] is how GPUs i and j reach each other.
	Links  [][]clusterview.Link `json:"links"`
	Groups []clusterview.Group  `json:"freeGroups,omitempty"`
}

func (c *cli) topoCommand() *cobra.Command {
	command := &cobra.Command{
		Use: "topo NODE", Short: "Show how the GPUs of a node reach each other, and who holds them",
		Long: `Show how the GPUs of a node reach each other, and who holds them, as nvidia-smi topo -m does.

Links are those that the driver's attributes tell: NV one NVLink domain, PHB one PCIe root complex, NODE one NUMA node, SYS across NUMA
nodes, ? not published. How many NVLinks there are, and the bridges below a root complex, drivers do not publish.`,
		Example: "  kubectl stowage topo worker-3",
		Args:    one("NODE"),
		RunE: func(command *cobra.Command, args []string) error {
			s, err := c.read(command.Context())
			if err != nil {
				return err
			}
			node := strings.TrimPrefix(strings.TrimPrefix(args[0], "nodes/"), "node/")
			gpus := slices.DeleteFunc(clusterview.GPUs(s), func(g *clusterview.GPU) bool { return g.Node != node })
			switch {
			case len(gpus) > 0:
			case !slices.Contains(nodeNames(s), node):
				return fmt.Errorf("node %s: there is none", node)
			default:
				return fmt.Errorf("node %s: no ResourceSlice has devices of it", node)
			}
			topo := &topology{
				header: header{snapshot.APIVersion, "Topology"}, Node: node, GPUs: gpus,
				Groups: clusterview.FreeGroups(gpus),
			}
			t := &table{headers: []string{""}}
			for i := range gpus {
				t.headers = append(t.headers, fmt.Sprintf("GPU%d", i))
			}
			t.headers = append(t.headers, "NUMA", "DEVICE", "STATE", "HOLDERS")
			for i, g := range gpus {
				row, links := []cell{{text: fmt.Sprintf("GPU%d", i), style: bold}}, []clusterview.Link{}
				for _, other := range gpus {
					link := clusterview.LinkOf(g, other)
					links = append(links, link)
					as := plain
					if link == clusterview.NVLink {
						as = green
					}
					row = append(row, cell{text: string(link), style: as})
				}
				numa := ""
				if g.Place.NUMANode != nil {
					numa = fmt.Sprint(*g.Place.NUMANode)
				}
				var holders []string
				for k := range g.Holders {
					holders = append(holders, describeHolder(&g.Holders[k], g.Driver))
				}
				topo.Links = append(topo.Links, links)
				t.add(append(row, or(numa), text(g.Device), cell{text: string(g.State), style: stateStyles[g.State]},
					or(strings.Join(holders, " ")))...)
			}
			note := "No whole GPU is free."
			if len(topo.Groups) > 0 {
				var groups []string
				for i := range topo.Groups {
					groups = append(groups, describeGroup(&topo.Groups[i]))
				}
				note = "Largest free groups: " + strings.Join(groups, ", ") + "."
			}
			return c.print(t, note, topo)
		},
		ValidArgsFunction: firstArgument(c.offer(nodeNames, "nodes")),
	}
	c.printFlags(command, false)
	return command
}

// fragments is the output of frag as an object.
type fragments struct {
	header
	Items []*clusterview.Size `json:"items"`
}

func (c *cli) fragCommand() *cobra.Command {
	command := &cobra.Command{
		Use: "frag", Short: "Show which sizes still fit, and where",
		Long: `Show which sizes still fit, and where: for each model, how many pods with 1, 2, 4, ... free GPUs of one node would have a
place, and how many if all free GPUs were together. What is lost is fragmentation. Only GPUs that are wholly free and not tainted, on
nodes that take pods, count; CPU and memory of nodes do not.`,
		Example: "  kubectl stowage frag\n  kubectl stowage frag -o wide   # with all nodes",
		Args:    none,
		RunE: func(command *cobra.Command, _ []string) error {
			s, err := c.read(command.Context())
			if err != nil {
				return err
			}
			gpus := clusterview.GPUs(s)
			sizes := clusterview.Sizes(gpus)
			t := &table{headers: []string{"MODEL", "SIZE", "FIT", "LINKED", "IDEAL", "LOST", "NODES"}}
			for _, size := range sizes {
				lost := cell{text: fmt.Sprint(size.Ideal - size.Fit)}
				if size.Ideal > size.Fit {
					lost.style = yellow
				}
				t.add(or(size.Model), text(fmt.Sprint(size.GPUs)), text(fmt.Sprint(size.Fit)), text(fmt.Sprint(size.Linked)),
					text(fmt.Sprint(size.Ideal)), lost,
					or(someOf(size.Nodes, c.output == "wide")))
			}
			note := ""
			if closed := clusterview.Closed(gpus); len(closed) > 0 {
				note = "Left out, because they are cordoned, not ready or gone: " + someOf(closed, c.output == "wide") + "."
			}
			if len(sizes) == 0 {
				note = "No GPUs: no ResourceSlice has a device."
			}
			return c.print(t, note, &fragments{header{snapshot.APIVersion, "Fragmentation"}, sizes})
		},
	}
	c.printFlags(command, false)
	return command
}
