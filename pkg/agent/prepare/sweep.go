// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare/internal/locks"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
)

// sweeper removes what nobody owns any more.
type sweeper struct {
	ledger      *ledger.Ledger
	files       steps.Files
	daemons     steps.Daemons
	quarantines quarantines
	locks       *locks.Locker
}

// Strays are claims' CDI files that no record of the ledger owns, because the ledger was lost or changed by hand.
// What is in them may be in use: who removes one must have proof that it is not.
func (m *Manager) Strays() ([]cdi.File, error) { return m.sweeper.strays() }

func (s *sweeper) strays() ([]cdi.File, error) {
	// In this order: a file is written after the record that owns it.
	files, err := s.files.CDI.Files()
	if err != nil {
		return nil, err
	}
	records, err := s.ledger.Records()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(files, func(f cdi.File) bool {
		return slices.ContainsFunc(records, func(r *ledger.Record) bool { return r.UID == f.Claim })
	}), nil
}

// Files are the CDI files of all claims.
func (m *Manager) Files() ([]cdi.File, error) { return m.effects.Files.CDI.Files() }

// RemoveStray deletes a claim's CDI file, unless the claim is in the ledger by now: it has been prepared again, or is just being.
func (m *Manager) RemoveStray(ctx context.Context, uid types.UID) error {
	return m.sweeper.removeStray(ctx, uid)
}

func (s *sweeper) removeStray(ctx context.Context, uid types.UID) error {
	locks := s.locks.Begin()
	defer locks.Unlock()
	if err := locks.Claim(ctx, uid); err != nil {
		return fmt.Errorf("remove the CDI specification of claim %s: %w", uid, err)
	}
	record, err := s.ledger.Get(uid)
	if err != nil || record != nil {
		return err
	}
	return s.files.CDI.Remove(uid, s.files.CDI.Path(uid))
}

// sweep deletes files that a crashed agent had not written to the end. Another agent may be writing now, so each claim is locked.
func (s *sweeper) sweep(ctx context.Context) error {
	inLedger, ledgerErr := s.ledger.Unfinished()
	inCDI, cdiErr := s.files.CDI.Unfinished()
	inQuarantine, quarantineErr := s.quarantines.unfinished()
	errs := []error{ledgerErr, cdiErr, quarantineErr}
	claims := slices.Concat(inLedger, inCDI)
	for claim := range inQuarantine {
		claims = append(claims, claim)
	}
	slices.Sort(claims)
	for _, claim := range slices.Compact(claims) {
		errs = append(errs, s.sweepClaim(ctx, claim, inQuarantine[claim]))
	}
	return errors.Join(errs...)
}

func (s *sweeper) sweepClaim(ctx context.Context, claim types.UID, quarantines []string) error {
	locks := s.locks.Begin()
	defer locks.Unlock()
	if err := locks.Claim(ctx, claim); err != nil {
		return fmt.Errorf("remove unfinished files of claim %s: %w", claim, err)
	}
	errs := []error{s.ledger.RemoveUnfinished(claim), s.files.CDI.RemoveUnfinished(claim)}
	for _, path := range quarantines {
		errs = append(errs, durable.Remove(s.files.FS, path))
	}
	klog.FromContext(ctx).V(2).Info("Unfinished files of a claim are removed", "claimUID", claim)
	return errors.Join(errs...)
}

// sweepMetadata removes the files of claims that have neither a record nor a CDI specification: an older agent, which does not know of
// metadata, has unprepared these, or their specification was a stray.
func (s *sweeper) sweepMetadata(ctx context.Context, records []*ledger.Record) error {
	folders, err := s.files.FS.ReadDir(s.files.MetadataDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("list device metadata: %w", err)
	}
	var errs []error
	for _, folder := range folders {
		claim := types.UID(folder.Name())
		if slices.ContainsFunc(records, func(r *ledger.Record) bool { return r.UID == claim }) {
			continue
		}
		errs = append(errs, s.sweepMetadataOf(ctx, claim))
	}
	return errors.Join(errs...)
}

func (s *sweeper) sweepMetadataOf(ctx context.Context, claim types.UID) error {
	locks := s.locks.Begin()
	defer locks.Unlock()
	if err := locks.Claim(ctx, claim); err != nil {
		return fmt.Errorf("remove device metadata of claim %s: %w", claim, err)
	}
	// It may have been prepared since the records were read.
	if record, err := s.ledger.Get(claim); err != nil || record != nil {
		return err
	}
	// As long as a container can be given the claim's devices, it is to be given these, too.
	if _, err := s.files.FS.ReadFile(s.files.CDI.Path(claim)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return s.files.RemoveMetadata(claim)
}

// sweepDaemons takes away what is left of MPS daemons of which neither a record nor a quarantine tells, as after the ledger was lost:
// folders, and the file systems that are mounted there. A daemon that runs is left alone: pods may use it.
func (s *sweeper) sweepDaemons(ctx context.Context) error {
	names, err := s.daemons.Tool.List()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, s.sweepDaemon(ctx, name))
	}
	return errors.Join(errs...)
}

func (s *sweeper) sweepDaemon(ctx context.Context, name string) error {
	locks := s.locks.Begin()
	defer locks.Unlock()
	// The name is a claim's UID or a GPU's name. Whoever starts a daemon has the lock of either.
	if err := locks.Claim(ctx, types.UID(name)); err != nil {
		return fmt.Errorf("what is left of MPS daemon %s: %w", name, err)
	}
	if strings.HasPrefix(name, discovery.NamePrefix) {
		if err := locks.GPUs(ctx, name); err != nil {
			return fmt.Errorf("what is left of MPS daemon %s: %w", name, err)
		}
	}
	if known, err := s.hasDaemon(name); known || err != nil {
		return err
	}
	// Nobody is served before this ends, and systemd may hang.
	return s.daemons.RemoveEnded(ctx, name)
}

// hasDaemon tells whether a claim or a quarantine may have a daemon of that name.
func (s *sweeper) hasDaemon(name string) (bool, error) {
	records, err := s.ledger.Records()
	if err != nil {
		return false, err
	}
	list, err := s.quarantines.list("")
	if err != nil {
		return false, err
	}
	has := func(entry *ledger.Entry) bool {
		return slices.ContainsFunc(entry.Undo, func(step ledger.Step) bool { return step.Kind == ledger.StepMPSDaemon && step.Target == name })
	}
	return slices.ContainsFunc(records, func(r *ledger.Record) bool {
		return r.Entry == nil && (string(r.UID) == name || r.Holds(name)) || r.Entry != nil && has(r.Entry)
	}) || slices.ContainsFunc(list, func(q Quarantine) bool {
		return q.Owed == nil && (string(q.claim()) == name || q.GPU == name) || q.Owed != nil && has(q.Owed)
	}), nil
}
