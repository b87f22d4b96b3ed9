// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"

	"stowage.dev/stowage/pkg/agent/config"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// served is the MPS daemon that serves devices of a claim.
type served struct {
	sharing.Daemon
	// gpu is what its step is recorded for, of all that it serves.
	gpu string
	// shared: it serves all that have a share of that GPU.
	shared bool
}

// daemon is the MPS daemon for the claim's devices, nil if none wants one. There is one for all of them, because a
// container knows one daemon only; the claims that share a GPU have one together, which limits nobody: their containers
// bring their limits along. Before they are made, MIG devices have no UUIDs to look limits up for.
func (j *job) daemon(made bool) (*served, error) {
	var daemon *served
	var first *ledger.Device
	var limits *config.Limits
	partitions := 0
	for i, settings := range j.settings {
		device := &j.entry.Devices[i]
		if settings.Strategy != config.MPS || device.AdminAccess {
			continue
		}
		next := served{Daemon: sharing.Daemon{Name: string(j.entry.Claim.UID)}, gpu: j.entry.HeldGPUs()[0]}
		if device.Share != nil {
			// Who shares it does not know as which users the others run. Who asks for it is refused where the driver cannot.
			next = served{Daemon: sharing.Daemon{Name: device.GPU, MultiUser: sharing.MultiUserIfPossible}, gpu: device.GPU, shared: true}
			if settings.MPS.MultiUser {
				next.MultiUser = sharing.MultiUserYes
			}
			if _, err := mpsLimit(settings.MPS, device, j.granted(device.Request, device.GPU)); err != nil {
				return nil, refuse(device, err)
			}
		}
		if daemon == nil {
			daemon, first, limits = &next, device, settings.MPS
		}
		if daemon.Name != next.Name {
			return nil, refuse(device,
				fmt.Errorf("sharing.strategy: %q: a container can only use one MPS daemon, and each GPU that is shared by several claims has its "+
					"own: put the requests into claims of their own, or let all be for one GPU", config.MPS))
		}
		if daemon.shared {
			if next.MultiUser == sharing.MultiUserYes {
				daemon.MultiUser = next.MultiUser
			}
			if len(daemon.GPUs) == 0 {
				daemon.GPUs = append(daemon.GPUs, device.UUID)
			}
			continue
		}
		if !reflect.DeepEqual(limits, settings.MPS) {
			return nil, refuse(device,
				errors.New("sharing.mpsConfig: it differs from that of another request, and a container can only use one MPS daemon: put the "+
					"requests into claims of their own"))
		}
		if j.targets[i].Partition != nil {
			partitions++
		}
		daemon.GPUs = append(daemon.GPUs, j.entry.Devices[i].UUID)
	}
	if daemon == nil || daemon.shared {
		return daemon, nil
	}
	if partitions > 1 || partitions == 1 && len(daemon.GPUs) > 1 {
		return nil, refuse(first,
			fmt.Errorf("sharing.strategy: %q: an MPS daemon serves one MIG device alone, and the claim has %d devices for it",
				config.MPS, len(daemon.GPUs)))
	}
	daemon.ActiveThreadPercentage = limits.ActiveThreadPercentage
	if limits.MultiUser {
		daemon.MultiUser = sharing.MultiUserYes
	}
	var err error
	if daemon.MemoryMiB, err = limits.MemoryOf(daemon.GPUs); err != nil && (made || partitions == 0) {
		return nil, refuse(first, err)
	}
	return daemon, nil
}

// refuse says that the parameters for a device are refused, beside those of others or for the devices that the claim got.
func refuse(device *ledger.Device, err error) error {
	return &config.Error{Path: "request " + device.Request, Err: err}
}

// checkEnded refuses a daemon as long as one of that name is owed for other GPUs, which the claim had before: that one would be
// taken for it, and ended with what is owed.
func (d *decider) checkEnded(claim ledger.Claim, daemon *served) error {
	list, err := d.quarantines.list("")
	if err != nil {
		return err
	}
	for _, q := range list {
		if q.Owed != nil &&
			slices.ContainsFunc(q.Owed.Undo, func(s ledger.Step) bool { return s.Kind == ledger.StepMPSDaemon && s.Target == daemon.Name }) {
			return &QuarantinedError{
				GPU: q.GPU, Reason: q.Reason, Since: q.Since, Owed: q.Owed.Claim, Claim: claim,
				Err: errors.New("the MPS daemon that the claim had on it has not ended, and it can have one at a time"),
			}
		}
	}
	return nil
}

// checkDaemon finds out whether the MPS daemon could be started.
func (d *decider) checkDaemon(ctx context.Context, daemon *served) error {
	if err := d.daemons.Check(ctx, daemon.Daemon); err != nil {
		return fmt.Errorf("sharing.strategy: %q: %w", config.MPS, err)
	}
	return nil
}

// granted is what the containers of a request may use of one GPU, by all the shares that the request has of it.
type granted struct {
	memoryMiB int64
	// percent is 0 for no limit.
	percent int
}

func (j *job) granted(request, gpu string) (g granted) {
	limited := true
	for _, d := range j.entry.Devices {
		if d.Share != nil && d.Request == request && d.GPU == gpu {
			g.memoryMiB += d.Share.MemoryBytes >> 20
			g.percent += d.Share.ComputePercent
			limited = limited && d.Share.ComputePercent > 0
		}
	}
	if !limited {
		g.percent = 0
	}
	return g
}

// mpsLimit is for each process of the share: all of the share, or less if the parameters say so.
func mpsLimit(limits *config.Limits, device *ledger.Device, allowed granted) (granted, error) {
	memory, err := limits.MemoryOf([]string{device.UUID})
	if err != nil {
		return granted{}, err
	}
	switch {
	case memory[0] > allowed.memoryMiB:
		return granted{}, fmt.Errorf("sharing.mpsConfig: a limit of %dMi for a process is more than the share of the GPU has, %dMi",
			memory[0], allowed.memoryMiB)
	case allowed.percent > 0 && limits.ActiveThreadPercentage > allowed.percent:
		return granted{}, fmt.Errorf("sharing.mpsConfig.defaultActiveThreadPercentage: %d is more than the share of the GPU has, %d",
			limits.ActiveThreadPercentage, allowed.percent)
	}
	return granted{memoryMiB: cmp.Or(memory[0], allowed.memoryMiB), percent: cmp.Or(limits.ActiveThreadPercentage, allowed.percent)}, nil
}
