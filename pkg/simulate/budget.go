// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	policyapi "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/snapshot"
)

// refuseEviction says why the API server would refuse to evict a pod now, and counts the eviction if it would not. The rules are those of
// the eviction API (k8s.io/kubernetes, pkg/registry/core/pod/storage/eviction.go).
func (c *Change) refuseEviction(pod *v1.Pod) string {
	if pod.Status.Phase == v1.PodPending || pod.DeletionTimestamp != nil {
		return ""
	}
	var budgets []*policyapi.PodDisruptionBudget
	for _, budget := range c.PodDisruptionBudgets {
		selector, err := metav1.LabelSelectorAsSelector(budget.Spec.Selector)
		if err == nil && budget.Namespace == pod.Namespace && selector.Matches(labels.Set(pod.Labels)) {
			budgets = append(budgets, budget)
		}
	}
	switch {
	case len(budgets) == 0:
		return ""
	case len(budgets) > 1:
		return fmt.Sprintf("it has %d disruption budgets, which the eviction API does not support", len(budgets))
	}
	budget, name := budgets[0], snapshot.Reference(budgets[0])
	healthy := slices.ContainsFunc(pod.Status.Conditions,
		func(c v1.PodCondition) bool { return c.Type == v1.PodReady && c.Status == v1.ConditionTrue })
	if !healthy && (ptr.Deref(budget.Spec.UnhealthyPodEvictionPolicy, policyapi.IfHealthyBudget) == policyapi.AlwaysAllow ||
		budget.Status.CurrentHealthy >= budget.Status.DesiredHealthy && budget.Status.DesiredHealthy > 0) {
		return ""
	}
	if budget.Status.ObservedGeneration < budget.Generation {
		return fmt.Sprintf("disruption budget %s has just been changed", name)
	}
	if c.disrupted[name] >= budget.Status.DisruptionsAllowed {
		return fmt.Sprintf("disruption budget %s allows %d disruptions now", name, budget.Status.DisruptionsAllowed)
	}
	c.disrupted[name]++
	return ""
}
