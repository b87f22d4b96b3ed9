// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare/internal/locks"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
)

// Unprepare takes the claim's GPUs back. A claim that is not known succeeds: it has been unprepared before,
// or was never prepared here. It needs no API server and, so that a pod can always go, no GPU that answers: see Quarantine.
func (m *Manager) Unprepare(ctx context.Context, uid types.UID) error {
	_, err := m.unprepare(ctx, uid, nil)
	return err
}

// UnprepareUnused is Unprepare for a claim of which it was decided, without its lock, that nobody uses it. If its record is not the one any
// more that was seen then, the claim has been prepared since, for a pod that may run: nothing is done.
func (m *Manager) UnprepareUnused(ctx context.Context, seen *ledger.Entry) (done bool, err error) {
	undone, err := m.unprepare(ctx, seen.Claim.UID, seen)
	return undone != nil, err
}

// unprepare returns what was undone, nil if nothing was.
func (m *Manager) unprepare(ctx context.Context, uid types.UID, seen *ledger.Entry) (done *ledger.Entry, err error) {
	logger := klog.LoggerWithValues(klog.FromContext(ctx), "claimUID", uid)
	ctx = klog.NewContext(ctx, logger)
	if err := ledger.ValidateUID(uid); err != nil {
		// Nothing can have been prepared under such a name.
		logger.Info("Claim to unprepare has no valid UID and is taken for an unknown one", "reason", err.Error())
		return nil, nil
	}
	// Whatever a call may wait for: it must be able to undo, too, before the kubelet gives up.
	locks := m.locks.BeginWithin(DefaultLockTimeout)
	defer locks.Unlock()
	if err := locks.Claim(ctx, uid); err != nil {
		return nil, fmt.Errorf("unprepare claim %s: %w", uid, err)
	}
	record, err := m.ledger.Get(uid)
	if err != nil {
		return nil, fmt.Errorf("unprepare claim %s: %w", uid, err)
	}
	if record == nil {
		logger.V(2).Info("Claim to unprepare is not known, nothing to do")
		return nil, m.ledger.Remove(uid) // for good, also if it was forgotten only a moment ago
	}
	if record.Err != nil {
		return nil, fmt.Errorf("unprepare claim %s: %w", uid, Unreadable(record))
	}
	if record.Recovered != nil {
		logger.Error(record.Recovered, "Ledger record was replaced by its previous copy", "path", record.Path)
	}
	if seen != nil && !reflect.DeepEqual(seen, record.Entry) {
		return nil, nil
	}
	if err := locks.GPUs(ctx, record.Entry.HeldGPUs()...); err != nil {
		return nil, fmt.Errorf("unprepare claim %s: %w", record.Entry.Claim, err)
	}
	// Without the driver what can be undone is, and the rest is owed: a pod can always go, and who wants the driver may wait for just that.
	if done, err := m.opts.Hardware.Begin("the release of claim " + record.Entry.Claim.String()); err == nil {
		defer done()
	}
	if err := m.undoer.rollBack(ctx, record.Entry); err != nil {
		return nil, fmt.Errorf("unprepare claim %s: %w", record.Entry.Claim, err)
	}
	used := countUse(record.Entry, m.opts.Clock.Now())
	logger.V(2).Info("Claim is unprepared", "claim", klog.KRef(record.Entry.Claim.Namespace, record.Entry.Claim.Name),
		"devices", describe(record.Entry), "used", used)
	return record.Entry, nil
}

// undoer undoes steps, and keeps what cannot be undone in quarantine.
type undoer struct {
	steps       *steps.Table
	ledger      *ledger.Ledger
	quarantines quarantines
	locks       *locks.Locker
	clock       clock.PassiveClock
	// timeout is for everything on a claim's GPUs together.
	timeout time.Duration
}

