// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/nvml"
	"stowage.dev/stowage/pkg/agent/prepare/internal/locks"
)

// Recovery counts what Recover and Reconcile found and did.
type Recovery struct {
	// Claims are completed and in order, Restored ones had a CDI specification that had to be written again,
	// and Restarted an MPS daemon that had ended.
	Claims, Restored, Restarted int
	// RolledBack were left half-made by a crash.
	RolledBack int
	// Unreadable claims keep their GPUs held.
	Unreadable int
	// Quarantined GPUs could not be released yet; see Manager.Quarantined.
	Quarantined int
}

// add adds what was found and done of a claim.
func (r *Recovery) add(of Recovery) {
	r.Claims += of.Claims
	r.Restored += of.Restored
	r.Restarted += of.Restarted
	r.RolledBack += of.RolledBack
	r.Unreadable += of.Unreadable
}

// Recover brings the node in line with the ledger after a start, before the kubelet can call: what a crash
// left half-made is rolled back, and completed claims get their CDI specifications back, because the
// kubelet does not call Prepare when a container of a running pod restarts. Files that a crash left unfinished are removed. A claim that
// cannot be brought in order stays held and is in the error; the others are not affected.
func (m *Manager) Recover(ctx context.Context) (Recovery, error) {
	return m.reconcile(ctx, true)
}

// Reconcile puts back CDI specifications that are missing or were changed. It leaves half-made claims alone: a
// call may be at work on them.
func (m *Manager) Reconcile(ctx context.Context) (Recovery, error) {
	return m.reconcile(ctx, false)
}

func (m *Manager) reconcile(ctx context.Context, rollBack bool) (Recovery, error) {
	var sum Recovery
	records, err := m.ledger.Records()
	if err != nil {
		return Recovery{}, err
	}
	// None waits for another one's locks.
	sums, errs := make([]Recovery, len(records)), make([]error, len(records))
	var group sync.WaitGroup
	for i, record := range records {
		group.Go(func() { errs[i] = m.reconcileClaim(ctx, record.UID, rollBack, &sums[i]) })
	}
	group.Wait()
	for _, of := range sums {
		sum.add(of)
	}
	errs = append(errs, m.sweeper.sweepMetadata(ctx, records))
	sum.Quarantined, err = m.undoer.settleAll(ctx)
	errs = append(errs, err)
	if rollBack {
		errs = append(errs, m.sweeper.sweep(ctx), m.sweeper.sweepDaemons(ctx))
	}
	return sum, errors.Join(errs...)
}

// Renew brings a prepared claim in order again after the driver was loaded anew: it has forgotten what was done to the GPUs, and containers
// that start again are given the files of the driver that there is now. A claim that is not prepared, or not any more, stays so; so
// does one from before a reboot, which no container uses, and for whose pod the kubelet calls Prepare.
func (m *Manager) Renew(ctx context.Context, claim *resourceapi.ResourceClaim) error {
	results, parameters, err := plan(claim, m.opts.Driver, m.opts.Pool)
	if len(results) == 0 { // as with an error
		return err
	}
	_, err = m.prepare(ctx, claim, results, parameters, func(record *ledger.Record) bool {
		if record == nil || record.State() != ledger.PrepareCompleted {
			return false
		}
		ended, err := m.effects.GPUs.EndedByReboot(record.Entry)
		return !ended || err != nil // an error is told by who goes on
	})
	return err
}

// RestoreClaim is Reconcile for one claim.
func (m *Manager) RestoreClaim(ctx context.Context, uid types.UID) (Recovery, error) {
	var sum Recovery
	err := m.reconcileClaim(ctx, uid, false, &sum)
	return sum, err
}

