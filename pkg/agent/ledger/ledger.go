// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"stowage.dev/stowage/pkg/agent/durable"
)

// Ledger is a folder of records. It keeps nothing in memory: every call reads the folder, because during a
// rolling update two agents share it. Callers exclude each other per claim; calls for different claims may
// run at the same time.
type Ledger struct {
	dir  string
	fsys durable.FS
}

// Record is one claim's file as it was found.
type Record struct {
	UID types.UID
	// Path is the file, for messages.
	Path string
	// GPUs are the physical GPUs that the file's name says the claim holds; AllGPUs that there were too
	// many to list, so that every GPU of the node counts as held.
	GPUs    []string
	AllGPUs bool
	// Entry is the content, nil if Err is set.
	Entry *Entry
	// Recovered is the reason why Entry is the previous copy and not the current one. Entry's State may
	// then be older than the truth: the claim may have been completed.
	Recovered error
	// Err says why nothing could be read: a *CorruptError, a *NewerVersionError, an error of the file
	// system, or with two copies a *CopiesError. The GPUs stay held.
	Err error
}

// State is the one that counts: a claim whose newest copy is lost may have been completed, and containers may
// run. It is empty if nothing could be read.
func (r *Record) State() State {
	switch {
	case r.Entry == nil:
		return ""
	case r.Recovered != nil:
		return PrepareCompleted
	default:
		return r.Entry.State
	}
}

// CopiesError says why neither copy of a record can be read: a *CorruptError or an error of the file system for each.
type CopiesError struct{ Current, Previous error }

func (e *CopiesError) Error() string {
	return fmt.Sprintf("%v; nor can its previous copy, %s: %v", durable.Reason(e.Current), previousSuffix, durable.Reason(e.Previous))
}

// Unwrap returns both reasons.
func (e *CopiesError) Unwrap() []error { return []error{e.Current, e.Previous} }

// Holds reports whether the record blocks the physical GPU for other claims.
func (r *Record) Holds(gpu string) bool { return r.AllGPUs || slices.Contains(r.GPUs, gpu) }

// Open makes the folder, for the agent's user alone, if it is missing.
func Open(fsys durable.FS, dir string) (*Ledger, error) {
	if err := fsys.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make ledger folder: %w", err)
	}
	// A file system that is read-only refuses what would change nothing, too.
	info, err := os.Stat(dir)
	if err == nil && info.Mode().Perm() != 0o700 {
		err = os.Chmod(dir, 0o700)
	}
	if err != nil {
		return nil, fmt.Errorf("restrict ledger folder: %w", err)
	}
	return &Ledger{dir: dir, fsys: fsys}, nil
}

// At is a ledger to be read, in a folder that is there.
func At(fsys durable.FS, dir string) *Ledger { return &Ledger{dir: dir, fsys: fsys} }

// Dir returns the folder.
func (l *Ledger) Dir() string { return l.dir }

// Records returns all claims, sorted by UID. Unreadable ones are among them; the error is about the folder.
func (l *Ledger) Records() ([]*Record, error) {
	return l.read(func(*Record) bool { return true })
}

// Get returns the claim's record, nil if there is none.
func (l *Ledger) Get(uid types.UID) (*Record, error) {
	records, err := l.read(func(r *Record) bool { return r.UID == uid })
	if len(records) == 0 {
		return nil, err
	}
	return records[0], nil
}

// Copy is one of a record's two files, for people.
type Copy struct {
	Path string `json:"path"`
	// Content is what it says, nil if Problem says why that cannot be read.
	Content *Entry `json:"content,omitempty"`
	Problem string `json:"problem,omitempty"`
}

// Copies returns the current copy of the record and the previous one.
func (l *Ledger) Copies(record *Record) []Copy {
	copies := []Copy{{Path: record.Path}, {Path: record.Path + ".prev"}}
	for i := range copies {
		entry, err := l.load(copies[i].Path, record.UID)
		if copies[i].Content = entry; err != nil {
			copies[i].Problem = durable.Reason(err).Error()
		}
	}
	return copies
}

// Holders returns the records that hold the physical GPU. Only their files are read.
func (l *Ledger) Holders(gpu string) ([]*Record, error) {
	return l.read(func(r *Record) bool { return r.Holds(gpu) })
}

// Put writes the claim's record and keeps the one before it as the previous copy. When Put returns an error
// the record before it is still the current one.
func (l *Ledger) Put(entry *Entry) error {
	if err := ValidateUID(entry.Claim.UID); err != nil {
		return err
	}
	data, err := encode(entry)
	if err != nil {
		return err
	}
	path := filepath.Join(l.dir, base(entry.Claim.UID, entry.HeldGPUs())+suffix)
	if err := l.keepPrevious(path); err != nil {
		return fmt.Errorf("keep previous ledger record of claim %s: %w", entry.Claim, err)
	}
	if err := durable.WriteFile(l.fsys, path, data, 0o600); err != nil {
		return fmt.Errorf("write ledger record of claim %s: %w", entry.Claim, err)
	}
	return nil
}

