// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// Daemons of MPS serve a claim, or all claims with a share of a GPU.
type Daemons struct {
	Tool sharing.Daemons
	// Timeout is for all that is done at once.
	Timeout time.Duration
	// Nodes makes sure that the driver's device nodes are there which whatever uses CUDA opens. A daemon sees, and may open, those of its
	// start alone.
	Nodes func(context.Context) error
}

// Check finds out whether such a daemon could be started.
func (d Daemons) Check(ctx context.Context, daemon sharing.Daemon) error {
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	return d.Tool.Check(ctx, daemon)
}

func (d Daemons) do(ctx context.Context, _ *Claim, step ledger.Step) error { return d.Start(ctx, step) }

// Start starts a daemon that does not run, as the step says.
func (d Daemons) Start(ctx context.Context, step ledger.Step) error {
	if err := d.Nodes(ctx); err != nil {
		return fmt.Errorf("the driver's device nodes: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	return d.Tool.Start(ctx, daemonOf(step))
}

func (d Daemons) undo(ctx context.Context, _ *ledger.Entry, step ledger.Step) error {
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	return d.Tool.Stop(ctx, step.Target)
}

// Ready tells whether the step's daemon runs and has its limits.
func (d Daemons) Ready(ctx context.Context, step ledger.Step) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	return d.Tool.Ready(ctx, daemonOf(step))
}

// RemoveEnded removes what is left of a daemon, unless it runs.
func (d Daemons) RemoveEnded(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, d.Timeout)
	defer cancel()
	if running, err := d.Tool.Running(ctx, name); running || err != nil {
		return err
	}
	if err := d.Tool.Stop(ctx, name); err != nil {
		return fmt.Errorf("what is left of MPS daemon %s: %w", name, err)
	}
	klog.FromContext(ctx).Info("What was left of an MPS daemon is removed: no claim has it", "daemon", name)
	return nil
}

// daemonOf is the daemon that a step has, or will have, started.
func daemonOf(step ledger.Step) sharing.Daemon {
	multiUser := sharing.MultiUser(step.Daemon.MultiUser)
	if step.Shared && multiUser == sharing.MultiUserNo {
		multiUser = sharing.MultiUserIfPossible // an older agent has recorded it
	}
	return sharing.Daemon{
		Name: step.Target, GPUs: step.Daemon.GPUs, ActiveThreadPercentage: step.Daemon.ActiveThreadPercentage, MemoryMiB: step.Daemon.MemoryMiB,
		MultiUser: multiUser,
	}
}
