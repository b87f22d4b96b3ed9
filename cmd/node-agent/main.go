// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Command node-agent hands the GPUs of one node to Kubernetes: it publishes them as ResourceSlices and
// prepares the ones that a scheduler has chosen for a pod's containers.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/component-base/cli/flag"
	"k8s.io/component-base/featuregate"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/internal/version"
	"stowage.dev/stowage/pkg/agent/sharing"
	"stowage.dev/stowage/pkg/agent/stepaside"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	cmd := newCommand()
	setUpLogging(cmd)
	err := cmd.ExecuteContext(ctx)
	klog.Flush()
	if errors.Is(err, stepaside.ErrAnew) && ctx.Err() == nil {
		err = fmt.Errorf("%w, which fails: %w", err, beginAnew())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "node-agent:", err)
		os.Exit(exitCode(err))
	}
}

// newCommand returns the program: run is what it does without a subcommand.
func newCommand() *cobra.Command {
	opts := defaultOptions(os.LookupEnv, os.Hostname)
	run := func(cmd *cobra.Command, _ []string) error { return runAgent(cmd.Context(), opts) }
	root := &cobra.Command{
		Use:           "node-agent",
		Short:         "Publishes a node's GPUs and hands them to containers",
		Version:       version.Beside(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE:          run,
	}
	root.SetGlobalNormalizationFunc(flag.WordSepNormalizeFunc)
	opts.addHardwareFlags(root.PersistentFlags())
	runCommand := &cobra.Command{
		Use:   "run",
		Short: "Serve the kubelet of this node (what node-agent does without a subcommand)",
		Args:  cobra.NoArgs,
		RunE:  run,
	}
	opts.addRunFlags(root.Flags())
	opts.addRunFlags(runCommand.Flags())
	root.AddCommand(runCommand, newDiscoverCommand(opts), newProbeCommand(opts), newLedgerCommand(opts),
		newCheckCommand(opts), newReleaseCommand(opts), newDaemonCommand())
	return root
}

// newDaemonCommand is for the agent alone: where the host has no systemd, it runs itself as what then becomes an MPS daemon.
func newDaemonCommand() *cobra.Command {
	return &cobra.Command{
		Use:    sharing.HelperCommand,
		Short:  "Become the MPS daemon that the agent describes on standard input",
		Hidden: true,
		Args:   cobra.NoArgs,
		RunE:   func(cmd *cobra.Command, _ []string) error { return sharing.Become(cmd.InOrStdin()) },
	}
}

// setUpLogging adds the flags of all Kubernetes components, and applies them once in the process.
func setUpLogging(root *cobra.Command) {
	config := logsapi.NewLoggingConfiguration()
	gates := featuregate.NewFeatureGate()
	utilruntime.Must(logsapi.AddFeatureGates(gates))
	logsapi.AddFlags(config, root.PersistentFlags())
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		logs.InitLogs()
		return logsapi.ValidateAndApply(config, gates)
	}
}
