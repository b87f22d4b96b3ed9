// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command mutate breaks a package's code in every small way that it knows and
// tells which of these mutants the package's tests do not notice.
//
// All mutants are compiled into one test binary, each behind a switch, so that a
// mutant costs a run of tests, not a build. Each test is run alone first, and
// writes down to which mutants it would make a difference: a condition that is
// always true in it cannot be told from one that is made so. A mutant is then tried
// with these tests, the quickest first, until one fails. The code is changed
// through go's -overlay; no file is rewritten.
//
// It exists because the tools at hand have no operator that drops a statement,
// and "no line can be removed" is what is to be shown.
//
// In testdata/mutants.yaml a package lists the mutants that no test can tell from
// the original, with the reason, and bugs that are seeded as a whole. A mutant that
// survives and is not listed makes the command fail, and so does one that is listed
// and does not survive.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"time"
)

func main() {
	var o options
	flag.Float64Var(&o.atLeast, "at-least", 90,
		"percentage of mutants that must be killed; those that are listed as equivalent count as not killed")
	flag.IntVar(&o.parallel, "parallel", runtime.NumCPU(), "test binaries that run at a time")
	flag.IntVar(&o.sample, "sample", 0, "try only so many mutants, drawn by chance, and say how sure the percentage is")
	flag.Uint64Var(&o.seed, "seed", 1, "of -sample")
	flag.StringVar(&o.temp, "temp", "",
		"the folder for the tests' temporary files; on a disk in memory tests that write many are several times faster")
	flag.BoolVar(&o.unlisted, "unlisted", false, "mutants that survive need not be listed")
	flag.DurationVar(&o.patience, "patience", 30*time.Second, "how long tests may run without ending")
	flag.StringVar(&o.run, "run", "", "run only tests that match, as go test -run does")
	flag.StringVar(&o.tests, "tests", "",
		"the package with the tests, if it is not the one that is changed; not for -seeds, which say it themselves")
	flag.StringVar(&o.only, "only", "", "try only mutants whose name contains this")
	flag.BoolVar(&o.seedsOnly, "seeds", false, "try only the seeded bugs, and list all tests that catch each")
	flag.IntVar(&o.random, "random", 0, "the tests that must catch a seeded bug play this many random histories: they take -seed and "+
		"-histories, and print \"seed N:\" of one that fails. It counts only if that one fails again, and the original passes it")
	flag.BoolVar(&o.show, "show", false, "print what the tests print that catch a seeded bug")
	flag.Usage = func() {
		fmt.Fprintf(flag.CommandLine.Output(), "usage: mutate [flags] ./pkg/…\n")
		flag.PrintDefaults()
	}
	flag.Parse()

	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	defer cancel()
	if err := run(ctx, os.Stdout, o, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

type options struct {
	atLeast   float64
	parallel  int
	sample    int
	seed      uint64
	temp      string
	unlisted  bool
	patience  time.Duration
	run, only string
	tests     string
	seedsOnly bool
	random    int
	show      bool
}

// run tries the mutants of all packages, and fails if too many survive.
func run(ctx context.Context, out io.Writer, o options, patterns []string) error {
	if len(patterns) == 0 {
		return fmt.Errorf("no package named")
	}
	failed := 0
	for _, pattern := range patterns {
		ok, err := tryPackage(ctx, out, o, pattern)
		if err != nil {
			return fmt.Errorf("%s: %w", pattern, err)
		}
		if !ok {
			failed++
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d packages failed", failed, len(patterns))
	}
	return nil
}