func (m *Manager) reconcileClaim(ctx context.Context, uid types.UID, rollBack bool, sum *Recovery) error {
	locks := m.locks.Begin()
	defer locks.Unlock()
	if err := locks.Claim(ctx, uid); err != nil {
		return fmt.Errorf("recover claim %s: %w", uid, err)
	}
	// What was listed may have changed until the lock was ours.
	record, err := m.ledger.Get(uid)
	if record == nil {
		return err
	}
	logger := klog.FromContext(ctx)
	switch {
	case record.Err != nil:
		sum.Unreadable++
		return Unreadable(record)

	case record.State() == ledger.PrepareStarted:
		if !rollBack {
			return nil
		}
		if err := locks.GPUs(ctx, record.Entry.HeldGPUs()...); err != nil {
			return fmt.Errorf("roll back claim %s: %w", record.Entry.Claim, err)
		}
		if err := m.undoer.rollBack(ctx, record.Entry); err != nil {
			return fmt.Errorf("roll back claim %s: %w", record.Entry.Claim, err)
		}
		sum.RolledBack++
		logger.Info("Claim was left half-prepared and is rolled back",
			"claim", klog.KRef(record.Entry.Claim.Namespace, record.Entry.Claim.Name), "claimUID", uid)
		return nil

	default:
		// Completed, or maybe completed: the newest record is lost and containers may run.
		sum.Claims++
		if rollBack && record.Recovered != nil { // told once after a start
			logger.Error(record.Recovered, "Ledger record was replaced by its previous copy, and the claim is taken for prepared",
				"claim", klog.KRef(record.Entry.Claim.Namespace, record.Entry.Claim.Name), "claimUID", uid, "path", record.Path)
		}
		if record.Entry.CDISpec == nil {
			// The previous copy, from before the specification was made: the next Prepare makes it again.
			return nil
		}
		restored, err := m.effects.Files.Restore(record.Entry)
		if err != nil {
			return fmt.Errorf("restore claim %s: %w", record.Entry.Claim, err)
		}
		if restored {
			sum.Restored++
			logger.Info("CDI specification or device metadata of a prepared claim was missing or changed and is written again",
				"claim", klog.KRef(record.Entry.Claim.Namespace, record.Entry.Claim.Name), "claimUID", uid, "path", m.effects.Files.CDI.Path(uid))
		}
		done, err := m.opts.Hardware.Begin("the daemon of claim " + record.Entry.Claim.String())
		if err != nil {
			return nil // it would open the driver; whoever comes back with the driver starts it
		}
		defer done()
		started, err := m.keepDaemon(ctx, locks, record.Entry)
		if err != nil {
			return fmt.Errorf("restore claim %s: %w", record.Entry.Claim, err)
		}
		if started {
			sum.Restarted++
			logger.Info("MPS daemon of a prepared claim had ended and is started again",
				"claim", klog.KRef(record.Entry.Claim.Namespace, record.Entry.Claim.Name), "claimUID", uid)
		}
		return nil
	}
}

// keepDaemon starts the MPS daemon of a prepared claim again, with its limits, if it has ended: with it have its clients, and when their
// containers start again they find none. One that runs without its limits, because it did not take them in time,
// gets them. The caller has the claim's lock.
func (m *Manager) keepDaemon(ctx context.Context, call *locks.Call, entry *ledger.Entry) (started bool, err error) {
	i := slices.IndexFunc(entry.Undo, func(s ledger.Step) bool { return s.Kind == ledger.StepMPSDaemon })
	if i < 0 || entry.Undo[i].Daemon == nil {
		return false, nil
	}
	if ended, err := m.effects.GPUs.EndedByReboot(entry); ended || err != nil {
		return false, err
	}
	step := entry.Undo[i]
	if is, err := m.effects.Daemons.Ready(ctx, step); is || err != nil {
		return false, err
	}
	// Another claim may be starting the one that both have.
	if err := call.GPUs(ctx, entry.HeldGPUs()...); err != nil {
		return false, err
	}
	if owed, err := m.quarantines.owes(entry); owed || err != nil {
		return false, err // it is being unprepared
	}
	if is, err := m.effects.Daemons.Ready(ctx, step); is || err != nil {
		return false, err
	}
	return true, m.effects.Daemons.Start(ctx, step)
}

func heldNames(record *ledger.Record) []string {
	if record.AllGPUs {
		return []string{"all GPUs of this node"}
	}
	return record.GPUs
}

// Quarantined lists the GPUs in quarantine, by name; one may be listed for several claims.
func (m *Manager) Quarantined() ([]Quarantine, error) { return m.quarantines.list("") }

// Made is what the agent has made on GPUs since the last boot: what a claim, or a GPU in quarantine, has a step for that takes it
// back. What cannot be read is left out.
func (m *Manager) Made() discovery.Made {
	made := discovery.Made{}
	bootID, err := m.effects.GPUs.BootID()
	if err != nil {
		return nil
	}
	var entries []*ledger.Entry
	// In this order: what goes over from the ledger into quarantine is in one of them.
	records, _ := m.ledger.Records()
	for _, record := range records {
		entries = append(entries, record.Entry)
	}
	list, _ := m.quarantines.list("")
	for _, q := range list {
		entries = append(entries, q.Owed)
	}
	for _, entry := range entries {
		if entry == nil || entry.BootID != bootID {
			continue
		}
		for _, step := range entry.Undo {
			switch step.Kind {
			case ledger.StepMIGMode:
				made.Insert(discovery.Place{GPU: step.GPU})
			case ledger.StepPartition:
				made.Insert(discovery.Place{GPU: step.GPU, At: nvml.Placement{Start: step.Partition.Start, Size: step.Partition.Size}})
			case ledger.StepPersistence, ledger.StepComputeMode, ledger.StepTimeSlice, ledger.StepProcesses, ledger.StepNoPersistence,
				ledger.StepHidden, ledger.StepPCIDriver, ledger.StepIOMMUGroup, ledger.StepMPSDaemon, ledger.StepCDIFile:
				// They make no partitions.
			}
		}
	}
	return made
}
