// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"text/tabwriter"
	"time"
)

func main() {
	root := flag.String("root", ".", "the project's folder")
	binary := flag.String("scheduler", "bin/scheduler", "the scheduler to measure")
	nodes := flag.String("nodes", "500,5000", "numbers of nodes")
	pods := flag.Int("pods", 200, "pods per scheduler, one after the other")
	burst := flag.Int("burst", 200, "pods per scheduler, all at once")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *root, *binary, *nodes, *pods, *burst); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, root, binary, sizes string, pods, burst int) error {
	binary, err := filepath.Abs(binary)
	if err != nil {
		return err
	}
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "nodes\tfence\tpod to bound p50\tp99\tthe fence's wait p50\tp99\tburst\t")
	for text := range strings.SplitSeq(sizes, ",") {
		nodes, err := strconv.Atoi(text)
		if err != nil || nodes < 1 {
			return fmt.Errorf("-nodes: %q is not a number of nodes", text)
		}
		if free := nodes * gpusPerNode / 2; 2*(pods+burst) > free {
			return fmt.Errorf("-pods %d and -burst %d are too many for %d nodes with %d free GPUs and two schedulers", pods, burst, nodes, free)
		}
		rows, err := measure(ctx, root, binary, nodes, pods, burst)
		if err != nil {
			return fmt.Errorf("%d nodes: %w", nodes, err)
		}
		for _, r := range rows {
			wait50, wait99 := "", ""
			if r.fence {
				wait50, wait99 = "≤ "+short(r.waits.quantile(0.5)), "≤ "+short(r.waits.quantile(0.99))
			}
			fmt.Fprintf(table, "%d\t%t\t%s\t%s\t%s\t%s\t%.1f pods/s\t\n", nodes, r.fence,
				short(quantile(r.latencies, 0.5)), short(quantile(r.latencies, 0.99)), wait50, wait99, r.rate)
		}
	}
	return table.Flush()
}

func short(d time.Duration) string { return d.Round(100 * time.Microsecond).String() }
