// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command demo starts a real Kubernetes cluster on this machine, lets Stowage
// place the example pods on simulated GPUs, and shows what each container saw
// next to what the scheduler allocated. It exits non-zero if any of it is not as
// it should be.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	d := demo{out: os.Stdout, nodes: machines}
	flags(&d, flag.CommandLine)
	flag.Parse()
	restore := func() {}
	if d.keep {
		restore = takeTerminal()
	}
	status := untilSignal(&d, (*demo).run)
	restore()
	os.Exit(status)
}

// untilSignal runs the demo until its end or a signal, and returns the exit status.
func untilSignal(d *demo, run func(*demo, context.Context) error) int {
	ends := []os.Signal{os.Interrupt, syscall.SIGTERM}
	if !signal.Ignored(syscall.SIGHUP) { // as nohup has it
		ends = append(ends, syscall.SIGHUP) // its terminal is closed
	}
	ctx, stop := signal.NotifyContext(context.Background(), ends...)
	defer stop()
	err := run(d, ctx)
	return report(os.Stderr, err, ctx.Err() != nil, d.waiting)
}

// flags are the demo's flags and the text of -help.
func flags(d *demo, set *flag.FlagSet) {
	set.StringVar(&d.root, "root", ".", "the project's `folder`")
	set.BoolVar(&d.hollow, "hollow", os.Geteuid() != 0, "use hollow nodes only, which start no containers; the default without root")
	set.BoolVar(&d.keep, "lab", false, "keep the cluster up until Ctrl-C, and print where "+labShows)
	set.Func("nodes", "the `nodes`, such as h100,b=hgx-b200: h100, a100, b200, l40s, or NAME=PROFILE of the simulation; the first one is the "+
		"real one. The default is all four", func(text string) (err error) {
		d.nodes, err = parseNodes(text)
		return err
	})
	set.Func("examples", "with -lab, the `examples` to run, such as one-gpu,shared-claim, or none. The default is all",
		func(text string) (err error) {
			d.examples, err = parseExamples(text)
			return err
		})
	set.Usage = func() {
		fmt.Fprint(set.Output(), usage)
		set.PrintDefaults()
	}
}

// labShows is what -lab prints, in the words of README and help.
const labShows = "the kubeconfig, the logs, the agents' PIDs and state, the simulators' sockets and the way into the node are"

const usage = `Starts a real Kubernetes cluster on this machine, lets Stowage place the example pods on simulated GPUs, and shows what
each container saw beside what was allocated. Needs bin/scheduler, bin/node-agent and bin/kubectl-stowage: run ` +
	"`make build`" + ` first, or ` + "`make demo`" + `.

Exit status: 0 if everything was as it should be, also when -lab is ended by Ctrl-C; 1 otherwise.

`

// report says how the demo ended, and returns the exit status. waited tells that the demo had succeeded and was waiting to
// be ended.
func report(out io.Writer, err error, interrupted, waited bool) int {
	switch {
	case err == nil:
		return 0
	case interrupted && !waited:
		fmt.Fprintln(out, "\nThe demo was interrupted before its end. Everything is stopped.")
	default:
		fmt.Fprintf(out, "\nThe demo failed: %v\n", err)
	}
	return 1
}
