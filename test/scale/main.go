// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command scale runs the shipped scheduler in a cluster of full size (make scale): a real etcd, kube-apiserver and
// kube-controller-manager, by default with 5,000 nodes, 40,000 devices and 25,000 claims.
//
// It prints what each phase takes, and fails unless all is as it should be:
//
//   - populate: nodes, slices, and claims most of which are held by bound pods, made by this program;
//   - start: the scheduler starts and binds its first pod;
//   - burst: many pods at once;
//   - churn: pods end and others come, for some minutes;
//   - audit: the auditor compares everything with the API, and finds a device that two claims were given;
//   - restart: the scheduler is killed while it binds pods, and starts again.
//
// In the end everything is counted anew from the API, and the scheduler's logs are read: at default verbosity there is
// nothing in them but what it starts with, and its decisions.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"k8s.io/klog/v2"
)

func main() {
	o := options{size: fullSize, out: os.Stdout}
	o.size.flags(flag.CommandLine)
	flag.StringVar(&o.root, "root", ".", "the project's folder, with the manifests")
	flag.StringVar(&o.binary, "scheduler", "bin/scheduler", "the scheduler")
	flag.StringVar(&o.figuresFile, "out", "", "file for the figures, as JSON")
	flag.DurationVar(&o.limit, "limit", 20*time.Minute, "how long it may take in all; a run that takes longer fails")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	// client-go tells how watches end, which they do when the cluster stops.
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	if err := within(ctx, o.limit, func(ctx context.Context) error { return run(ctx, o) }); err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted; everything is stopped")
		}
		fmt.Fprintf(os.Stderr, "\nscale failed: %v\n", err)
		os.Exit(1)
	}
}

// within runs something for as long as it may take. If its time is over, the error says so, whatever it was in.
func within(ctx context.Context, limit time.Duration, run func(context.Context) error) error {
	overdue := fmt.Errorf("it takes longer than -limit %s", limit)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, overdue)
	defer cancel()
	err := run(ctx)
	if err != nil && errors.Is(context.Cause(ctx), overdue) {
		return fmt.Errorf("%w; it was in %w", overdue, err)
	}
	return err
}
