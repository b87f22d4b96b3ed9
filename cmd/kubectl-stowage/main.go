// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command kubectl-stowage shows who has which GPU, why a pod waits, and what would change that. It runs as "kubectl stowage", with the
// user's kubeconfig or on a snapshot file, and writes nothing to the cluster. docs/kubectl.md is its manual.
package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"strings"
	"syscall"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/klog/v2"
)

// Exit codes, see docs/kubectl.md, *Exit codes*.
const (
	exitError = 1 // the cluster or a file could not be read
	exitUsage = 2 // flags or arguments
	exitNo    = 3 // the answer is no: a pod waits, a manifest has no place, an installation has faults
)

// A command reads up to hundreds of megabytes once, and ends: with 5,000 nodes before any of it is collected, which would take a quarter of
// its time. collectAt is Go's GOGC. headroom counts as in use, and takes no memory: a builder's room, unlike that of make, is not even
// cleared.
const (
	collectAt     = 400
	headroomBytes = 160 << 20
)

var headroom strings.Builder

// collectLate is for a command that ends soon, collectInTime for one that goes on for hours. Of a limit of memory (GOMEMLIMIT) the headroom
// would be a part, which the collector would then try to stay below.
func collectLate() {
	debug.SetGCPercent(collectAt)
	if debug.SetMemoryLimit(-1) == math.MaxInt64 {
		headroom.Grow(headroomBytes)
	}
}

func collectInTime() {
	headroom.Reset()
	debug.SetGCPercent(100)
}

// errNo ends a command whose answer, which is printed already, is no.
var errNo = errors.New("no")

// usageError is about flags and arguments.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

func main() {
	collectLate()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	os.Exit(run(ctx, os.Args[1:], genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}))
}

// run carries out one command and returns its exit code.
func run(ctx context.Context, args []string, streams genericiooptions.IOStreams) int {
	klog.SetLogger(logr.Discard()) // plugins log for a scheduler's operator; what concerns the user is returned
	command := newCommand(streams)
	command.SetArgs(args)
	err := command.ExecuteContext(ctx)
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.Is(err, context.Canceled) && ctx.Err() != nil:
		if watches(command) {
			return 0 // that is how it ends
		}
		err = errors.New("interrupted")
	case errors.Is(err, errNo):
		return exitNo
	}
	for i, line := range strings.Split(err.Error(), "\n") { // with names of a file that anybody may have written
		if i == 0 {
			line = "error: " + line
		}
		fmt.Fprintln(streams.ErrOut, printable(strings.ReplaceAll(line, "\t", "    ")))
	}
	if errors.As(err, &usage) || strings.HasPrefix(err.Error(), "unknown command") { // cobra has no type for it
		return exitUsage
	}
	return exitError
}

// watches tells whether a command was called with --watch.
func watches(root *cobra.Command) bool {
	return slices.ContainsFunc(root.Commands(), func(c *cobra.Command) bool { return c.Flags().Changed("watch") })
}
