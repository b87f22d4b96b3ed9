package prepare

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/discovery"
	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// Strays are claims' CDI files that no record of the ledger owns, because the ledger was lost or changed by hand.
// What is in them may be in use: who removes one must have proof that it is not.
func (m *Manager) Strays() ([]cdi.File, error) {
	// In this order: a file is written after the record that owns it.
	files, err := m.store.Files()
	if err != nil {
		return nil, err
	}
	records, err := m.ledger.Records()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(files, func(f cdi.File) bool {
		return slices.ContainsFunc(records, func(r *ledger.Record) bool { return r.UID == f.Claim })
	}), nil
}

// Files are the CDI files of all claims.
func (m *Manager) Files() ([]cdi.File, error) { return m.store.Files() }

// RemoveStray deletes a claim's CDI file, unless the claim is in the ledger by now: it has been prepared again, or is just being.
func (m *Manager) RemoveStray(ctx context.Context, uid types.UID) error {
	locks := m.locks.begin()
	defer locks.unlock()
	if err := locks.claim(ctx, uid); err != nil {
		return fmt.Errorf("remove the CDI specification of claim %s: %w", uid, err)
	}
	record, err := m.ledger.Get(uid)
	if err != nil || record != nil {
		return err
	}
	return m.store.Remove(uid, m.store.Path(uid))
}

// sweep deletes files that a crashed agent had not written to the end. Another agent may be writing now, so each claim is locked.
func (m *Manager) sweep(ctx context.Context) error {
	inLedger, ledgerErr := m.ledger.Unfinished()
	inCDI, cdiErr := m.store.Unfinished()
	inQuarantine, quarantineErr := m.unfinishedQuarantines()
	errs := []error{ledgerErr, cdiErr, quarantineErr}
	claims := slices.Concat(inLedger, inCDI)
	for claim := range inQuarantine {
		claims = append(claims, claim)
	}
	slices.Sort(claims)
	for _, claim := range slices.Compact(claims) {
		errs = append(errs, m.sweepClaim(ctx, claim, inQuarantine[claim]))
	}
	return errors.Join(errs...)
}

func (m *Manager) sweepClaim(ctx context.Context, claim types.UID, quarantines []string) error {
	locks := m.locks.begin()
	defer locks.unlock()
	if err := locks.claim(ctx, claim); err != nil {
		return fmt.Errorf("remove unfinished files of claim %s: %w", claim, err)
	}
	errs := []error{m.ledger.RemoveUnfinished(claim), m.store.RemoveUnfinished(claim)}
	for _, path := range quarantines {
		errs = append(errs, durable.Remove(m.opts.FS, path))
	}
	klog.FromContext(ctx).V(2).Info("Unfinished files of a claim are removed", "claimUID", claim)
	return errors.Join(errs...)
}

// unfinishedQuarantines has the paths by claim.
func (m *Manager) unfinishedQuarantines() (map[types.UID][]string, error) {
	entries, err := m.opts.FS.ReadDir(m.quarantineDir())
	if err != nil {
		return nil, fmt.Errorf("read quarantine folder: %w", err)
	}
	paths := map[types.UID][]string{}
	for _, entry := range entries {
		if name, ok := strings.CutSuffix(entry.Name(), QuarantineSuffix+durable.TempSuffix); ok {
			_, claim, _ := strings.Cut(name, "_")
			paths[types.UID(claim)] = append(paths[types.UID(claim)], filepath.Join(m.quarantineDir(), entry.Name()))
		}
	}
	return paths, nil
}

// sweepDaemons takes away what is left of MPS daemons of which neither a record nor a quarantine tells, as after the ledger was lost: folders, and the
// file systems that are mounted there. A daemon that runs is left alone: pods may use it.
func (m *Manager) sweepDaemons(ctx context.Context) error {
	names, err := m.opts.Tools.Daemons.List()
	if err != nil {
		return err
	}
	var errs []error
	for _, name := range names {
		errs = append(errs, m.sweepDaemon(ctx, name))
	}
	return errors.Join(errs...)
}

func (m *Manager) sweepDaemon(ctx context.Context, name string) error {
	locks := m.locks.begin()
	defer locks.unlock()
	// The name is a claim's UID or a GPU's name. Whoever starts a daemon has the lock of either.
	if err := locks.claim(ctx, types.UID(name)); err != nil {
		return fmt.Errorf("what is left of MPS daemon %s: %w", name, err)
	}
	if strings.HasPrefix(name, discovery.NamePrefix) {
		if err := locks.gpus(ctx, name); err != nil {
			return fmt.Errorf("what is left of MPS daemon %s: %w", name, err)
		}
	}
	if known, err := m.hasDaemon(name); known || err != nil {
		return err
	}
	// Nobody is served before this ends, and systemd may hang.
	ctx, cancel := context.WithTimeout(ctx, m.opts.GPUTimeout)
	defer cancel()
	if running, err := m.opts.Tools.Daemons.Running(ctx, name); running || err != nil {
		return err
	}
	if err := m.opts.Tools.Daemons.Stop(ctx, name); err != nil {
		return fmt.Errorf("what is left of MPS daemon %s: %w", name, err)
	}
	klog.FromContext(ctx).Info("What was left of an MPS daemon is removed: no claim has it", "daemon", name)
	return nil
}

// hasDaemon tells whether a claim or a quarantine may have a daemon of that name.
func (m *Manager) hasDaemon(name string) (bool, error) {
	records, err := m.ledger.Records()
	if err != nil {
		return false, err
	}
	list, err := m.quarantined("")
	if err != nil {
		return false, err
	}
	has := func(entry *ledger.Entry) bool {
		return slices.ContainsFunc(entry.Undo, func(s ledger.Step) bool { return s.Kind == ledger.StepMPSDaemon && s.Target == name })
	}
	return slices.ContainsFunc(records, func(r *ledger.Record) bool {
		return r.Entry == nil && (string(r.UID) == name || r.Holds(name)) || r.Entry != nil && has(r.Entry)
	}) || slices.ContainsFunc(list, func(q Quarantine) bool {
		return q.Owed == nil && (string(q.claim()) == name || q.GPU == name) || q.Owed != nil && has(q.Owed)
	}), nil
}
