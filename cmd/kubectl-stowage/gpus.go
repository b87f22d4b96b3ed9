// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/duration"

	"stowage.dev/stowage/pkg/clusterview"
	"stowage.dev/stowage/pkg/snapshot"
)

// gpuList is the output of gpus as an object.
type gpuList struct {
	header
	Items  []*clusterview.GPU `json:"items"`
	Totals clusterview.Totals `json:"totals"`
}

func (c *cli) gpusCommand() *cobra.Command {
	var node, model string
	var states []string
	command := &cobra.Command{
		Use: "gpus", Short: "List all GPUs: model, memory, state, who holds them, taints",
		Example: `  kubectl stowage gpus
  kubectl stowage gpus --node worker-3 -o wide
  kubectl stowage gpus --state free,tainted --no-headers
  kubectl stowage gpus -o json | jq '.items[] | select(.state == "held") | .holders'`,
		Args: none,
		RunE: func(command *cobra.Command, _ []string) error {
			for _, state := range states {
				if !slices.Contains(allStates, clusterview.State(state)) {
					return usageError{fmt.Errorf("--state: Unsupported value: %q: want %s", state, joinStates())}
				}
			}
			return c.show(command.Context(), func(s *snapshot.Snapshot) (*table, string, any) {
				gpus := clusterview.GPUs(s)
				all := len(gpus)
				gpus = slices.DeleteFunc(gpus, func(g *clusterview.GPU) bool {
					return node != "" && g.Node != node || model != "" && !strings.Contains(strings.ToLower(g.Model),
						strings.ToLower(model)) ||
						len(states) > 0 && !slices.Contains(states, string(g.State))
				})
				list := &gpuList{header{snapshot.APIVersion, "GPUList"}, gpus, clusterview.Total(gpus)}
				note := totals(&list.Totals)
				if len(gpus) == 0 && all > 0 {
					note = fmt.Sprintf("None of %s matches the flags.", count(all, "GPU"))
				}
				return c.gpuTable(gpus), note, list
			})
		},
	}
	c.printFlags(command, true)
	command.Flags().StringVar(&node, "node", "", "of this node alone")
	command.Flags().StringVar(&model, "model", "", "whose model has this in its name")
	command.Flags().StringSliceVar(&states, "state", nil, "in these states alone: "+joinStates())
	_ = command.RegisterFlagCompletionFunc("node", c.offer(nodeNames, "nodes"))
	_ = command.RegisterFlagCompletionFunc("state", cobra.FixedCompletions(strings.Split(joinStates(), ", "),
		cobra.ShellCompDirectiveNoFileComp))
	return command
}

var allStates = []clusterview.State{
	clusterview.Free, clusterview.Held, clusterview.Shared, clusterview.Partitioned, clusterview.Tainted, clusterview.Incomplete,
	clusterview.Gone,
}

func joinStates() string {
	var names []string
	for _, state := range allStates {
		names = append(names, string(state))
	}
	return strings.Join(names, ", ")
}

var stateStyles = map[clusterview.State]style{
	clusterview.Free: green, clusterview.Shared: blue, clusterview.Partitioned: blue, clusterview.Tainted: red, clusterview.Incomplete: red,
	clusterview.Gone: red,
}

func (c *cli) gpuTable(gpus []*clusterview.GPU) *table {
	t := &table{headers: []string{"NODE", "GPU", "MODEL", "MEMORY", "STATE", "HEALTH", "HOLDERS"}}
	wide := c.output == "wide"
	if wide {
		t.headers = []string{
			"NODE", "GPU", "MODEL", "MEMORY", "STATE", "HEALTH", "LAYOUT", "SHARED", "NUMA", "LINK", "DRIVER",
			"UUID", "HOLDERS",
		}
	}
	for _, g := range gpus {
		health := cell{text: "ok"}
		if len(g.Taints) > 0 {
			var keys []string
			for _, taint := range g.Taints {
				key := taint.Key
				if taint.Value != "" {
					key += "=" + taint.Value
				}
				key += ":" + string(taint.Effect)
				if taint.Partition != "" {
					key += "(" + taint.Partition + ")"
				}
				keys = append(keys, key)
			}
			health = cell{text: strings.Join(keys, ","), style: yellow}
			if g.Refuses() {
				health.style = red
			}
		}
		var holders []string
		for i := range g.Holders {
			holders = append(holders, describeHolder(&g.Holders[i], g.Driver))
		}
		state := cell{text: string(g.State), style: stateStyles[g.State]}
		row := []cell{text(g.Node), text(g.Device), or(g.Model), or(bytesText(g.MemoryBytes)), state, health}
		if wide {
			numa, shared := "", ""
			if g.Place.NUMANode != nil {
				numa = fmt.Sprint(*g.Place.NUMANode)
			}
			if g.SharedMemoryBytes != nil {
				shared = bytesText(*g.SharedMemoryBytes) + "/" + bytesText(g.MemoryBytes)
			}
			row = append(row, or(g.Layout()), or(shared), or(numa), or(g.Place.NVLinkDomain), text(g.Driver), or(g.Place.UUID))
		}
		t.addOf(strings.Join([]string{g.Node, g.Driver, g.Pool, g.Device}, "\x00"), append(row, or(strings.Join(holders, " ")))...)
	}
	return t
}

