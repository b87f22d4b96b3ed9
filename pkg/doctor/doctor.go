// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"slices"
	"strings"

	"stowage.dev/stowage/pkg/snapshot"
)

// Severity of a finding.
type Severity string

const (
	// Error: pods do not get devices, or one device is given to two.
	Error Severity = "error"
	// Warning: something does not work, or will not after the next fault.
	Warning Severity = "warning"
)

// Finding is a fault.
type Finding struct {
	Severity Severity `json:"severity"`
	// Check is the name in the table.
	Check string `json:"check"`
	// Object is what it is about: "node worker-1", "deployment stowage-system/stowage-scheduler".
	Object  string `json:"object"`
	Problem string `json:"problem"`
	Do      string `json:"do"`
}

// Skipped is a check, or a part of one, for which the snapshot has too little.
type Skipped struct {
	Check string `json:"check"`
	Why   string `json:"why"`
}

// Report is what was found, the worst first.
type Report struct {
	Findings []Finding `json:"findings"`
	// Passed are the names of the checks without a finding.
	Passed  []string  `json:"passed"`
	Skipped []Skipped `json:"skipped,omitempty"`
}

// Examine runs all checks of the table.
func Examine(s *snapshot.Snapshot) *Report {
	c := newCluster(s)
	r := &Report{Findings: []Finding{}, Passed: []string{}}
	for i := range table {
		check := &table[i]
		if why := c.lacks(check.Needs); why != "" {
			r.Skipped = append(r.Skipped, Skipped{check.Name, why})
			continue
		}
		before := len(c.findings)
		c.check = check.Name
		check.look(c)
		if len(c.findings) == before {
			r.Passed = append(r.Passed, check.Name)
		}
	}
	r.Findings = append(r.Findings, c.findings...)
	slices.SortStableFunc(r.Findings, func(a, b Finding) int { return cmp.Compare(rank(a.Severity), rank(b.Severity)) })
	return r
}

func rank(s Severity) int { return slices.Index([]Severity{Error, Warning}, s) }

// lacks says which of the resources the snapshot does not have, and why; it is empty if it has all.
func (c *cluster) lacks(resources []string) string {
	var all []string
	for _, resource := range resources {
		if c.s.Installation == nil && !fromObjects[resource] {
			switch {
			case c.s.HashedNames:
				return "the names of the snapshot are hashed"
			default:
				return "the snapshot is of an older version, which did not read that"
			}
		}
		for _, missing := range c.s.Missing {
			if missing.Resource == resource {
				all = append(all, resource+": "+missing.Reason)
			}
		}
	}
	return strings.Join(all, ", ")
}
