// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package ownership

import (
	"fmt"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"stowage.dev/stowage/pkg/plugins/config"
)

const (
	// TaintKey is the key of the taint that tells other schedulers to leave a device alone. Its effect is
	// NoSchedule: it evicts nobody.
	TaintKey = "stowage.dev/owned"
	// Label stands on our rules. Its value is the profile that a rule belongs to.
	Label = "stowage.dev/owned-by"

	namePrefix = "stowage-owned-by-"
)

// RuleName is the name of a profile's rule. It fails for a profile whose name cannot be part of an object's name
// or a label's value.
func RuleName(profile string) (string, error) {
	problems := append(validation.IsDNS1123Subdomain(profile), validation.IsValidLabelValue(profile)...)
	if len(problems) > 0 {
		return "", fmt.Errorf("no DeviceTaintRule can be named after profile %q: %s", profile, strings.Join(problems, "; "))
	}
	return namePrefix + profile, nil
}

// Rule is the rule that a profile wants, nil if ownership is disabled. args must be valid.
func Rule(profile string, args *config.OwnershipArgs) (*resourceapi.DeviceTaintRule, error) {
	if !*args.Enabled {
		return nil, nil
	}
	name, err := RuleName(profile)
	if err != nil {
		return nil, err
	}
	return &resourceapi.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{Label: profile}},
		Spec: resourceapi.DeviceTaintRuleSpec{
			DeviceSelector: &resourceapi.DeviceTaintSelector{
				Driver: selected(args.Driver),
				Pool:   selected(args.Pool),
				Device: selected(args.Device),
			},
			Taint: resourceapi.DeviceTaint{Key: TaintKey, Effect: resourceapi.DeviceTaintEffectNoSchedule},
		},
	}, nil
}

// selected is nil, which selects all, for an empty string.
func selected(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// isOurs tells whether an object that bears the name of a rule of ours is one. Either sign is enough, so that one
// can be repaired by the other.
func isOurs(rule *resourceapi.DeviceTaintRule) bool {
	return rule.Labels[Label] != "" || rule.Spec.Taint.Key == TaintKey
}

// repaired returns a copy of have that is as wanted, nil if have is. What others add, other labels for example,
// and the time since when the taint is there, are left alone.
func repaired(have, want *resourceapi.DeviceTaintRule) *resourceapi.DeviceTaintRule {
	out := have.DeepCopy()
	if out.Labels == nil {
		out.Labels = map[string]string{}
	}
	out.Labels[Label] = want.Labels[Label]
	out.Spec.DeviceSelector = want.Spec.DeviceSelector.DeepCopy()
	out.Spec.Taint = *want.Spec.Taint.DeepCopy()
	out.Spec.Taint.TimeAdded = have.Spec.Taint.TimeAdded
	if apiequality.Semantic.DeepEqual(have, out) {
		return nil
	}
	return out
}
