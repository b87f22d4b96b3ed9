// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package steps

import (
	"context"
	"fmt"
	"strconv"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
)

// processes: the claim's pods start them, and none of theirs may be left on the device, nor memory of a whole GPU.
type processes struct {
	gpus  GPUs
	ender Ender
	kept  Kept
}

// memorySlack is what the driver may keep for itself after a GPU was used.
const memorySlack = 256 << 20

// Processes is the step for a claim that has all of the GPU, or a share of it. That of a partition has no more than
// the place: its memory goes with it.
func Processes(now *Observed) []ledger.Step {
	return []ledger.Step{{Kind: ledger.StepProcesses, Before: strconv.FormatUint(now.UsedBytes, 10)}}
}

// leftover is a process of one of the claim's pods.
type leftover struct {
	pid uint32
	pod types.UID
}

// undo returns when nothing of the claim's pods runs on the device any more and, for a whole GPU that nobody
// else uses, or has a share of, when its memory is free again.
func (p processes) undo(ctx context.Context, entry *ledger.Entry, step ledger.Step) error {
	// Whose memory a shared GPU's is, is not known.
	kept, err := p.kept(entry, step.GPU)
	if err != nil {
		return err
	}
	killed := sets.New[leftover]()
	return p.ender.await(ctx, func(ctx context.Context) (left, err error) {
		now, err := Ask(ctx, p.gpus, step.GPU, step.Target, usage)
		if err != nil {
			return nil, err
		}
		still, err := p.leftovers(entry, step, now)
		switch {
		case err != nil:
			return nil, err
		case len(still) == 0 && kept:
			return nil, nil
		case len(still) == 0:
			return checkMemory(step, now), nil
		}
		left = fmt.Errorf("GPU %s (%s): process %d of pod %s is still on it", step.GPU, step.Target, still[0].pid, still[0].pod)
		if p.ender.Policy == QuarantineLeftovers {
			return nil, left
		}
		for _, process := range still {
			if !killed.Has(process) { // it may take its time to end, and is looked at often
				klog.FromContext(ctx).Info("Process of a claim's pod is still on its GPU, killing it", "device", step.GPU, "pid", process.pid,
					"podUID", process.pod, "claim", klog.KRef(entry.Claim.Namespace, entry.Claim.Name))
				killed.Insert(process)
			}
			if err := p.ender.Tool.End(process.pid, process.pod); err != nil {
				return cannotEnd(left, err), err
			}
		}
		return left, nil
	})
}

// used is what undo looks at.
type used struct {
	processes []nvml.Process
	instances []nvml.GPUInstance
	bytes     uint64
}

func usage(d nvml.Device) (u used, err error) {
	read(&err, &u.processes, d.Processes)
	read(&err, &u.instances, d.GPUInstances)
	read(&err, &u.bytes, d.MemoryUsedBytes)
	return u, err
}

// leftovers are the processes of the claim's pods on the device of the step.
func (p processes) leftovers(entry *ledger.Entry, step ledger.Step, now used) ([]leftover, error) {
	var left []leftover
	for _, process := range now.processes {
		if step.Partition != nil && !IsIn(process, now.instances, step.Partition) {
			continue
		}
		pod, is, err := p.ender.isOf(process.PID, entry.Pods)
		if err != nil {
			return nil, err
		}
		if is {
			left = append(left, leftover{process.PID, pod})
		}
	}
	return left, nil
}

// IsIn tells whether the process is in the place.
func IsIn(process nvml.Process, instances []nvml.GPUInstance, at *ledger.Partition) bool {
	instance := inPlace(instances, at)
	if instance == nil || process.Instance == nil || process.Instance.GPU != instance.ID {
		return false
	}
	if at.ComputeSize == 0 {
		return true
	}
	device, err := migDeviceIn(instances, at)
	return err == nil && process.Instance.Compute == device.ComputeInstance
}

// checkMemory compares with the memory that was in use before the claim had the GPU.
func checkMemory(step ledger.Step, now used) error {
	before, err := strconv.ParseUint(step.Before, 10, 64)
	if err != nil || len(now.processes) > 0 {
		return nil // a partition, whose memory goes with it; or somebody else's process, monitoring for one
	}
	if now.bytes > before+memorySlack {
		return fmt.Errorf("GPU %s (%s): %d MiB of memory are in use, before the claim it was %d MiB, and no process has them", step.GPU,
			step.Target, now.bytes>>20, before>>20)
	}
	return nil
}
