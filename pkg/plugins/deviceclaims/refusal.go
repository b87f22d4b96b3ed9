package deviceclaims

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/allocator"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// refusal says with which code a node is refused whose devices do not satisfy the pod.
//
// Unschedulable makes preemption try the node with ever different pods taken away, thousands of nodes if need be. So
// only nodes get it that would do without all pods of lower priority, which is decided once; it costs what the node cost
// already, and nothing where no such pod holds devices.
//
// The node that the pod is nominated to gets it, too, if it would do as soon as the claims have left that are about to:
// Unresolvable would make the pod preempt again. These claims are returned.
//
// A pod of a group never gets it: it is the group that preempts, and it does not ask.
func (pl *Plugin) refusal(ctx context.Context, c *cycle, requests *allocator.Requests, pod *v1.Pod, nodeInfo fwk.NodeInfo, failure *allocator.Failure) (fwk.Code, []*stake) {
	if c.whatIf.isDryRun() || c.trial != nil || !failure.Resolvable() {
		return fwk.UnschedulableAndUnresolvable, nil
	}
	node := nodeInfo.Node()
	if pl.isNominated(pod, node.Name) {
		leaving := c.stakes.leavingOn(poolsOf(node, c.inventory), c.usage, pod)
		if pl.fitsWithout(ctx, c, requests, node, leaving) {
			return fwk.Unschedulable, leaving
		}
	}
	if mayPreempt(pod) && pl.fitsWithout(ctx, c, requests, node, c.stakes.releasedWith(pl.victimsOn(nodeInfo, pod))) {
		return fwk.Unschedulable, nil
	}
	return fwk.UnschedulableAndUnresolvable, nil
}

func mayPreempt(pod *v1.Pod) bool {
	return pod.Spec.PreemptionPolicy == nil || *pod.Spec.PreemptionPolicy != v1.PreemptNever
}

// victimsOn returns the pods of a node that may hold devices and have a lower priority than the pod, and those that go with them.
func (pl *Plugin) victimsOn(nodeInfo fwk.NodeInfo, pod *v1.Pod) map[types.UID]*v1.Pod {
	var victims map[types.UID]*v1.Pod
	priority := corev1helpers.PodPriority(pod)
	for _, info := range nodeInfo.GetPods() {
		other := info.GetPod()
		if !podclaims.UsesDevices(other) || corev1helpers.PodPriority(other) >= priority {
			continue
		}
		if victims == nil {
			victims = map[types.UID]*v1.Pod{}
		}
		for _, victim := range pl.groups.DisruptedWith(other) {
			victims[victim.UID] = victim
		}
	}
	return victims
}

// fitsWithout tells whether the node would do if the stakes ended. That there was no time to find out is noted: the pod is tried again.
func (pl *Plugin) fitsWithout(ctx context.Context, c *cycle, requests *allocator.Requests, node *v1.Node, stakes []*stake) bool {
	if len(stakes) == 0 {
		return false
	}
	input := c.input(ctx, requests, node)
	input.Usage, input.Attempt = without(input.Usage, stakes), c.budget
	nodesDecidedAgain.Inc()
	result := allocator.Check(ctx, input)
	if result.Failure != nil && result.Failure.Reason == allocator.ReasonUndecided {
		c.results.setUndecided()
	}
	return result.Fits()
}
