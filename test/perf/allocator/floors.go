// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"os"
)

// tolerance is the part of a recorded ratio that must be reached.
const tolerance = 0.8

// slack is how many times a target for time on the clock may be exceeded before it counts as failed: processors differ by less, and
// what tries everything by far more.
const slack = 5

// floors are the recorded ratios, by the name of the comparison.
type floors map[string]float64

func readFloors(file string) (floors, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("reading the recorded ratios: %w", err)
	}
	var f floors
	if err := json.Unmarshal(content, &f); err != nil {
		return nil, fmt.Errorf("reading the recorded ratios from %s: %w", file, err)
	}
	return f, nil
}

func (f floors) write(file string) error {
	content, err := json.MarshalIndent(f, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(content, '\n'), 0o644)
}

// judge says what is wrong with an answer or its time; empty if nothing is. Where upstream only ran into its limit the ratio says
// more about the limit than about ours, so our own time counts.
func (f floors) judge(c comparison, t times) string {
	switch {
	case t.fit != t.upstreamFit:
		return fmt.Sprintf("upstream says %d nodes", t.upstreamFit)
	case c.limit > 0 && t.ours > slack*c.limit:
		return fmt.Sprintf("takes longer than %v", slack*c.limit)
	case c.limit > 0:
		return ""
	case t.ratio < tolerance*f[c.name]:
		return fmt.Sprintf("was %.0f×", f[c.name])
	case f[c.name] == 0 && t.ratio < c.target:
		return fmt.Sprintf("misses the target of %.0f×", c.target)
	}
	return ""
}

// missed tells that the target was not reached in this run. That alone is no failure: what is recorded reaches it.
func missed(c comparison, t times) bool {
	return t.ratio < c.target || c.limit > 0 && t.ours > c.limit
}
