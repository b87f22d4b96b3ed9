// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"cmp"
	"context"
	"fmt"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/config"
)

// DriverOptions say where the real driver's programs are.
type DriverOptions struct {
	// DriverRoot is the folder below which the agent sees the driver's files.
	DriverRoot string
	// HostDriverRoot is the same folder as the host sees it: "/" for a driver that is installed there. Empty if it has the same path.
	HostDriverRoot string
	// MPSRoot gets a folder for each daemon, on which a file system of ShmBytes is mounted. The host has it under the same path, and sees
	// what is mounted there.
	MPSRoot string
	// ShmBytes is DefaultShmBytes if 0.
	ShmBytes int64
	// HostRoot is the host's root folder as the agent sees it; "/" if the agent runs on the host itself.
	HostRoot string
	// Unconfined daemons have all rights of root on the host. Else what they do not need is taken from them.
	Unconfined bool
	// ProcRoot is /proc, of the host.
	ProcRoot string

	mounts      mounts        // the kernel's if nil
	bootedRoot  string        // HostRoot if empty: where it is looked whether systemd runs
	helpTimeout time.Duration // defaultHelpTimeout if 0
}

// NewDriver returns the tools for real GPUs.
func NewDriver(opts DriverOptions) Tools {
	opts.ShmBytes = cmp.Or(opts.ShmBytes, DefaultShmBytes)
	opts.helpTimeout = cmp.Or(opts.helpTimeout, defaultHelpTimeout)
	return Tools{
		TimeSlicer: &smi{opts}, Daemons: newDaemons(opts), Processes: &processes{proc: opts.ProcRoot}, Persistenced: newPersistenced(opts),
		Pods: func() (map[types.UID]bool, error) { return PodsRunning(opts.ProcRoot) },
	}
}

// smi runs nvidia-smi.
type smi struct{ opts DriverOptions }

// SetTimeSlice implements TimeSlicer.
func (s *smi) SetTimeSlice(ctx context.Context, gpu string, interval config.Interval) error {
	smi, err := s.opts.find("nvidia-smi")
	if err == nil {
		err = run(s.opts.command(ctx, smi, "compute-policy", "-i", gpu, "--set-timeslice", strconv.Itoa(interval.Number())), "")
	}
	if err != nil {
		return fmt.Errorf("set the time slice of %s to %s: %w", gpu, interval, err)
	}
	return nil
}
