// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"slices"
	"strings"
)

// Rules are what a node's administrator has decided about sharing. The zero value lets claims ask for no strategy by which processes share
// a device, and each GPU's shares are one namespace's.
type Rules struct {
	// Node names it in messages.
	Node string
	// Allowed are the strategies that claims may ask for, of TimeSlicing and MPS. Exclusive is not among them: it shares nothing.
	Allowed []Strategy
	// Shares is how GPUs are used that several claims have shares of: MPS, or else TimeSlicing. What is done to such a GPU all of them
	// feel, so none of them decides on it.
	Shares Strategy
	// NoMPS is why the node can do no MPS, whatever is allowed; empty if it can.
	NoMPS string
	// AcrossNamespaces lets claims of several namespaces have shares of one GPU.
	AcrossNamespaces bool
}

// The flags that say what the rules are, for messages.
const (
	AllowFlag            = "--allow-sharing"
	SharesFlag           = "--share-strategy"
	AcrossNamespacesFlag = "--share-across-namespaces"
)

// The attributes of a device that tell the rules: what Strategies returns, and, true or absent, what SharedByNamespace does. The scheduler
// goes by the latter.
const (
	AttributeStrategies        = "sharingStrategies"
	AttributeSharedByNamespace = "sharedByNamespace"
)

// inFlags are the strategies as the flags name them, in the order in which they are listed.
var inFlags = []struct {
	name     string
	strategy Strategy
}{{"time-slicing", TimeSlicing}, {"mps", MPS}}

const allowNone = "none"

// ParseRules reads the values of the flags: a list such as time-slicing,mps, or none, and one of these
// strategies. The error names flag and value.
func ParseRules(node, allow, shares string) (Rules, error) {
	r := Rules{Node: node}
	var names []string
	for _, known := range inFlags {
		names = append(names, known.name)
		if known.name == shares {
			r.Shares = known.strategy
		}
	}
	if r.Shares == "" {
		return Rules{}, fmt.Errorf("%s %q: want %s", SharesFlag, shares, strings.Join(names, " or "))
	}
	if allow == allowNone {
		return r, nil
	}
	asked := strings.Split(allow, ",")
	for _, known := range inFlags {
		if slices.Contains(asked, known.name) {
			r.Allowed = append(r.Allowed, known.strategy)
		}
	}
	if len(r.Allowed) != len(asked) { // one is not known, or there twice
		return Rules{}, fmt.Errorf("%s %q: want %s, or %s, or both with a comma between", AllowFlag, allow, allowNone, strings.Join(names, ", "))
	}
	return r, nil
}

func inFlag(strategies ...Strategy) string {
	var names []string
	for _, known := range inFlags {
		if slices.Contains(strategies, known.strategy) {
			names = append(names, known.name)
		}
	}
	if len(names) == 0 {
		return allowNone
	}
	return strings.Join(names, ",")
}

// Strategies lists what a claim may ask for of a device: of one that it has a share of, no other than the node's.
func (r *Rules) Strategies(share bool) string {
	allowed := r.Allowed
	if share {
		allowed = []Strategy{r.shares()}
	}
	var names []string
	for _, strategy := range allowed {
		if strategy != MPS || r.NoMPS == "" {
			names = append(names, string(strategy))
		}
	}
	if len(names) == 0 {
		return allowNone
	}
	return strings.Join(names, ",")
}

// SharedByNamespace tells whether a device is one namespace's as long as claims have shares of it.
func (r *Rules) SharedByNamespace(share bool) bool { return share && !r.AcrossNamespaces }

func (r *Rules) shares() Strategy {
	if r.Shares == MPS {
		return MPS
	}
	return TimeSlicing
}

// check refuses settings of a device that the node's rules are against.
func (r *Rules) check(s Settings, share bool) error {
	const find = "; a selector on the attribute " + AttributeStrategies + " finds devices that can be shared so"
	switch {
	case r.NoMPS != "" && (s.Strategy == MPS || share && r.shares() == MPS):
		return fmt.Errorf("sharing.strategy: %q: node %s cannot do it: %s%s", MPS, r.Node, r.NoMPS, find)
	case share && s.Strategy == Exclusive:
		return fmt.Errorf("sharing.strategy: %q: the claim has a share of the GPU, and nobody has such a GPU alone: leave the strategy out, or "+
			"take a GPU that is not shared", s.Strategy)
	case share && s.Strategy != "" && s.Strategy != r.shares():
		return fmt.Errorf("sharing.strategy: %q: node %s shares its GPUs by %s (%s=%s): leave the strategy out%s", s.Strategy, r.Node, r.shares(),
			SharesFlag, inFlag(r.shares()), find)
	case share && s.Interval != "" && s.Interval != IntervalDefault:
		return fmt.Errorf("sharing.timeSlicingConfig.interval: %q: the claim has a share of the GPU, and others would get the same time "+
			"slices: want %s, or take a GPU that is not shared", s.Interval, IntervalDefault)
	case !share && (s.Strategy == TimeSlicing || s.Strategy == MPS) && !slices.Contains(r.Allowed, s.Strategy):
		return fmt.Errorf("sharing.strategy: %q: node %s does not allow it (%s=%s)%s", s.Strategy, r.Node, AllowFlag, inFlag(r.Allowed...), find)
	}
	return nil
}

// ForShare are the settings for a share of a GPU: where they name no strategy, the node's.
func (s Settings) ForShare(r *Rules) Settings {
	if s.Strategy != "" {
		return s
	}
	s.Strategy = r.shares()
	if s.Strategy == MPS {
		s.MPS = &Limits{}
	} else {
		s.Interval = IntervalDefault
	}
	return s
}
