// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package health

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Policy says how the rules are softened, or made harder where that is possible: for all GPUs, and for those of a product.
type Policy struct{ items []item }

// item is one of these changes.
type item struct {
	model    string // empty for all
	reason   Reason
	xid      uint64 // of the reason XID, 0 for all
	severity Severity
}

// off is less than a Notice: the fault is none.
const off Severity = -1

var severities = map[string]Severity{"off": off, "notice": Notice, "avoid": Avoid}

// ParsePolicy reads items with commas between: "pcie-width=off", "xid/74=notice", "NVIDIA L40S:temperature=notice". Of two
// items for one rule the later one counts.
func ParsePolicy(text string) (Policy, error) {
	var p Policy
	for part := range strings.SplitSeq(text, ",") {
		if part = strings.TrimSpace(part); part == "" {
			continue
		}
		i, err := parseItem(part)
		if err != nil {
			return Policy{}, fmt.Errorf("%q: %w", part, err)
		}
		p.items = append(p.items, i)
	}
	return p, nil
}

func parseItem(text string) (i item, err error) {
	rule, severity, ok := strings.Cut(text, "=")
	if !ok {
		return i, fmt.Errorf("want a rule and what becomes of it, such as %s=off", PCIe)
	}
	if model, of, ok := strings.Cut(rule, ":"); ok {
		i.model, rule = model, of
	}
	reason, code, single := strings.Cut(rule, "/")
	i.reason = Reason(reason)
	r, ok := rules[i.reason]
	if !ok {
		return i, fmt.Errorf("no rule %q: there are %s", reason, reasonWords())
	}
	if single {
		if i.xid, err = strconv.ParseUint(code, 10, 32); err != nil || i.reason != XID || i.xid == 0 {
			return i, fmt.Errorf("rule %q: want an XID by its number, such as xid/74", rule)
		}
	}
	if i.xid == xidLost {
		return i, fmt.Errorf("rule %q: XID %d says that the GPU is lost, which is the rule %s", rule, xidLost, Lost)
	}
	if i.severity, ok = severities[severity]; !ok {
		return i, fmt.Errorf("%q: want off, notice or avoid", severity)
	}
	if i.severity > max(r.severity, r.most) {
		return i, fmt.Errorf("%s: a rule can be softened only, and this one is less than %s already", rule, severity)
	}
	if i.severity < Avoid && slices.Contains(unusable, i.reason) {
		return i, fmt.Errorf("%s: want avoid, or the rule as it is: a GPU that does not answer cannot be given to a claim", rule)
	}
	return i, nil
}

// unusable are the reasons of a GPU for which no claim can be prepared.
var unusable = []Reason{Lost, Hung, NoAnswer, NoDriver}

func reasonWords() string {
	var words []string
	for _, reason := range Reasons() {
		words = append(words, string(reason))
	}
	slices.Sort(words)
	return strings.Join(words, ", ")
}

// Ignores tells whether nothing follows from that reason for a GPU of that product.
func (p Policy) Ignores(model string, reason Reason) bool {
	return p.severity(model, &Fault{Reason: reason}) < Avoid
}

// severity of a fault of a GPU of that product. It is off if the fault is none.
func (p Policy) severity(model string, f *Fault) Severity {
	severity := rules[f.Reason].severity
	for _, i := range p.items {
		if i.reason == f.Reason && (i.model == "" || i.model == model) && (i.xid == 0 || strconv.FormatUint(i.xid, 10) == f.Value) {
			severity = i.severity
		}
	}
	return severity
}
