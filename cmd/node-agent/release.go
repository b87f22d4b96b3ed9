// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare"
	"stowage.dev/stowage/pkg/agent/stepaside"
)

// newKeeper decides whether the agent may have the driver open. Without clients only the node itself is asked.
func newKeeper(opts *options, api clients) *stepaside.Keeper {
	keeper := stepaside.Options{
		Clock: clock.RealClock{},
		Dir:   stepaside.Dir(opts.stateDir),
		Elsewhere: func() string {
			onHost, _ := opts.driverElsewhere()
			return onHost
		},
		Returned: os.Getenv(returned) != "",
		Opens:    opts.opensAnew,
	}
	if api.agent != nil {
		keeper.Node = (&nodeWatch{client: api.agent, name: opts.nodeName, clock: clock.RealClock{}}).Node
	}
	return stepaside.New(keeper)
}

// opensAnew returns nil if a new process can open the driver and finds what GPUs there are. This one has loaded a library for good.
func (o *options) opensAnew(ctx context.Context) error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	driverRoot := o.driverRoot
	if o.host.auto {
		driverRoot = nvml.SpecAuto
	}
	var said bytes.Buffer
	process := exec.CommandContext(ctx, program, "discover",
		"--node-name="+o.nodeName, "--nvml="+o.nvml, "--driver-root="+driverRoot, "--host-root="+o.host.root,
		"--sim-dir="+o.simDir, "--sim-library="+o.simLibrary)
	process.Stderr = &said
	process.WaitDelay = time.Second
	err = process.Run()
	switch text := strings.TrimSpace(said.String()); {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("node-agent discover: %w", context.Cause(ctx))
	case text != "":
		return errors.New(text[strings.LastIndex(text, "\n")+1:])
	default:
		return fmt.Errorf("node-agent discover: %w", err)
	}
}

// beginAnew puts a new process, with the same ID, in the place of this one, and returns only if that fails. Whoever has
// started it need not do so again: the kubelet would let it wait, and longer each time.
func beginAnew() error {
	program, err := os.Executable()
	if err == nil {
		err = os.Setenv(returned, "true")
	}
	if err != nil {
		return err
	}
	return syscall.Exec(program, os.Args, os.Environ())
}

// returned, in the environment, tells a process that it has come in the place of another one.
const returned = "STOWAGE_AGENT_RETURNED"

// newReleaseCommand returns "release-driver", with which an administrator gets the driver for himself.
func newReleaseCommand(opts *options) *cobra.Command {
	var (
		what    string
		end     bool
		timeout = 2 * time.Minute
	)
	cmd := &cobra.Command{
		Use:   "release-driver",
		Short: "Let the agent close the NVIDIA driver, to reset a GPU, to unload or to upgrade the driver",
		Long: `Let the agent close the NVIDIA driver, to reset a GPU, to unload or to upgrade the driver.

It returns when no agent of this node has the driver open any more. The node's devices are tainted meanwhile, claims that come wait, and
pods that run stay. What they have open of the driver they keep: end them if that is in the way. The request stands, also over
restarts of the agent and reboots, until the command is run with --end.

Run it on the node, or in the agent's container, with the agent's --state-dir. The annotation ` + stepaside.Annotation + `
of the Node asks for the same from afar.

Exit codes: 0 done; 1 failed; 2 not done within --timeout: the agent still has the driver open or, with --end, has not opened it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if timeout <= 0 {
				return fmt.Errorf("--timeout %s: want more than 0", timeout)
			}
			if end && what != "" {
				return fmt.Errorf("--for %q: does not go with --end", what)
			}
			if err := prepare.InState(opts.stateDir); err != nil {
				return fmt.Errorf("--state-dir %s: %w", opts.stateDir, err)
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			dir := stepaside.Dir(opts.stateDir)
			if end {
				if err := stepaside.End(ctx, dir); err != nil {
					return err
				}
				fmt.Fprintln(cmd.OutOrStdout(), "the agent has the driver open again")
				return nil
			}
			if err := stepaside.Ask(ctx, dir, what); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), "no agent of this node has the driver open; end with: node-agent release-driver --end")
			return nil
		},
	}
	cmd.Flags().StringVar(&opts.stateDir, "state-dir", opts.stateDir, "the agent's --state-dir")
	cmd.Flags().StringVar(&what, "for", what, "what the driver is wanted for, as others are told")
	cmd.Flags().BoolVar(&end, "end", end, "the driver is not wanted any more: the agent opens it again")
	cmd.Flags().DurationVar(&timeout, "timeout", timeout, "how long to wait for the agent; the request stands all the same")
	return cmd
}
