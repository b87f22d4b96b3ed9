// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"
	v1 "k8s.io/api/core/v1"

	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/clusterview"
	"stowage.dev/stowage/pkg/doctor"
	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot"
)

// untried is how long a pod waits before it is told that its scheduler has not looked at it: a change of leaders takes half a minute.
const untried = time.Minute

// whyOutput is the output of why as an object.
type whyOutput struct {
	header
	simulate.Why
}

// engine are the flags of commands that simulate.
type engine struct {
	config string
	seed   uint64
}

func (e *engine) addFlags(command *cobra.Command) {
	command.Flags().StringVar(&e.config, "scheduler-config", "",
		"file with the KubeSchedulerConfiguration that your scheduler runs with; without it, the one that Stowage ships")
	command.Flags().Uint64Var(&e.seed, "seed", 0, "chooses among nodes that are equally good")
}

func (e *engine) options() (simulate.Options, error) {
	opts := simulate.Options{Seed: e.seed}
	if e.config == "" {
		return opts, nil
	}
	content, err := os.ReadFile(e.config)
	if err != nil {
		return opts, fmt.Errorf("--scheduler-config: %w", err)
	}
	opts.Configuration = content
	return opts, nil
}

func (c *cli) whyCommand() *cobra.Command {
	var e engine
	command := &cobra.Command{
		Use: "why POD", Short: "Say why a pod waits, and what would admit it; or which devices it has",
		Long: `Say why a pod waits, and what would admit it; or which devices it has, and what their drivers say of them.

The scheduler's own plugins try the pod on a copy of the cluster, whichever scheduler the pod has. Nothing is changed.
The exit code is 3 if the pod waits.`,
		Example: "  kubectl stowage why train-0 -n team-a\n" +
			"  kubectl stowage why team-a/train-0\n" +
			"  kubectl stowage why train-0 -n team-a -o wide   # node by node\n" +
			"  kubectl stowage why train-0 -n team-a -o json",
		Args: one("POD"),
		RunE: func(command *cobra.Command, args []string) error {
			s, err := c.read(command.Context())
			if err != nil {
				return err
			}
			opts, err := e.options()
			if err != nil {
				return err
			}
			namespace, name := c.podOf(args[0])
			why, err := simulate.Explain(command.Context(), &s.Objects, namespace, name, opts)
			if err != nil {
				return err
			}
			if err := c.printWhy(s, why); err != nil {
				return err
			}
			if why.State == simulate.Waits {
				return errNo
			}
			return nil
		},
		ValidArgsFunction: firstArgument(c.offer(c.podNames, "pods")),
	}
	c.printFlags(command, false)
	e.addFlags(command)
	return command
}

// podOf reads the name of a pod: POD, pod/POD as kubectl has it, or NAMESPACE/POD as the other commands print it.
func (c *cli) podOf(arg string) (namespace, name string) {
	before, after, ok := strings.Cut(arg, "/")
	switch {
	case !ok:
		return c.namespace(), arg
	case before == "pod" || before == "pods":
		return c.namespace(), after
	}
	return before, after
}

// paragraphs prints text by lines of the terminal's width.
type paragraphs struct {
	w     io.Writer
	to    terminal
	width int
}

func (c *cli) paragraphs() *paragraphs {
	p := &paragraphs{w: c.Out, to: c.terminalOf()}
	p.width = p.to.width
	return p
}

// print wraps a text; lines after the first are indented two more.
func (p *paragraphs) print(indent int, as style, format string, args ...any) {
	line, pad := "", strings.Repeat(" ", indent)
	flush := func() {
		fmt.Fprintln(p.w, p.to.paint(line, as))
		line = strings.Repeat(" ", indent+2)
	}
	empty := true
	line = pad
	for _, word := range strings.Fields(printable(fmt.Sprintf(format, args...))) {
		if !empty && p.width > 0 && utf8.RuneCountInString(line)+1+utf8.RuneCountInString(word) > p.width {
			flush()
			empty = true
		}
		if !empty {
			line += " "
		}
		line += word
		empty = false
	}
	flush()
}

