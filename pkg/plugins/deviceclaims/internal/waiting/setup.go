// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package waiting

import (
	"sync"

	v1 "k8s.io/api/core/v1"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	schedulerconfig "k8s.io/kubernetes/pkg/scheduler/apis/config"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/helper"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/names"
	"k8s.io/kubernetes/pkg/scheduler/framework/plugins/queuesort"
)

// configured is the part of kube-scheduler's framework that says how a profile is made up.
type configured interface {
	ListPlugins() *schedulerconfig.Plugins
	QueueSortFunc() fwk.LessFunc
}

// Setup is how a profile is made up. It is looked at when it is first needed.
type Setup struct{ read func() *profile }

// NewSetup returns that of the profile of the handle.
func NewSetup(handle fwk.Handle) *Setup {
	return &Setup{sync.OnceValue(func() *profile { return readProfile(handle) })}
}

// profile is what matters of it.
type profile struct {
	// filters are the Filter plugins.
	filters map[string]bool
	// less is the order of the queue, which all profiles of a scheduler have in common.
	less fwk.LessFunc
}

// readProfile looks at the profile, which is complete only after all its plugins have been made.
func readProfile(handle fwk.Handle) *profile {
	p := &profile{filters: map[string]bool{}, less: (&queuesort.PrioritySort{}).Less}
	c, ok := handle.(configured)
	if !ok {
		return p
	}
	plugins := c.ListPlugins()
	if plugins == nil {
		return p
	}
	for _, filter := range plugins.Filter.Enabled {
		p.filters[filter.Name] = true
	}
	if len(plugins.QueueSort.Enabled) > 0 {
		p.less = c.QueueSortFunc()
	}
	return p
}

// Filters tells whether the profile has a Filter plugin.
func (s *Setup) Filters(plugin string) bool { return s.read().filters[plugin] }

// Suitable returns whether a pod may be on a node by the node's labels and taints. What is false is so for certain: only plugins are
// asked for that the profile has. EventsToRegister has the changes that matter to it.
func (s *Setup) Suitable(logger klog.Logger, pod *v1.Pod) func(*v1.Node) bool {
	filters := s.read().filters
	affinity := nodeaffinity.GetRequiredNodeAffinity(pod)
	return func(node *v1.Node) bool {
		if filters[names.NodeAffinity] {
			if match, err := affinity.Match(node); err == nil && !match {
				return false
			}
		}
		if filters[names.TaintToleration] {
			if _, untolerated := corev1helpers.FindMatchingUntoleratedTaint(logger, node.Spec.Taints, pod.Spec.Tolerations,
				helper.DoNotScheduleTaintsFilterFunc(), true); untolerated {
				return false
			}
		}
		if filters[names.NodeUnschedulable] && node.Spec.Unschedulable {
			taint := &v1.Taint{Key: v1.TaintNodeUnschedulable, Effect: v1.TaintEffectNoSchedule}
			return corev1helpers.TolerationsTolerateTaint(logger, pod.Spec.Tolerations, taint, true)
		}
		return true
	}
}
