package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// Unprepare takes the claim's GPUs back. A claim that is not known succeeds: it has been unprepared before,
// or was never prepared here. It needs neither NVML nor the API server.
func (m *Manager) Unprepare(ctx context.Context, uid types.UID) error {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claimUID", uid)
	ctx = klog.NewContext(ctx, logger)
	if err := ledger.ValidateUID(uid); err != nil {
		// Nothing can have been prepared under such a name.
		logger.Info("Claim to unprepare has no valid UID and is taken for an unknown one", "reason", err.Error())
		return nil
	}
	unlockClaim, err := m.locks.lockClaim(ctx, uid)
	if err != nil {
		return fmt.Errorf("unprepare claim %s: %w", uid, err)
	}
	defer unlockClaim()
	record, err := m.ledger.Get(uid)
	if err != nil {
		return fmt.Errorf("unprepare claim %s: %w", uid, err)
	}
	if record == nil {
		logger.V(2).Info("Claim to unprepare is not known, nothing to do")
		return nil
	}
	if record.Err != nil {
		return fmt.Errorf("unprepare claim %s: its ledger record %s cannot be read, so what has to be undone is not known; its GPUs stay held until the file is removed by hand once nothing uses them: %w", uid, record.Path, record.Err)
	}
	if record.Recovered != nil {
		logger.Error(record.Recovered, "Ledger record was replaced by its previous copy", "path", record.Path)
	}
	unlockGPUs, err := m.locks.lockGPUs(ctx, record.Entry.HeldGPUs())
	if err != nil {
		return fmt.Errorf("unprepare claim %s: %w", record.Entry.Claim, err)
	}
	defer unlockGPUs()
	if err := m.rollBack(ctx, record.Entry); err != nil {
		return fmt.Errorf("unprepare claim %s: %w", record.Entry.Claim, err)
	}
	logger.V(2).Info("Claim is unprepared", "claim", klog.KRef(record.Entry.Claim.Namespace, record.Entry.Claim.Name), "devices", describe(record.Entry))
	return nil
}

// rollBack undoes the recorded steps in reverse and then forgets the claim. If a step cannot be undone the
// claim stays in the ledger, and its GPUs held.
func (m *Manager) rollBack(ctx context.Context, entry *ledger.Entry) error {
	for _, step := range slices.Backward(entry.Undo) {
		if err := m.undo(entry, step); err != nil {
			return fmt.Errorf("undo %s %s: %w", step.Kind, step.Target, err)
		}
	}
	klog.FromContext(ctx).V(5).Info("Recorded steps are undone", "claimUID", entry.Claim.UID, "steps", len(entry.Undo))
	return m.ledger.Remove(entry.Claim.UID)
}

// undo takes one side effect back; one that never happened is taken back with success.
func (m *Manager) undo(entry *ledger.Entry, step ledger.Step) error {
	switch step.Kind {
	case ledger.StepCDIFile:
		return m.store.Remove(entry.Claim.UID, step.Target)
	default:
		return errors.New("this agent does not know this kind of step")
	}
}