func (c *cli) printWhy(s *snapshot.Snapshot, why *simulate.Why) error {
	if c.output == "json" || c.output == "yaml" {
		return c.writeObject(&whyOutput{header{snapshot.APIVersion, "PodExplanation"}, *why})
	}
	p := c.paragraphs()
	name := why.Namespace + "/" + why.Pod
	switch why.State {
	case simulate.Ended:
		p.print(0, bold, "Pod %s has ended.", name)
	case simulate.Running:
		p.print(0, bold, "Pod %s runs on node %s.", name, why.Node)
	case simulate.Deleting:
		p.print(0, bold, "Pod %s has no node and is being deleted: it gets none.", name)
	case simulate.Preparing:
		p.print(0, bold, "Pod %s has node %s, and its containers are not running yet.", name, why.Node)
	case simulate.Fits:
		p.print(0, bold, "Pod %s has no node yet, and would get %s.", name, why.Outcome.Node)
	case simulate.Waits:
		p.print(0, bold, "Pod %s waits.", name)
	}
	if slices.ContainsFunc(s.Pods, func(pod *v1.Pod) bool {
		return pod.Namespace == why.Namespace && pod.Name == why.Pod && doctor.Unserved(s, pod, untried)
	}) {
		p.print(0, red, "Scheduler %s has not looked at it: look for a typing error in spec.schedulerName, or start that scheduler.",
			why.Scheduler)
	}
	c.printClaims(p, s, why)
	if why.State == simulate.Preparing && len(why.Claims) > 0 && !slices.ContainsFunc(why.Claims, func(claim simulate.ClaimStatus) bool {
		return len(claim.Devices) == 0 || slices.ContainsFunc(claim.Devices, func(d simulate.DeviceStatus) bool { return d.Ready != "True" })
	}) {
		p.print(0, plain, "Its devices are ready: kubectl describe pod says what its containers wait for.")
	}
	if why.Outcome != nil {
		c.printOutcome(p, why.Outcome, 0)
	}
	if why.Obstacle != nil && (why.Outcome == nil || why.Obstacle.Pod != why.Pod) {
		p.print(0, plain,
			"Pod group %s: %d of its %d waiting pods have a place; %s has none, and keeps the others from starting:", why.Group, why.Placed,
			why.Members, why.Obstacle.Pod)
		c.printOutcome(p, why.Obstacle, 2)
	}
	return nil
}

func (c *cli) printClaims(p *paragraphs, s *snapshot.Snapshot, why *simulate.Why) {
	var gpus []*clusterview.GPU
	if slices.ContainsFunc(why.Claims, func(claim simulate.ClaimStatus) bool { return len(claim.Devices) > 0 }) {
		gpus = clusterview.GPUs(s)
	}
	for _, claim := range why.Claims {
		switch {
		case claim.Missing != "":
			p.print(0, yellow, "Claim %s: %s.", claim.Name, claim.Missing)
		case len(claim.Devices) == 0:
			p.print(0, plain, "Claim %s: not allocated.", claim.Name)
		case why.State == simulate.Waits:
			p.print(0, plain, "Claim %s is allocated, and the pod can only go where its devices are:", claim.Name)
		default:
			p.print(0, plain, "Claim %s:", claim.Name)
		}
		var own []*clusterview.GPU
		for i := range claim.Devices {
			d := &claim.Devices[i]
			model := ""
			if g := gpuOf(gpus, d.Driver, d.Pool, d.Device.Device); g != nil {
				if !slices.Contains(own, g) { // it may have several partitions of one
					own = append(own, g)
				}
				model = strings.TrimSpace(g.Model + " " + bytesText(g.MemoryBytes))
			}
			line, as := fmt.Sprintf("%s: %s/%s/%s %s", d.Request, d.Driver, d.Pool, d.Device.Device, model), plain
			switch {
			case d.Ready == "True":
				line += " - ready"
			case d.Ready != "" || d.Message != "":
				line, as = line+" - not ready: "+d.Message, red
			case why.State == simulate.Preparing:
				line, as = line+" - its driver has not reported anything", yellow
			}
			p.print(2, as, "%s", line)
		}
		if len(own) > 1 {
			worst := clusterview.NVLink
			for i := range own {
				for j := range i {
					worst = clusterview.Farther(worst, clusterview.LinkOf(own[i], own[j]))
				}
			}
			p.print(2, plain, "They reach each other over %s.", linkWords[worst])
		}
	}
}

