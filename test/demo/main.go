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
	d := demo{out: os.Stdout}
	flags(&d, flag.CommandLine)
	flag.Parse()

	os.Exit(untilSignal(&d, (*demo).run))
}

// untilSignal runs the demo until its end or a signal, and returns the exit status.
func untilSignal(d *demo, run func(*demo, context.Context) error) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := run(d, ctx)
	return report(os.Stderr, err, ctx.Err() != nil, d.waiting)
}

// flags are the demo's flags and the text of -help.
func flags(d *demo, set *flag.FlagSet) {
	set.StringVar(&d.root, "root", ".", "the project's `folder`")
	set.BoolVar(&d.hollow, "hollow", os.Geteuid() != 0, "use hollow nodes only, which start no containers; the default without root")
	set.BoolVar(&d.wait, "wait", false, "after the table, leave the cluster running until Ctrl-C, and print where "+
		"the kubeconfig, the logs, the agents' state and the simulators' sockets are")
	set.Usage = func() {
		fmt.Fprint(set.Output(), usage)
		set.PrintDefaults()
	}
}

const usage = `Starts a real Kubernetes cluster on this machine, lets Stowage place the example pods on simulated GPUs, and shows what
each container saw beside what was allocated. Needs bin/scheduler and bin/node-agent: run ` + "`make build`" + ` first, or ` + "`make demo`" + `.

Exit status: 0 if everything was as it should be, also when -wait is ended by Ctrl-C; 1 otherwise.

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
