// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package checker

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/utils/ptr"
)

// nodeSelector makes sure that the allocation can be used on this node and on no node where one of its devices
// cannot be.
func (c *check) nodeSelector(claim *resourceapi.ResourceClaim, grants []*grant, got *v1.NodeSelector) {
	bound := false
	var fields, expressions []v1.NodeSelectorRequirement
	for _, g := range grants {
		spec := &g.device.slice.Spec
		name, selector := spec.NodeName, spec.NodeSelector
		if ptr.Deref(spec.PerDeviceNodeSelection, false) {
			name, selector = g.device.NodeName, g.device.NodeSelector
		}
		bound = bound || ptr.Deref(name, "") != "" || ptr.Deref(g.device.BindsToNode, false)
		if selector != nil {
			for _, term := range selector.NodeSelectorTerms {
				fields = append(fields, term.MatchFields...)
				expressions = append(expressions, term.MatchExpressions...)
			}
		}
	}
	if bound {
		fields = []v1.NodeSelectorRequirement{{Key: "metadata.name", Operator: v1.NodeSelectorOpIn, Values: []string{c.Node.Name}}}
		expressions = nil
	}
	if got == nil {
		if len(fields)+len(expressions) > 0 {
			c.violation("claim %s: can be used on any node, but not all of its devices can", claim.Name)
		}
		return
	}
	if len(got.NodeSelectorTerms) != 1 {
		c.violation("claim %s: the node selector has %d terms, which must be one", claim.Name, len(got.NodeSelectorTerms))
		return
	}
	term := got.NodeSelectorTerms[0]
	if !sameRequirements(term.MatchFields, fields) || !sameRequirements(term.MatchExpressions, expressions) {
		c.violation("claim %s: the node selector is %v, but its devices need fields %v and expressions %v", claim.Name, got, fields, expressions)
	}
	selector, err := nodeaffinity.NewNodeSelector(got)
	if err != nil {
		c.violation("claim %s: node selector: %v", claim.Name, err)
	} else if !selector.Match(c.Node) {
		c.violation("claim %s: the node selector does not select node %s", claim.Name, c.Node.Name)
	}
}

// sameRequirements compares as sets, values too.
func sameRequirements(a, b []v1.NodeSelectorRequirement) bool {
	covers := func(x, y []v1.NodeSelectorRequirement) bool {
		for _, r := range y {
			if !slices.ContainsFunc(x, func(o v1.NodeSelectorRequirement) bool {
				return o.Key == r.Key && o.Operator == r.Operator && sets.New(o.Values...).Equal(sets.New(r.Values...))
			}) {
				return false
			}
		}
		return true
	}
	return covers(a, b) && covers(b, a)
}