// Remove forgets the claim: its GPUs are free when Remove returns without error. A claim without a record
// is no error. The previous copy goes first, so that a crash in between leaves the claim held.
func (l *Ledger) Remove(uid types.UID) error {
	if err := ValidateUID(uid); err != nil {
		return err
	}
	names, err := l.names(uid)
	if err != nil {
		return err
	}
	// Current records sort before their previous copies and unfinished writes: remove in reverse.
	slices.Reverse(names)
	for _, name := range names {
		if err := l.fsys.Remove(filepath.Join(l.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove ledger record of claim %s: %w", uid, err)
		}
	}
	// Also where nothing is left: who removed it may have ended before this.
	if err := l.fsys.SyncDir(l.dir); err != nil {
		return fmt.Errorf("remove ledger record of claim %s: %w", uid, err)
	}
	return nil
}

// Unfinished lists the claims of which a record was being written when its writer died, or is being written now.
func (l *Ledger) Unfinished() ([]types.UID, error) {
	names, err := l.names("")
	if err != nil {
		return nil, err
	}
	var claims []types.UID
	for _, name := range names {
		if strings.HasSuffix(name, durable.TempSuffix) {
			stem, _, _ := strings.Cut(name, suffix)
			uid, _, _ := parseBase(stem)
			claims = append(claims, uid)
		}
	}
	return slices.Compact(claims), nil
}

// RemoveUnfinished deletes what a dead writer of the claim's record has left. The caller excludes writers.
func (l *Ledger) RemoveUnfinished(uid types.UID) error {
	names, err := l.names(uid)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.HasSuffix(name, durable.TempSuffix) {
			continue
		}
		if err := durable.Remove(l.fsys, filepath.Join(l.dir, name)); err != nil {
			return fmt.Errorf("remove unfinished ledger record of claim %s: %w", uid, err)
		}
	}
	return nil
}

// keepPrevious gives the current record the previous copy's name too. The current name stays in place until
// the new record is renamed over it, so there is no moment without one. A record that cannot be read is no
// good copy and does not replace one.
func (l *Ledger) keepPrevious(path string) error {
	data, err := l.fsys.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	if _, err := decode(data); err != nil {
		if isNewer(err) {
			return err
		}
		return nil
	}
	previous := path + ".prev"
	// A crash before the current record was replaced leaves both names of one file, and to rename one of these
	// onto the other does nothing (rename(2)).
	if kept, _ := l.fsys.ReadFile(previous); bytes.Equal(kept, data) {
		return nil
	}
	temp := previous + durable.TempSuffix
	if err := l.fsys.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := l.fsys.Link(path, temp); err != nil {
		return err
	}
	if err := l.fsys.Rename(temp, previous); err != nil {
		return errors.Join(err, l.fsys.Remove(temp))
	}
	return nil
}

// read returns the records that the filter, which sees only what the name says, lets through.
func (l *Ledger) read(filter func(*Record) bool) ([]*Record, error) {
	names, err := l.names("")
	if err != nil {
		return nil, err
	}
	var records []*Record
	seen := map[string]bool{}
	for _, name := range names {
		stem, ok := strings.CutSuffix(name, suffix)
		if !ok {
			stem, ok = strings.CutSuffix(name, previousSuffix)
		}
		if !ok || seen[stem] {
			continue
		}
		seen[stem] = true
		record := &Record{Path: filepath.Join(l.dir, stem+suffix)}
		record.UID, record.GPUs, record.AllGPUs = parseBase(stem)
		if !filter(record) {
			continue
		}
		if !l.fill(record) {
			continue
		}
		records = append(records, record)
	}
	return records, nil
}

// fill reads the record's content. It returns false if the record is gone by now.
func (l *Ledger) fill(record *Record) bool {
	entry, err := l.load(record.Path, record.UID)
	if err == nil {
		record.Entry = entry
		return true
	}
	record.Err = err
	if isNewer(err) {
		// The previous copy may be in a schema that is known, but it is not the truth any more.
		return true
	}
	previous, previousErr := l.load(record.Path+".prev", record.UID)
	switch {
	case previousErr == nil:
		record.Entry, record.Recovered, record.Err = previous, err, nil
	case errors.Is(err, fs.ErrNotExist) && errors.Is(previousErr, fs.ErrNotExist):
		return false
	case !errors.Is(previousErr, fs.ErrNotExist):
		record.Err = &CopiesError{Current: err, Previous: previousErr}
	}
	return true
}

func (l *Ledger) load(path string, uid types.UID) (*Entry, error) {
	data, err := l.fsys.ReadFile(path)
	if err != nil {
		return nil, err
	}
	entry, err := decode(data)
	if err != nil {
		return nil, err
	}
	if entry.Claim.UID != uid {
		return nil, &CorruptError{Reason: fmt.Sprintf("the payload is of claim %s", entry.Claim.UID)}
	}
	return entry, nil
}

// names returns the folder's file names, sorted; with a UID only that claim's.
func (l *Ledger) names(uid types.UID) ([]string, error) {
	entries, err := l.fsys.ReadDir(l.dir)
	if err != nil {
		return nil, fmt.Errorf("read ledger folder: %w", err)
	}
	var names []string
	for _, entry := range entries {
		name := entry.Name()
		if !strings.Contains(name, suffix) {
			continue
		}
		stem, _, _ := strings.Cut(name, suffix)
		if of, _, _ := parseBase(stem); uid == "" || of == uid {
			names = append(names, name)
		}
	}
	return names, nil
}
