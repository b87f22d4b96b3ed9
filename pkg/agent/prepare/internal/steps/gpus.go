// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"errors"
	"fmt"
	"time"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// Hardware is the node's physical GPUs, as steps are done on them.
type Hardware interface {
	// On runs f with the GPU of that name and UUID, and returns f's error. When ctx ends first it returns an error
	// at once: calls into NVML cannot be cancelled, so f goes on, and f's that come later for the same
	// GPU wait for it.
	On(ctx context.Context, gpu, uuid string, f func(nvml.Device) error) error
	// Look looks at the node anew: for GPUs that have come back.
	Look(ctx context.Context) error
	// Apart does f while NVML is closed, because a GPU that NVML has open does not leave its driver, and then is Look. It returns f's
	// error. All other questions and acts wait meanwhile.
	Apart(ctx context.Context, f func(context.Context) error) error
	// BootID is another one after each reboot of the machine.
	BootID() (string, error)
}

// GPUs are Hardware that is waited for no longer than Timeout for one question or act.
type GPUs struct {
	Hardware
	Timeout time.Duration
}

// Ask is Hardware.On for a question.
func Ask[T any](ctx context.Context, gpus GPUs, gpu, uuid string, f func(nvml.Device) (T, error)) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, gpus.Timeout)
	defer cancel()
	// Written by f, which may still run when On has given up; read only if it has not.
	answer := new(T)
	err := gpus.On(ctx, gpu, uuid, func(d nvml.Device) (err error) {
		*answer, err = f(d)
		return err
	})
	if err != nil {
		var none T
		return none, fmt.Errorf("GPU %s (%s): %w", gpu, uuid, err)
	}
	return *answer, nil
}

// act is Ask without an answer, on the step's GPU.
func (g GPUs) act(ctx context.Context, step ledger.Step, f func(nvml.Device) error) error {
	_, err := Ask(ctx, g, step.GPU, step.Target, func(d nvml.Device) (struct{}, error) { return struct{}{}, f(d) })
	return err
}

// EndedByReboot tells that nothing on a GPU can be left of the claim. Beside an error the answer means nothing.
func (g GPUs) EndedByReboot(entry *ledger.Entry) (bool, error) {
	if entry.BootID == "" {
		return false, nil
	}
	now, err := g.BootID()
	return now != entry.BootID, err
}

// refused tells that NVML does not do it on this GPU, now or later.
func refused(err error) bool {
	return errors.Is(err, nvml.ErrNotSupported) || errors.Is(err, nvml.ErrNoPermission)
}

// Observed is the state of a GPU that the steps depend on.
type Observed struct {
	MIG       nvml.MIGMode
	Instances []nvml.GPUInstance
	Processes []nvml.Process
	Readings  nvml.Readings
	// UsedBytes of memory.
	UsedBytes uint64
	// Compute and Persistence are nil where the GPU has no such setting.
	Compute     *nvml.ComputeMode
	Persistence *bool
}

// Observe asks the GPU for all of it, up to the first error.
func Observe(d nvml.Device) (o Observed, err error) {
	read(&err, &o.MIG, d.MIGMode)
	read(&err, &o.Instances, d.GPUInstances)
	read(&err, &o.Processes, d.Processes)
	read(&err, &o.Readings, d.Readings)
	read(&err, &o.UsedBytes, d.MemoryUsedBytes)
	read(&err, &o.Compute, optional(d.ComputeMode))
	read(&err, &o.Persistence, optional(d.Persistence))
	return o, err
}

// read asks, unless there has been an error.
func read[T any](err *error, to *T, ask func() (T, error)) {
	if *err == nil {
		*to, *err = ask()
	}
}

// optional is nil where the GPU does not have it.
func optional[T any](ask func() (T, error)) func() (*T, error) {
	return func() (*T, error) {
		value, err := ask()
		if errors.Is(err, nvml.ErrNotSupported) {
			return nil, nil
		}
		return &value, err
	}
}
