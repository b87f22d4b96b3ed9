// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
)

// SchemaVersion is the version of the payload that this package writes and the newest that it reads. All older ones
// stay readable; testdata has records of each.
//
//   - 1: whole GPUs; the only step is StepCDIFile.
//   - 2: partitions, boot ID, pods, and steps on GPUs. An agent that knows 1 alone would leave them behind.
//   - 3: shares of GPUs, and steps that several claims have in common, which an agent that knows 2 would undo with the first of them;
//     and MIG devices that are less than their GPU instance.
//   - 4: GPUs that are passed through to virtual machines. An agent that knows 3 would not give them back.
//   - 5: devices that the kubelet was given through its device plugin API. An agent that knows 4 would find no claim in the API
//     server, and take them back.
const SchemaVersion = 5

// versionOf is the oldest version that says all of the entry: during an update the agent from before still works with what it knows.
func versionOf(entry *Entry) int {
	if entry.Claim.Plugin != (PluginDevice{}) {
		return 5
	}
	if slices.ContainsFunc(entry.Devices, func(d Device) bool { return d.Passthrough }) {
		return 4
	}
	if slices.ContainsFunc(entry.Devices, func(d Device) bool { return d.Share != nil || d.Partition != nil && d.Partition.ComputeSize > 0 }) {
		return 3
	}
	return 2
}

const envelopeKind = "StowageClaimLedger"

// header is the first line of a file.
type header struct {
	Kind          string `json:"kind"`
	SchemaVersion int    `json:"schemaVersion"`
	// Checksum is the SHA-256, in hexadecimal, of every byte after the header's newline.
	Checksum string `json:"sha256"`
}

// CorruptError says that a record's bytes are not what was written.
type CorruptError struct{ Reason string }

func (e *CorruptError) Error() string { return "corrupt ledger record: " + e.Reason }

// NewerVersionError says that a record was written by a newer agent, in a schema this one does not know.
type NewerVersionError struct{ Version int }

func (e *NewerVersionError) Error() string {
	return fmt.Sprintf("ledger record has schema version %d, this agent knows versions up to %d: run the newer agent again to "+
		"release the claim", e.Version, SchemaVersion)
}

// encode returns the bytes of a file.
func encode(entry *Entry) ([]byte, error) {
	payload, err := json.Marshal(entry)
	if err != nil {
		return nil, fmt.Errorf("encode ledger record: %w", err)
	}
	payload = append(payload, '\n')
	sum := sha256.Sum256(payload)
	// of strings and a number
	head, _ := json.Marshal(header{Kind: envelopeKind, SchemaVersion: versionOf(entry), Checksum: hex.EncodeToString(sum[:])})
	return append(append(head, '\n'), payload...), nil
}

// decode is the reverse of encode. It returns a *CorruptError or a *NewerVersionError for bytes that it
// cannot take, and never panics whatever they are.
func decode(data []byte) (*Entry, error) {
	head, payload, found := bytes.Cut(data, []byte{'\n'})
	if !found {
		return nil, &CorruptError{Reason: fmt.Sprintf("no header line in %d bytes", len(data))}
	}
	var h header
	if err := json.Unmarshal(head, &h); err != nil {
		return nil, &CorruptError{Reason: "header: " + err.Error()}
	}
	if h.Kind != envelopeKind {
		return nil, &CorruptError{Reason: fmt.Sprintf("kind is %q, not %q", h.Kind, envelopeKind)}
	}
	if h.SchemaVersion > SchemaVersion {
		return nil, &NewerVersionError{Version: h.SchemaVersion}
	}
	if h.SchemaVersion < 1 {
		return nil, &CorruptError{Reason: fmt.Sprintf("schema version %d", h.SchemaVersion)}
	}
	sum := sha256.Sum256(payload)
	if got := hex.EncodeToString(sum[:]); got != h.Checksum {
		return nil, &CorruptError{Reason: fmt.Sprintf("checksum of the payload is %s, the header says %s", got, h.Checksum)}
	}
	entry := &Entry{}
	if err := json.Unmarshal(payload, entry); err != nil {
		return nil, &CorruptError{Reason: "payload: " + err.Error()}
	}
	switch entry.State {
	case PrepareStarted, PrepareCompleted:
		return entry, nil
	default:
		return nil, &CorruptError{Reason: fmt.Sprintf("unknown state %q", entry.State)}
	}
}

// isNewer reports whether err says that the record is from a newer agent.
func isNewer(err error) bool {
	var newer *NewerVersionError
	return errors.As(err, &newer)
}
