package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/sharing"
)

// Leftovers says what is done about processes of a claim's pods that are still on its devices when it is unprepared.
type Leftovers string

// The policies.
const (
	// EndLeftovers kills them; a GPU whose processes do not end is quarantined.
	EndLeftovers Leftovers = "end"
	// QuarantineLeftovers leaves them alone, and quarantines the GPU until they are gone.
	QuarantineLeftovers Leftovers = "quarantine"
)

const (
	// defaultEndTimeout is for processes to end and for their memory to be freed.
	defaultEndTimeout = 5 * time.Second
	endPoll           = 20 * time.Millisecond
	// memorySlack is what the driver may keep for itself after a GPU was used.
	memorySlack = 256 << 20
)

// leftover is a process of one of the claim's pods.
type leftover struct {
	pid uint32
	pod types.UID
}

// clear returns when nothing of the claim's pods runs on the device any more and, for a whole GPU that nobody
// else uses, or has a share of, when its memory is free again.
func (m *Manager) clear(ctx context.Context, entry *ledger.Entry, step ledger.Step) error {
	// Whose memory a shared GPU's is, is not known.
	kept, err := m.keptByOthers(entry, step.GPU)
	if err != nil {
		return err
	}
	var last error
	killed := sets.New[leftover]()
	err = wait.PollUntilContextTimeout(ctx, endPoll, m.opts.EndTimeout, true, func(ctx context.Context) (bool, error) {
		now, err := ask(ctx, m, step.GPU, step.Target, usage)
		if err != nil {
			return false, err
		}
		left, err := m.leftovers(entry, step, now)
		if err != nil {
			return false, err
		}
		if len(left) == 0 {
			last = nil
			if !kept {
				last = checkMemory(step, now)
			}
			return last == nil, nil
		}
		last = fmt.Errorf("GPU %s (%s): process %d of pod %s is still on it", step.GPU, step.Target, left[0].pid, left[0].pod)
		if m.opts.Leftovers == QuarantineLeftovers {
			return false, last
		}
		for _, process := range left {
			if !killed.Has(process) { // it may take its time to end, and is looked at often
				klog.FromContext(ctx).Info("Process of a claim's pod is still on its GPU, killing it", "device", step.GPU, "pid", process.pid, "podUID", process.pod, "claim", klog.KRef(entry.Claim.Namespace, entry.Claim.Name))
				killed.Insert(process)
			}
			if err := m.opts.Tools.Processes.End(process.pid, process.pod); err != nil {
				return false, err
			}
		}
		return false, nil
	})
	if err != nil && last != nil {
		return last
	}
	return err
}

// used is what clear looks at.
type used struct {
	processes []nvml.Process
	instances []nvml.GPUInstance
	bytes     uint64
}

func usage(d nvml.Device) (u used, err error) {
	if u.processes, err = d.Processes(); err != nil {
		return u, err
	}
	if u.instances, err = d.GPUInstances(); err != nil {
		return u, err
	}
	u.bytes, err = d.MemoryUsedBytes()
	return u, err
}

// leftovers are the processes of the claim's pods on the device of the step.
func (m *Manager) leftovers(entry *ledger.Entry, step ledger.Step, now used) ([]leftover, error) {
	var left []leftover
	for _, process := range now.processes {
		if step.Partition != nil && !isIn(process, now.instances, step.Partition) {
			continue
		}
		pod, err := m.opts.Tools.Processes.PodOf(process.PID)
		if errors.Is(err, sharing.ErrNoProcess) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if pod != "" && slices.Contains(entry.Pods, pod) {
			left = append(left, leftover{process.PID, pod})
		}
	}
	return left, nil
}

// checkMemory compares with the memory that was in use before the claim had the GPU.
func checkMemory(step ledger.Step, now used) error {
	before, err := strconv.ParseUint(step.Before, 10, 64)
	if err != nil || len(now.processes) > 0 {
		return nil // a partition, whose memory goes with it; or somebody else's process, monitoring for one
	}
	if now.bytes > before+memorySlack {
		return fmt.Errorf("GPU %s (%s): %d MiB of memory are in use, before the claim it was %d MiB, and no process has them", step.GPU, step.Target, now.bytes>>20, before>>20)
	}
	return nil
}
