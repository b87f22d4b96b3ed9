// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package numa

import (
	"context"
	"fmt"
	"runtime/debug"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	v1qos "k8s.io/kubernetes/pkg/apis/core/v1/helper/qos"
	"sigs.k8s.io/scheduler-plugins/pkg/noderesourcetopology"
	"sigs.k8s.io/scheduler-plugins/pkg/noderesourcetopology/resourcerequests"
)

// Name is the name of the plugin in configurations.
const Name = noderesourcetopology.Name

// reasonBroken is why a node is refused whose NodeResourceTopology object the plugin cannot cope with.
const reasonBroken = "the NodeResourceTopology object of the node makes no sense"

// Plugin is NodeResourceTopologyMatch of scheduler-plugins, with five differences.
//
//   - Extended resources that a node gives to claims are none that its kubelet aligns. The original refuses every
//     such node, because the node does not have the resource.
//   - A NodeResourceTopology object can make it panic, for example with a gap in the numbers of the NUMA nodes. That
//     node is refused, and the scheduler lives on.
//   - A refusal is final for preemption. Nothing that the original decides by changes when preemption tries a node
//     without some of its pods, so such trials are for nothing.
//   - A node without a NodeResourceTopology object is no error in the log.
//   - It signs pods, without which no pod of the profile would be batched.
type Plugin struct {
	*noderesourcetopology.TopologyMatch
	handle fwk.Handle
}

var (
	_ fwk.FilterPlugin      = &Plugin{}
	_ fwk.ScorePlugin       = &Plugin{}
	_ fwk.ReservePlugin     = &Plugin{}
	_ fwk.PostBindPlugin    = &Plugin{}
	_ fwk.EnqueueExtensions = &Plugin{}
	_ fwk.SignPlugin        = &Plugin{}
)

// New makes the plugin from NodeResourceTopologyMatchArgs.
func New(ctx context.Context, args runtime.Object, handle fwk.Handle) (fwk.Plugin, error) {
	ctx = klog.NewContext(ctx, quietly(klog.FromContext(ctx)))
	plugin, err := noderesourcetopology.New(ctx, args, handle)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Name, err)
	}
	match, ok := plugin.(*noderesourcetopology.TopologyMatch)
	if !ok {
		return nil, fmt.Errorf("%s: scheduler-plugins made a %T", Name, plugin)
	}
	return &Plugin{TopologyMatch: match, handle: handle}, nil
}

// Filter refuses nodes on which the pod, or one of its containers, does not fit into one NUMA node, if their kubelets
// insist on that.
func (pl *Plugin) Filter(ctx context.Context, state fwk.CycleState, pod *v1.Pod, node fwk.NodeInfo) (status *fwk.Status) {
	defer survive(ctx, pod, node, func() { status = fwk.NewStatus(fwk.UnschedulableAndUnresolvable, reasonBroken) })
	status = pl.TopologyMatch.Filter(ctx, state, pl.seenBy(node, pod), node)
	if status.Code() == fwk.Unschedulable {
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, status.Reasons()...)
	}
	return status
}

// Score prefers nodes as the argument scoringStrategy says.
func (pl *Plugin) Score(ctx context.Context, state fwk.CycleState, pod *v1.Pod, node fwk.NodeInfo) (score int64, status *fwk.Status) {
	defer survive(ctx, pod, node, func() { score, status = fwk.MinScore, nil })
	return pl.TopologyMatch.Score(ctx, state, pl.seenBy(node, pod), node)
}

// survive ends a panic. It is deferred.
func survive(ctx context.Context, pod *v1.Pod, node fwk.NodeInfo, decide func()) {
	if cause := recover(); cause != nil {
		klog.FromContext(ctx).Error(nil, "The NodeResourceTopology object of a node makes no sense, the node is not used", "pod", klog.KObj(pod),
			"node", klog.KObj(node.Node()),
			"panic", cause, "stack", string(debug.Stack()))
		decide()
	}
}

// SignPod says whether the answer for a pod may be used for equal pods (KEP-5598): not if the plugin looks at the pod,
// because each one takes from a NUMA node what the next one would get.
func (pl *Plugin) SignPod(_ context.Context, pod *v1.Pod) ([]fwk.SignFragment, *fwk.Status) {
	if v1qos.GetPodQOS(pod) != v1.PodQOSBestEffort || resourcerequests.IncludeNonNative(pod) {
		return nil, fwk.NewStatus(fwk.Unschedulable, "pods that are aligned to NUMA nodes are scheduled one by one")
	}
	return nil, nil
}
