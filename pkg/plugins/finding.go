// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"cmp"
	"fmt"
	"strings"
)

// Finding is one thing that is wrong with a scheduler configuration.
type Finding struct {
	// Profile is the schedulerName; empty for what is about no profile.
	Profile string
	// Plugin is the plugin that it is about; may be empty.
	Plugin string
	// Field is the place in the configuration, and Value what is there; either may be empty.
	Field, Value string
	// Problem says what is wrong, Change what would help.
	Problem, Change string
	// Warning: the scheduler starts nevertheless.
	Warning bool
}

// String is the finding in one line.
func (f Finding) String() string {
	text := f.Problem
	if f.Change != "" {
		text += ": " + f.Change
	}
	if f.Profile != "" {
		text = fmt.Sprintf("profile %q: %s", f.Profile, text)
	}
	return text
}

// Text is the finding in several lines, for a list of them.
func (f Finding) Text() string {
	var b strings.Builder
	kind := "refused"
	if f.Warning {
		kind = "warning"
	}
	fmt.Fprintf(&b, "%s: %s\n", kind, f.Problem)
	for _, row := range []struct{ name, text string }{
		{"profile", f.Profile},
		{"plugin", f.Plugin},
		{"field", f.Field},
		{"value", f.Value},
		{"change", cmp.Or(f.Change, "correct it, or remove it for its default")},
	} {
		if row.text != "" {
			fmt.Fprintf(&b, "  %-8s %s\n", row.name+":", row.text)
		}
	}
	return b.String()
}
