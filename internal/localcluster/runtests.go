// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// RunTests is for the TestMain of a package of integration tests: it starts a
// cluster, hands it to use, runs the tests (m is a *testing.M), stops the
// cluster and returns the exit status. Progress goes to stderr unless the
// options say otherwise. After a failed test the cluster's folder with the logs
// is kept and named. It needs no root.
//
// On SIGINT and SIGTERM it stops the cluster and ends the process, as the
// testing package has no way to end a running test.
func RunTests(m interface{ Run() int }, options Options, use func(*Cluster)) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if options.Progress == nil {
		options.Progress = os.Stderr
	}
	cluster, err := Start(ctx, options)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	detach := context.AfterFunc(ctx, func() {
		if err := cluster.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(130)
	})
	defer detach() // before stop, which ends ctx
	use(cluster)
	code := m.Run()
	if code != 0 {
		cluster.Keep()
	}
	if err := cluster.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	return code
}