// gpuOf is the GPU that a device is, or else is a partition of.
func gpuOf(gpus []*clusterview.GPU, driver, pool, device string) *clusterview.GPU {
	var whole *clusterview.GPU
	for _, g := range gpus {
		switch {
		case g.Driver != driver || g.Pool != pool:
		case g.Device == device:
			return g
		case whole == nil && slices.ContainsFunc(g.Holders, func(h clusterview.Holder) bool { return h.Device == device }):
			whole = g
		}
	}
	return whole
}

// printOutcome says what became of a pod that was tried.
func (c *cli) printOutcome(p *paragraphs, out *simulate.Outcome, indent int) {
	for _, d := range out.Devices {
		p.print(indent+2, green, "%s: %s/%s/%s for claim %s", d.Request, d.Driver, d.Pool, d.Device, d.Claim)
	}
	if out.Node != "" {
		if len(out.Victims) > 0 {
			p.print(indent+2, yellow, "It evicts %s.", strings.Join(out.Victims, ", "))
		}
		return
	}
	if len(out.Nodes) == 0 || out.Explanation == nil {
		p.print(indent, plain, "%s", out.Reason)
	}
	if e := out.Explanation; e != nil {
		for i := range e.Requests {
			p.print(indent, plain, "Request %s of claim %s: %s", e.Requests[i].Request, e.Requests[i].Claim,
				afterColon(e.Requests[i].String()))
		}
		for _, constraint := range e.Constraints {
			p.print(indent, plain, "Claim %s wants %d devices with one %s: at most %d are free together.", constraint.Claim,
				constraint.Wanted, constraint.Attribute, constraint.Best)
		}
		for _, pool := range e.Pools {
			p.print(indent, yellow, "Pool %s/%s is %s: %s", pool.Driver, pool.Pool, pool.Kind, pool.Detail)
		}
		printSelectorErrors(p, e.SelectorErrors, indent, c.output == "wide")
	}
	if len(out.Nodes) > 0 {
		p.print(indent, plain, "Nodes:")
		for _, group := range out.Nodes {
			p.print(indent+2, plain, "%d: %s (%s)", len(group.Nodes), group.Reason, someOf(group.Nodes, c.output == "wide"))
		}
	}
	if e := out.Explanation; e != nil && c.output == "wide" {
		for _, node := range e.PerNode {
			p.print(indent+2, plain, "%s: %s %s", node.Node, node.Reason, node.Detail)
		}
	}
	p.print(indent, bold, "What would admit it:")
	for _, advice := range advise(out) {
		p.print(indent+2, plain, "%s", advice)
	}
}

// printSelectorErrors says on which devices selectors fail. On those of many nodes they often fail in the same way.
func printSelectorErrors(p *paragraphs, all []explain.SelectorError, indent int, wide bool) {
	type way struct{ request, claim, message string }
	var ways []way
	devices := map[way][]string{}
	for i := range all {
		w := way{all[i].Request, all[i].Claim, all[i].Message}
		if devices[w] == nil {
			ways = append(ways, w)
		}
		devices[w] = append(devices[w], all[i].Driver+"/"+all[i].Pool+"/"+all[i].Device)
	}
	for _, w := range ways {
		p.print(indent, red, "Selector of request %s, claim %s, fails on %s: %s", w.request, w.claim, someOf(devices[w], wide), w.message)
	}
}

func afterColon(s string) string {
	if _, rest, ok := strings.Cut(s, ": "); ok {
		return rest
	}
	return s
}

// someOf gives the first three names, or all.
func someOf(names []string, all bool) string {
	if all || len(names) <= 3 {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:3], ", "), len(names)-3)
}

