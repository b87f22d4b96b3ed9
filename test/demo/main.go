// Command demo starts a real Kubernetes cluster on this machine, lets Stowage
// place the example pods on simulated GPUs, and shows what each container saw
// next to what the scheduler allocated. It exits non-zero if any of it is not as
// it should be.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	d := demo{out: os.Stdout}
	flag.StringVar(&d.root, "root", ".", "the project's folder")
	flag.BoolVar(&d.hollow, "hollow", os.Geteuid() != 0, "use hollow nodes only, which start no containers; the default without root")
	flag.BoolVar(&d.wait, "wait", false, "after the table, leave the cluster running until Ctrl-C")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := d.run(ctx); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted; everything is stopped")
		}
		fmt.Fprintf(os.Stderr, "\nThe demo failed: %v\n", err)
		os.Exit(1)
	}
}
