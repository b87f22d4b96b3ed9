// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package prepare

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/api/metadata/v1beta1"

	"stowage.dev/stowage/pkg/agent/durable"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/prepare/internal/steps"
)

// Found is what the state folder has of one claim, for people.
type Found struct {
	UID       types.UID `json:"uid"`
	Namespace string    `json:"namespace,omitempty"`
	Name      string    `json:"name,omitempty"`
	// State that counts; empty if no record can be read, or if there is none.
	State ledger.State `json:"state,omitempty"`
	// Devices by their names in ResourceSlices, or the GPUs in the record's file name if nothing else is known.
	Devices []string `json:"devices,omitempty"`
	// Problem is why the record, or its current copy, cannot be read.
	Problem string `json:"problem,omitempty"`
	// Copies of the record: the current one and the previous one; none for a claim that is in quarantine alone.
	Copies     []ledger.Copy     `json:"copies,omitempty"`
	Quarantine []FoundQuarantine `json:"quarantine,omitempty"`
}

// FoundQuarantine is a GPU that is nobody's because of the claim.
type FoundQuarantine struct {
	GPU    string    `json:"gpu"`
	Reason string    `json:"reason"`
	Since  time.Time `json:"since,omitzero"`
	// Owed are the steps that are still to be undone; none if they cannot be read.
	Owed []string `json:"owed,omitempty"`
	Path string   `json:"path"`
}

// Readable says whether the record can be read: "yes", "previous copy" or "no"; "-" if there is none.
func (f *Found) Readable() string {
	switch {
	case len(f.Copies) == 0:
		return "-"
	case f.Problem == "":
		return "yes"
	case f.State != "":
		return "previous copy"
	default:
		return "no"
	}
}

// Inspect reads what an agent with that state folder has of its claims, in the order of their UIDs. It takes no locks and changes nothing.
func Inspect(stateDir string) ([]Found, error) {
	if err := InState(stateDir); err != nil {
		return nil, err
	}
	claims := ledger.At(durable.OS{}, LedgerDir(stateDir))
	records, err := claims.Records()
	if err != nil {
		return nil, err
	}
	files := filesOf(durable.OS{}, stateDir, nil)
	var all []Found
	for _, record := range records {
		f := Found{UID: record.UID, State: record.State(), Copies: claims.Copies(record)}
		switch {
		case record.Entry != nil:
			f.Namespace, f.Name = record.Entry.Claim.Namespace, record.Entry.Claim.Name
			for _, device := range record.Entry.Devices {
				f.Devices = append(f.Devices, device.Device)
			}
			if record.Recovered != nil {
				f.Problem = durable.Reason(record.Recovered).Error()
			}
		default:
			named := nameIn(files, record.UID)
			f.Namespace, f.Name, f.Devices, f.Problem = named.Namespace, named.Name, heldNames(record), record.Err.Error()
		}
		all = append(all, f)
	}
	quarantined, err := quarantines{fs: durable.OS{}, dir: QuarantineDir(stateDir)}.list("")
	if err != nil && !os.IsNotExist(durable.Reason(err)) {
		return nil, err
	}
	for _, q := range quarantined {
		claim := q.claim()
		i := slices.IndexFunc(all, func(f Found) bool { return f.UID == claim })
		if i < 0 {
			f := Found{UID: claim, Devices: []string{q.GPU}}
			if q.Owed != nil {
				f.Namespace, f.Name = q.Owed.Claim.Namespace, q.Owed.Claim.Name
			}
			all, i = append(all, f), len(all)
		}
		found := FoundQuarantine{GPU: q.GPU, Reason: q.Reason, Since: q.Since, Path: q.path}
		if q.Owed != nil {
			for _, step := range q.Owed.Undo {
				found.Owed = append(found.Owed, step.String())
			}
		}
		all[i].Quarantine = append(all[i].Quarantine, found)
	}
	slices.SortStableFunc(all, func(a, b Found) int { return strings.Compare(string(a.UID), string(b.UID)) })
	return all, nil
}

// NamesOf names claims whose records cannot be read. Those whose names nothing else tells are left out.
func (m *Manager) NamesOf(claims []types.UID) (named []ledger.Claim) {
	for _, uid := range claims {
		if claim := nameIn(m.effects.Files, uid); claim.Name != "" {
			named = append(named, claim)
		}
	}
	return named
}

// nameIn is the claim's name by its device metadata, which say it too when the record cannot be read; empty if they do not.
func nameIn(files steps.Files, uid types.UID) ledger.Claim {
	claim := ledger.Claim{UID: uid}
	list, _ := files.FS.ReadDir(files.MetadataOf(uid))
	for _, file := range list {
		var found v1beta1.DeviceMetadata
		data, err := files.FS.ReadFile(filepath.Join(files.MetadataOf(uid), file.Name()))
		if err == nil && json.Unmarshal(data, &found) == nil && found.UID == uid {
			claim.Namespace, claim.Name = found.Namespace, found.Name
		}
	}
	return claim
}