// advise says what would give the pod a place, best first.
func advise(out *simulate.Outcome) (advice []string) {
	if len(out.GivenBack) > 0 {
		advice = append(advice,
			fmt.Sprintf("The scheduler gives up the allocation of %s, which keeps it from other nodes, and tries again.",
				strings.Join(out.GivenBack, ", ")))
	}
	if len(out.Victims) > 0 {
		advice = append(advice, fmt.Sprintf("Preemption: it evicts %s on node %s.", strings.Join(out.Victims, ", "), out.Nominated))
	}
	e := out.Explanation
	if e == nil {
		switch {
		case len(advice) > 0:
		case out.Reason == simulate.NoNodes:
			advice = append(advice, "A node: there is none.")
		case out.RefusedBy != "":
			advice = append(advice, "No node was looked at: put right what the reason names. Neither a release nor another node helps before.")
		default:
			advice = append(advice, "Devices are not what is missing: see the reasons above.")
		}
		return advice
	}
	for i := range e.Holders {
		if i == 3 {
			break
		}
		h := &e.Holders[i]
		advice = append(advice, fmt.Sprintf("Release on node %s: %s.", h.Node, claimsText(h.Release)))
	}
	for _, besides := range out.Besides {
		advice = append(advice, fmt.Sprintf("No release alone on %s, where devices are not all that is missing: %s.",
			someOf(besides.Nodes, false), besides.Reason))
	}
	small := 0
	if len(out.Victims) == 0 {
		for _, other := range out.Others {
			advice = append(advice, fmt.Sprintf("Nodes with devices refuse it for another reason: %s (%s).", other.Reason,
				someOf(other.Nodes, false)))
		}
		for _, empty := range out.EvenEmpty {
			small += len(empty.Nodes)
			advice = append(advice, fmt.Sprintf("Devices are not all that is missing on %s. Even if nobody were there: %s.",
				someOf(empty.Nodes, false), empty.Reason))
		}
	}
	if small < e.Nodes {
		advice = append(advice, adviseOnRequests(out)...)
	}
	if len(advice) == 0 {
		advice = append(advice, "Another node with such devices: try 'kubectl stowage whatif --add-node PROFILE=1'.")
	}
	return advice
}

// adviseOnRequests says what to change in the requests, or which node to add.
func adviseOnRequests(out *simulate.Outcome) (advice []string) {
	e := out.Explanation
	if e.NeverTogether {
		advice = append(advice,
			"No release: no node could satisfy the pod's requests together, even if all its devices were free. Spread them over several pods, or "+
				"add a larger node.")
	}
	nobody := "no node"
	if len(out.Others) > 0 {
		nobody = "no other node"
	}
	for i := range e.Requests {
		r := &e.Requests[i]
		if l := r.Limit; l != nil && l.Capacity != "" {
			advice = append(advice,
				fmt.Sprintf("Request %s: ask for no more than %s of %s, or add a node whose devices have %s.", r.Request,
					l.LargestCapacity, l.Capacity, l.AskedCapacity))
		} else if l != nil && l.Devices == 0 {
			advice = append(advice, fmt.Sprintf("Request %s: %s has a device that matches it: add a node with %d.", r.Request, nobody, l.Asked))
		} else if l != nil && l.Asked > l.Devices {
			advice = append(advice, fmt.Sprintf("Request %s: ask for no more than %d on one node, or add a node with %d.",
				r.Request, l.Devices, l.Asked))
		}
		for _, f := range r.FilteredBy {
			advice = append(advice,
				fmt.Sprintf("Request %s: relax the selector %s, which rejects %d of %d devices of class %s.", r.Request,
					f.Expression, f.Devices, r.Devices, r.DeviceClass))
		}
	}
	for _, failed := range e.SelectorErrors {
		what := "the selector"
		if failed.Attribute != "" {
			what = "the expression"
		}
		mend := fmt.Sprintf("Request %s: mend %s %s, which fails on devices.", failed.Request, what, failed.Expression)
		if !slices.Contains(advice, mend) {
			advice = append(advice, mend)
		}
	}
	return advice
}

func claimsText(claims []explain.ClaimHolder) string {
	var names []string
	for _, claim := range claims {
		names = append(names, fmt.Sprintf("claim %s/%s (%s)", claim.Namespace, claim.Claim, count(len(claim.Devices), "device")))
	}
	return strings.Join(names, ", ")
}
