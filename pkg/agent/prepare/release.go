// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare/internal/locks"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
)

// Errors of Release.
var (
	ErrNoClaim = errors.New("the ledger has no such claim")
	// ErrInUse: somebody uses what the claim holds, or that is not known. Nothing was changed.
	ErrInUse = errors.New("not released")
)

// Released is what Release did, for people.
type Released struct {
	// Did says what was done, Left what is for somebody to look at.
	Did, Left []string
	// Quarantined GPUs are nobody's: something on them could not be undone.
	Quarantined []string
}

// Release takes the claim's devices back for an administrator, under the same locks as Unprepare. inUse, which is asked under the claim's
// lock, says why the claim stays; with force that is passed over. Of a claim whose record cannot be read no more than its GPUs is known:
// they are brought to how a GPU is by itself, and what cannot be told from an administrator's own is left.
func (m *Manager) Release(ctx context.Context, uid types.UID, force bool, inUse func(context.Context) string) (Released, error) {
	if err := ledger.ValidateUID(uid); err != nil {
		return Released{}, err
	}
	locks := m.locks.Begin()
	defer locks.Unlock()
	if err := locks.Claim(ctx, uid); err != nil {
		return Released{}, fmt.Errorf("release claim %s: %w", uid, err)
	}
	record, err := m.ledger.Get(uid)
	if err != nil {
		return Released{}, fmt.Errorf("release claim %s: %w", uid, err)
	}
	if record == nil {
		return m.releaseQuarantine(ctx, locks, uid, force)
	}
	var done Released
	if keep := inUse(ctx); keep != "" {
		if !force {
			return Released{}, fmt.Errorf("%w: %s", ErrInUse, keep)
		}
		done.Did = append(done.Did, "passed over, because of --force: "+keep)
	}
	var newer *ledger.NewerVersionError
	if errors.As(record.Err, &newer) && !force {
		return Released{}, fmt.Errorf("%w: %w", ErrInUse, newer)
	}
	entry := record.Entry
	if entry == nil {
		entry = &ledger.Entry{Claim: nameIn(m.effects.Files, uid)}
		for _, gpu := range record.GPUs {
			entry.Devices = append(entry.Devices, ledger.Device{GPU: gpu})
		}
	}
	if err := locks.GPUs(ctx, entry.HeldGPUs()...); err != nil {
		return done, fmt.Errorf("release claim %s: %w", uid, err)
	}
	if record.Entry == nil {
		if err := m.rebuild(ctx, entry, &done); err != nil {
			return done, fmt.Errorf("release claim %s: %w", uid, err)
		}
		if record.AllGPUs {
			done.Left = append(done.Left, "the record held all GPUs of this node, and how they are set up was not looked at")
		}
	}
	for _, step := range slices.Backward(entry.Undo) {
		done.Did = append(done.Did, "undone: "+step.String())
	}
	if err := m.undoer.rollBack(ctx, entry); err != nil {
		return done, fmt.Errorf("release claim %s: %w", uid, err)
	}
	done.Did = append(done.Did, "removed: the claim's ledger record")
	list, err := m.quarantines.list("")
	if err != nil {
		return done, err
	}
	for _, q := range list {
		if q.claim() == uid {
			done.Quarantined = append(done.Quarantined, q.GPU)
			done.Left = append(done.Left, fmt.Sprintf("GPU %s is in quarantine: %s", q.GPU, q.Reason))
		}
	}
	return done, nil
}

