// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command nvmlsimctl makes things happen to the simulated GPUs of a node: faults, processes, an administrator's acts.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := newCommand(os.LookupEnv).ExecuteContext(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "nvmlsimctl:", err)
		os.Exit(1)
	}
}
