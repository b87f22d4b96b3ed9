// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command binaries builds the programs of a local cluster into the cache and
// prints the folders where they are. CI runs it as a step of its own, so that
// the time it takes is not charged to the first test.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"stowage.dev/stowage/internal/localcluster/build"
)

func main() {
	node := flag.Bool("node", true, "also build what a real node needs (kubelet, containerd, runc, CNI plugins)")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *node); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, node bool) error {
	sets := []build.Set{build.ControlPlane, build.StockScheduler}
	if node {
		sets = append(sets, build.Node)
	}
	binaries, err := build.Ensure(ctx, os.Stderr, sets...)
	if err != nil {
		return err
	}
	fmt.Println(binaries.KubernetesDir)
	if node {
		fmt.Println(binaries.NodeDir)
	}
	return nil
}
