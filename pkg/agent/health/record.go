// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"encoding/json"
	"fmt"
	"slices"
)

// recordVersion is that of the file format. Fields are only ever added within a version.
const recordVersion = 1

// record is what outlives the agent: the faults of one GPU, valid until the machine starts anew.
type record struct {
	Version int     `json:"version"`
	BootID  string  `json:"bootID"`
	Faults  []Fault `json:"faults"`
	// ExplainedECC errors are those of MIG devices, Explaining that all up to the next reading are.
	ExplainedECC uint64 `json:"explainedECC,omitempty"`
	Explaining   bool   `json:"explaining,omitempty"`
	// UUID of the GPU, and the most Lanes that its PCIe link was seen with. They stay known when the machine starts anew: that is when a link
	// comes up with fewer.
	UUID  string `json:"uuid,omitempty"`
	Lanes int    `json:"lanes,omitempty"`
}

// encode returns the faults that count.
func (s *State) encode(bootID string) ([]byte, error) {
	faults := slices.DeleteFunc(slices.Clone(s.faults), func(f Fault) bool { return !f.counts() })
	return json.MarshalIndent(record{
		Version: recordVersion, BootID: bootID, Faults: faults, ExplainedECC: s.explained, Explaining: s.explaining, UUID: s.uuid, Lanes: s.lanes,
	}, "", "  ")
}

// decode reads a record. One of an earlier boot holds nothing of its faults that is still known: what is still so will be seen.
func decode(data []byte, bootID string) (State, error) {
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return State{}, err
	}
	if r.Version != recordVersion {
		return State{}, fmt.Errorf("version: %d: this agent reads version %d", r.Version, recordVersion)
	}
	if r.Lanes > maxLanes {
		r.Lanes = 0 // an earlier agent took any number that it was told
	}
	if r.BootID != bootID {
		return State{uuid: r.UUID, lanes: r.Lanes}, nil
	}
	s := State{explained: r.ExplainedECC, explaining: r.Explaining, uuid: r.UUID, lanes: r.Lanes}
	for _, f := range r.Faults {
		if _, ok := rules[f.Reason]; !ok || f.Since.IsZero() {
			return State{}, fmt.Errorf("faults: reason %q since %s: no such fault", f.Reason, f.Since)
		}
		f.seen = f.Since
		s.faults = append(s.faults, f)
	}
	s.sort()
	return s, nil
}
