// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package refusals

import (
	"context"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/allocator/explain"
	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/cycle"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
)

// Explain says why no node satisfies the pod's claims: where they are allocated already, and what of those that are not is missing. Both
// may be empty.
func (f *Finder) Explain(ctx context.Context, c *cycle.State, pod *v1.Pod) (where, missing string) {
	return f.whereAllocated(c), f.tellMissing(ctx, c, pod)
}

// tellMissing is Missing for the pod's user. What that one is not to know is in the log alone.
func (f *Finder) tellMissing(ctx context.Context, c *cycle.State, pod *v1.Pod) string {
	found := f.Missing(ctx, c, pod)
	if found == nil {
		return ""
	}
	whole, told := found.String(), found
	if !f.Rivals.NameAll {
		told = found.InNamespace(pod.Namespace)
	}
	text := told.String()
	if text != whole {
		klog.FromContext(ctx).V(2).Info("Pod waits for claims of other namespaces", "pod", klog.KObj(pod), "why", whole)
	}
	return text
}

// Missing says what devices are missing, and whose release would help or that none would. It is nil if that was not the reason.
func (f *Finder) Missing(ctx context.Context, c *cycle.State, pod *v1.Pod) *explain.Explanation {
	wanted := c.Results.MostRefused()
	if wanted == nil {
		return nil
	}
	failures := c.Results.FailuresFor(wanted.Requests)
	explanation := allocator.Explain(wanted.Requests, failures, allocator.Naming{
		Rule: f.taintRule,
		Subject: func(claim types.NamespacedName, request string) string {
			if !extended.IsUnborn(claim.Name) {
				return ""
			}
			return wanted.Subject(request)
		},
	})
	if explanation.Nodes == 0 {
		return nil
	}
	for reason, n := range explanation.Reasons {
		RefusedNodes.WithLabelValues(string(reason)).Add(float64(n))
	}
	keep := sets.New[types.UID]()
	for _, pc := range c.Claims {
		keep.Insert(pc.Claim.UID)
	}
	ctx, cancel := context.WithTimeout(ctx, f.HoldersLimit)
	defer cancel()
	input := c.Input(ctx, wanted.Requests, nil)
	input.Attempt = c.Budget
	explanation.Holders = allocator.FindHolders(ctx, input, failures, f.nodeThatCanHold(pod),
		allocator.HolderOptions{Keep: keep, Namespace: pod.Namespace})
	if len(explanation.Holders) == 0 {
		allocator.FindLimits(ctx, input, explanation, f.suitableNodes(ctx, pod))
	}
	return explanation
}

// taintRule returns the name of the DeviceTaintRule that a device has a taint from, empty if its driver has set the taint.
func (f *Finder) taintRule(pool inventory.PoolID, device string, taint *resourceapi.DeviceTaint) string {
	if f.Rules == nil {
		return ""
	}
	rules, err := f.Rules.List(labels.Everything())
	if err != nil {
		return ""
	}
	first := ""
	for _, rule := range rules {
		selector := rule.Spec.DeviceSelector
		if selector == nil || ptr.Deref(selector.Driver, pool.Driver) != pool.Driver || ptr.Deref(selector.Pool, pool.Pool) != pool.Pool ||
			ptr.Deref(selector.Device, device) != device {
			continue
		}
		set := &rule.Spec.Taint
		if set.Key == taint.Key && set.Value == taint.Value && set.Effect == taint.Effect && set.TimeAdded.Equal(taint.TimeAdded) &&
			(first == "" || rule.Name < first) {
			first = rule.Name
		}
	}
	return first
}