// releaseQuarantine tries once more to do what is owed for a claim that has no record any more. With force what cannot be done is given up.
func (m *Manager) releaseQuarantine(ctx context.Context, call *locks.Call, uid types.UID, force bool) (done Released, err error) {
	list, err := m.quarantines.list("")
	if err != nil {
		return Released{}, err
	}
	list = slices.DeleteFunc(list, func(q Quarantine) bool { return q.claim() != uid })
	if len(list) == 0 {
		return Released{}, ErrNoClaim
	}
	for _, q := range list {
		if err := call.GPUs(ctx, q.GPU); err != nil {
			return done, fmt.Errorf("release GPU %s from quarantine: %w", q.GPU, err)
		}
		err := m.undoer.settle(ctx, q.GPU, q.is)
		var stays *QuarantinedError
		switch {
		case err == nil:
			done.Did = append(done.Did, fmt.Sprintf("released: GPU %s, on which what was owed is done", q.GPU))
		case !errors.As(err, &stays):
			return done, err
		case force:
			if err := m.quarantines.remove(q.path); err != nil {
				return done, fmt.Errorf("release GPU %s from quarantine: %w", q.GPU, err)
			}
			done.Did = append(done.Did, fmt.Sprintf("released, because of --force: GPU %s, with what is owed given up: %v", q.GPU, stays.Err))
		default:
			done.Quarantined = append(done.Quarantined, q.GPU)
			done.Left = append(done.Left, stays.Error())
		}
	}
	return done, nil
}

// rebuild lists what can be undone without the record: of each kind of step the one that does nothing where nothing is to be done.
func (m *Manager) rebuild(ctx context.Context, entry *ledger.Entry, done *Released) error {
	var err error
	if entry.BootID, err = m.effects.GPUs.BootID(); err != nil {
		return err
	}
	for _, gpu := range entry.HeldGPUs() {
		target, err := m.opts.Hardware.Find(ctx, gpu)
		if err != nil {
			done.Left = append(done.Left, fmt.Sprintf("GPU %s: how it is set up could not be looked at: %v", gpu, err))
			continue
		}
		uuid := target.GPU.UUID
		now, err := steps.Ask(ctx, m.effects.GPUs, gpu, uuid, steps.Observe)
		switch {
		case err != nil:
			// It ends in quarantine, until the GPU answers.
			entry.Undo = append(entry.Undo,
				ledger.Step{Kind: ledger.StepComputeMode, GPU: gpu, Target: uuid, Before: string(nvml.ComputeDefault), Shared: true})
			continue
		case now.MIG.Enabled:
			for _, instance := range now.Instances {
				done.Left = append(done.Left,
					fmt.Sprintf("GPU %s has MIG instance %d at slice %d: if the agent made it for this claim, nvidia-smi mig -dci and -dgi end it", gpu,
						instance.ID, instance.Placement.Start))
			}
			continue
		}
		if now.Compute != nil && *now.Compute != nvml.ComputeDefault {
			entry.Undo = append(entry.Undo, ledger.Step{
				Kind: ledger.StepComputeMode, GPU: gpu, Target: uuid, Before: string(nvml.ComputeDefault),
				Want: string(*now.Compute), Shared: true,
			})
		}
		if kept, err := m.holders.kept(entry, gpu); err == nil && !kept {
			if err := m.effects.TimeSlices.Reset(ctx, ledger.Step{GPU: gpu, Target: uuid}); err != nil {
				done.Left = append(done.Left, fmt.Sprintf("GPU %s: its time slice could not be set to the default: %v", gpu, err))
			}
		}
	}
	for _, gpu := range entry.HeldGPUs() {
		// The daemon of those that have a share of the GPU, if this was the last of them.
		entry.Undo = append(entry.Undo, ledger.Step{Kind: ledger.StepMPSDaemon, Target: gpu, GPU: gpu, Shared: true})
	}
	if gpus := entry.HeldGPUs(); len(gpus) > 0 {
		entry.Undo = append(entry.Undo, ledger.Step{Kind: ledger.StepMPSDaemon, Target: string(entry.Claim.UID), GPU: gpus[0]})
	}
	entry.Undo = append(entry.Undo, m.effects.Files.CDIFile(entry.Claim.UID))
	return nil
}

// InState tells whether an agent keeps its state in the folder.
func InState(stateDir string) error {
	if _, err := os.Stat(LedgerDir(stateDir)); err != nil {
		return fmt.Errorf("there is no ledger: %w", err)
	}
	return nil
}