// describeHolder is "ns/pod", with the partition, share or other device that it has.
func describeHolder(h *clusterview.Holder, driver string) string {
	s := h.String()
	switch {
	case h.Admin:
		s += "(admin)"
	case h.Profile != "":
		s += "(" + h.Profile + ")"
	case h.Memory(driver) != "":
		s += "(" + h.Memory(driver) + ")"
	case h.Device != "": // it has a device that shares its counters with this one
		s += "(" + h.Device + ")"
	}
	return s
}

// bytesText is "80Gi", rounded to what people compare; empty for 0.
func bytesText(n int64) string {
	const gi = 1 << 30
	switch {
	case n == 0:
		return ""
	case n >= 10*gi:
		return fmt.Sprintf("%dGi", (n+gi/2)/gi)
	case n >= gi:
		return strings.TrimSuffix(fmt.Sprintf("%.1f", float64(n)/gi), ".0") + "Gi"
	}
	return resource.NewQuantity(n, resource.BinarySI).String()
}

func totals(t *clusterview.Totals) string {
	if t.GPUs == 0 {
		return "No GPUs: no ResourceSlice has a device."
	}
	var parts []string
	for _, state := range allStates {
		if n := t.States[state]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, state))
		}
	}
	line := fmt.Sprintf("%s on %s: %s.", count(t.GPUs, "GPU"), count(t.Nodes, "node"), strings.Join(parts, ", "))
	if g := t.LargestFree; g != nil {
		line += fmt.Sprintf(" Largest free group: %s.", describeGroup(g))
	}
	return line
}

func describeGroup(g *clusterview.Group) string {
	if g.Size == 1 {
		return fmt.Sprintf("1 on %s", g.Node)
	}
	return fmt.Sprintf("%d on %s (%s)", g.Size, g.Node, linkWords[g.Link])
}

var linkWords = map[clusterview.Link]string{
	clusterview.NVLink: "NVLink", clusterview.SameRoot: "one PCIe root", clusterview.SameNUMA: "one NUMA node",
	clusterview.System: "across NUMA nodes", clusterview.Unknown: "link unknown",
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// claimList is the output of claims as an object.
type claimList struct {
	header
	Items []*clusterview.Claim `json:"items"`
}

func (c *cli) claimsCommand() *cobra.Command {
	allNamespaces := false
	command := &cobra.Command{
		Use: "claims", Short: "List ResourceClaims: state, requests, devices, pods",
		Example: "  kubectl stowage claims -A\n  kubectl stowage claims -n team-a -o wide --watch",
		Args:    none,
		RunE: func(command *cobra.Command, _ []string) error {
			namespace := c.namespace()
			return c.show(command.Context(), func(s *snapshot.Snapshot) (*table, string, any) {
				claims := clusterview.Claims(s)
				all := len(claims)
				claims = slices.DeleteFunc(claims, func(claim *clusterview.Claim) bool {
					return !allNamespaces &&
						claim.Namespace != namespace
				})
				note := ""
				if len(claims) == 0 {
					note = "No claims in namespace " + namespace + "."
					switch {
					case allNamespaces:
						note = "No claims."
					case all > 0:
						note += fmt.Sprintf(" In all namespaces there are %d: -A lists them.", all)
					}
				}
				return c.claimTable(s, claims, allNamespaces), note, &claimList{header{snapshot.APIVersion, "ClaimList"}, claims}
			})
		},
	}
	c.printFlags(command, true)
	command.Flags().BoolVarP(&allNamespaces, "all-namespaces", "A", false, "of all namespaces")
	return command
}

func (c *cli) claimTable(s *snapshot.Snapshot, claims []*clusterview.Claim, namespaces bool) *table {
	t := &table{headers: []string{"NAME", "STATE", "REQUESTS", "NODE", "READY", "AGE", "PODS"}}
	if c.output == "wide" {
		t.headers = append(t.headers[:6:6], "OWNER", "PODS", "DEVICES")
	}
	if namespaces {
		t.headers = append([]string{"NAMESPACE"}, t.headers...)
	}
	styles := map[string]style{"pending": yellow, "deleting": red}
	for _, claim := range claims {
		row := []cell{
			text(claim.Name),
			{text: claim.State, style: styles[claim.State]},
			or(strings.Join(claim.Requests, " ")), or(claim.Node), or(claim.Ready),
			{text: duration.HumanDuration(claim.Age(s)), ages: true},
		}
		if c.output == "wide" {
			row = append(row, or(claim.Owner), or(strings.Join(claim.Pods, ",")), or(strings.Join(claim.Devices, ",")))
		} else {
			row = append(row, or(strings.Join(claim.Pods, ",")))
		}
		if namespaces {
			row = append([]cell{text(claim.Namespace)}, row...)
		}
		t.addOf(claim.Namespace+"/"+claim.Name, row...)
	}
	return t
}
