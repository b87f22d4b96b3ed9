package prepare

import (
	"context"
	"fmt"
	"reflect"
	"slices"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/ledger"
)

// Unprepare takes the claim's GPUs back. A claim that is not known succeeds: it has been unprepared before,
// or was never prepared here. It needs no API server and, so that a pod can always go, no GPU that answers: see Quarantine.
func (m *Manager) Unprepare(ctx context.Context, uid types.UID) error {
	_, err := m.unprepare(ctx, uid, nil)
	return err
}

// UnprepareUnused is Unprepare for a claim of which it was decided, without its lock, that nobody uses it. If its record is not the one any more that
// was seen then, the claim has been prepared since, for a pod that may run: nothing is done.
func (m *Manager) UnprepareUnused(ctx context.Context, seen *ledger.Entry) (done bool, err error) {
	return m.unprepare(ctx, seen.Claim.UID, seen)
}

func (m *Manager) unprepare(ctx context.Context, uid types.UID, seen *ledger.Entry) (done bool, err error) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claimUID", uid)
	ctx = klog.NewContext(ctx, logger)
	if err := ledger.ValidateUID(uid); err != nil {
		// Nothing can have been prepared under such a name.
		logger.Info("Claim to unprepare has no valid UID and is taken for an unknown one", "reason", err.Error())
		return false, nil
	}
	// Whatever a call may wait for: it must be able to undo, too, before the kubelet gives up.
	locks := m.locks.beginWithin(DefaultLockTimeout)
	defer locks.unlock()
	if err := locks.claim(ctx, uid); err != nil {
		return false, fmt.Errorf("unprepare claim %s: %w", uid, err)
	}
	record, err := m.ledger.Get(uid)
	if err != nil {
		return false, fmt.Errorf("unprepare claim %s: %w", uid, err)
	}
	if record == nil {
		logger.V(2).Info("Claim to unprepare is not known, nothing to do")
		return false, m.ledger.Remove(uid) // for good, also if it was forgotten only a moment ago
	}
	if record.Err != nil {
		return false, fmt.Errorf("unprepare claim %s: %w", uid, Unreadable(record))
	}
	if record.Recovered != nil {
		logger.Error(record.Recovered, "Ledger record was replaced by its previous copy", "path", record.Path)
	}
	if seen != nil && !reflect.DeepEqual(seen, record.Entry) {
		return false, nil
	}
	if err := locks.gpus(ctx, record.Entry.HeldGPUs()...); err != nil {
		return false, fmt.Errorf("unprepare claim %s: %w", record.Entry.Claim, err)
	}
	if err := m.rollBack(ctx, record.Entry); err != nil {
		return false, fmt.Errorf("unprepare claim %s: %w", record.Entry.Claim, err)
	}
	used := m.countUse(record.Entry)
	logger.V(2).Info("Claim is unprepared", "claim", klog.KRef(record.Entry.Claim.Namespace, record.Entry.Claim.Name), "devices", describe(record.Entry), "used", used)
	return true, nil
}

// rollBack undoes the recorded steps in reverse and then forgets the claim. If the disk does not take part the claim
// stays in the ledger, and its GPUs held. If a GPU does not, the GPU goes into quarantine with what is owed, and the claim
// is forgotten: it must come to an end, and within undoTimeout, also when the GPU never answers again.
func (m *Manager) rollBack(ctx context.Context, entry *ledger.Entry) error {
	// Half a roll-back helps nobody, not even a kubelet that has given up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.opts.UndoTimeout)
	defer cancel()
	var debts []debt
	for _, step := range slices.Backward(entry.Undo) {
		if slices.ContainsFunc(debts, func(d debt) bool { return d.gpu == step.GPU }) {
			debts = owe(debts, step.GPU, step, nil)
			continue
		}
		err := m.undo(ctx, entry, step)
		if err == nil {
			continue
		}
		err = fmt.Errorf("undo %s: %w", step, err)
		if step.GPU == "" {
			return err
		}
		for _, gpu := range affected(entry, step) {
			debts = owe(debts, gpu, step, err)
		}
	}
	if err := m.keepDebts(ctx, entry, debts); err != nil {
		return err
	}
	klog.FromContext(ctx).V(5).Info("Recorded steps are undone", "claimUID", entry.Claim.UID, "steps", len(entry.Undo), "quarantined", len(debts))
	return measured(unpreparing, stepRecord, func() error { return m.ledger.Remove(entry.Claim.UID) })
}

// affected are the GPUs on which the step is felt. A daemon that serves the claim alone has all of the claim's GPUs open, and is recorded
// once, for the first of them.
func affected(entry *ledger.Entry, step ledger.Step) []string {
	if step.Kind == ledger.StepMPSDaemon && !step.Shared {
		return entry.HeldGPUs()
	}
	return []string{step.GPU}
}