// rollBack undoes the recorded steps in reverse and then forgets the claim. If the disk does not take part the claim
// stays in the ledger, and its GPUs held. If a GPU does not, the GPU, or the partition, goes into quarantine with what is owed, and the
// claim is forgotten: it must come to an end, and within the timeout, also when the GPU never answers again.
func (u *undoer) rollBack(ctx context.Context, entry *ledger.Entry) error {
	// Half a roll-back helps nobody, not even a kubelet that has given up.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), u.timeout)
	defer cancel()
	var debts []debt
	for _, step := range slices.Backward(entry.Undo) {
		if slices.ContainsFunc(debts, func(d debt) bool {
			// A GPU that does not answer is asked once, not for each of its partitions.
			return d.gpu == step.GPU && (waitsFor(step, d.steps) || errors.Is(d.err, context.DeadlineExceeded))
		}) {
			debts = owe(debts, step.GPU, step, nil)
			continue
		}
		err := u.steps.Undo(ctx, entry, step)
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
	if err := u.quarantines.keep(ctx, entry, debts, u.clock.Now()); err != nil {
		return err
	}
	klog.FromContext(ctx).V(5).Info("Recorded steps are undone", "claimUID", entry.Claim.UID, "steps", len(entry.Undo),
		"quarantined", len(debts))
	return steps.Measured(steps.Unpreparing, steps.Record, func() error { return u.ledger.Remove(entry.Claim.UID) })
}

// affected are the GPUs on which the step is felt. A daemon that serves the claim alone has all of the claim's GPUs open, and is recorded
// once, for the first of them.
func affected(entry *ledger.Entry, step ledger.Step) []string {
	if step.Kind == ledger.StepMPSDaemon && !step.Shared {
		return entry.HeldGPUs()
	}
	return []string{step.GPU}
}

// settle tries to do what is owed on a GPU and wanted, and takes out of quarantine what that succeeds for. The caller has the GPU's lock.
// The error is a *QuarantinedError for the first that stays and is wanted even so: what is left of it may be elsewhere.
func (u *undoer) settle(ctx context.Context, gpu string, wanted func(*Quarantine) bool) error {
	list, err := u.quarantines.list(gpu)
	if err != nil {
		return err
	}
	for i := range list {
		q := &list[i]
		if !wanted(q) {
			continue
		}
		why, err := u.settleOwed(ctx, q)
		switch {
		case err != nil:
			return fmt.Errorf("release GPU %s from quarantine: %w", gpu, err)
		case why == nil:
			klog.FromContext(ctx).Info("GPU is out of quarantine: what was owed is done", "device", gpu,
				"claim", klog.KRef(q.Owed.Claim.Namespace, q.Owed.Claim.Name))
		case wanted(q):
			stays := &QuarantinedError{GPU: gpu, Places: q.Places(), Reason: q.Reason, Since: q.Since, Err: why}
			if q.Owed != nil {
				stays.Owed = q.Owed.Claim
			}
			return stays
		}
	}
	return nil
}

// settleOwed tries to do what is owed to one claim, and says why it stays. What is done for a partition is not owed any more before
// somebody else has the partition: it would be undone for him.
func (u *undoer) settleOwed(ctx context.Context, q *Quarantine) (why, err error) {
	if q.Owed == nil {
		return errors.New("what is to be undone is not known"), nil
	}
	var left []ledger.Step
	for _, step := range slices.Backward(q.Owed.Undo) {
		// A GPU that does not answer is asked once, not for each of its partitions.
		if !waitsFor(step, left) && !errors.Is(why, context.DeadlineExceeded) {
			err := u.undoAgain(ctx, q.Owed, step, why == nil)
			if err == nil {
				continue
			}
			why = cmp.Or(why, fmt.Errorf("undo %s: %w", step, err))
		}
		left = slices.Insert(left, 0, step)
	}
	switch {
	case why == nil:
		return nil, u.quarantines.remove(q.path)
	case len(left) < len(q.Owed.Undo):
		q.Owed.Undo, q.Reason = left, clipped(why.Error())
		return why, u.quarantines.write(q)
	}
	return why, nil
}

// undoAgain undoes a step that could not be undone before. Processes that do not end are waited for once, not in each partition: others may
// wait for the GPU's lock. They are killed in each, and may be gone the next time.
func (u *undoer) undoAgain(ctx context.Context, owed *ledger.Entry, step ledger.Step, first bool) error {
	if step.Kind == ledger.StepProcesses && !first {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Second/2)
		defer cancel()
	}
	return u.steps.Undo(ctx, owed, step)
}

// settleAll is settle for all that is in quarantine. GPUs that stay are no error; who publishes them says why.
func (u *undoer) settleAll(ctx context.Context) (left int, err error) {
	list, err := u.quarantines.list("")
	if err != nil {
		return 0, err
	}
	gpus := sets.New[string]()
	for _, q := range list {
		gpus.Insert(q.GPU)
	}
	// One that hangs does not keep the others where they are.
	var errs []error
	for _, ofGPU := range inParallel(gpus.UnsortedList(), func(gpu string) (string, []error) { return gpu, u.settleEach(ctx, gpu, list) }) {
		others := slices.DeleteFunc(slices.Clone(ofGPU), func(err error) bool { var stays *QuarantinedError; return errors.As(err, &stays) })
		errs = append(errs, others...)
		left += min(1, len(ofGPU)-len(others))
	}
	return left, errors.Join(errs...)
}

// settleEach tries one after the other of those on a GPU. Each may take its time, and whoever waits for the GPU's lock goes before the
// next: a pod may be going. A GPU that does not answer is asked once. Where all take too long those
// that are tried are others the next time.
func (u *undoer) settleEach(ctx context.Context, gpu string, list []Quarantine) (errs []error) {
	begun := time.Now()
	for _, i := range rand.Perm(len(list)) {
		if list[i].GPU != gpu {
			continue
		}
		err := u.settleOne(ctx, &list[i])
		if err == nil {
			continue
		}
		errs = append(errs, err)
		if errors.Is(err, context.DeadlineExceeded) || time.Since(begun) > u.timeout/2 {
			break
		}
		locks.Yield(ctx)
	}
	return errs
}

func (u *undoer) settleOne(ctx context.Context, q *Quarantine) error {
	locks := u.locks.Begin()
	defer locks.Unlock()
	if err := locks.GPUs(ctx, q.GPU); err != nil {
		return fmt.Errorf("release GPU %s from quarantine: %w", q.GPU, err)
	}
	return u.settle(ctx, q.GPU, q.is)
}
