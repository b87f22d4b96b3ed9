package deviceclaims

import (
	"context"
	"slices"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/internal/sharded"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
	"stowage.dev/stowage/pkg/usage"
)

// whatIf is how the cluster would be without some of its pods, and a node with some that are nominated to it. It is never changed;
// each pod added or removed makes a new one, so that clones of a cycle state can share it. To make one costs little, however many pods
// are removed: preemption puts thousands back, one after the other. Nil stands for the cluster as it is.
type whatIf struct {
	// removed are the pods with devices that have been taken away.
	removed podSet
	// nominees are the pods that have been added, for the node that is looked at. Read only.
	nominees []*v1.Pod
	// dryRun tells that pods were taken away at some time, that claims count as gone, or that nothing counts as having failed:
	// somebody tries what has to go.
	dryRun bool

	// last is what over has made last, for the one pod that is being scheduled. Filter and Reserve ask for the same.
	last atomic.Pointer[nodeUsage]
}

// nodeUsage is what has been made of the usage with the revision base for a node.
type nodeUsage struct {
	base uint64
	node *v1.Node
	view usage.View
}

// podSet is an immutable set of pods, by UID.
type podSet = sharded.Map[types.UID, struct{}]

func (w *whatIf) isDryRun() bool { return w != nil && w.dryRun }

func (w *whatIf) hasRemoved(pod *v1.Pod) bool {
	if w == nil {
		return false
	}
	_, removed := w.removed.Get(pod.UID)
	return removed
}

func (w *whatIf) clone() *whatIf {
	if w == nil {
		return &whatIf{}
	}
	return &whatIf{removed: w.removed, nominees: w.nominees, dryRun: w.dryRun}
}

func (w *whatIf) without(pod *v1.Pod) *whatIf {
	if w.isDryRun() && !podclaims.UsesDevices(pod) {
		return w
	}
	next := w.clone()
	next.dryRun = true
	if podclaims.UsesDevices(pod) {
		next.removed = next.removed.Set(pod.UID, struct{}{})
	}
	return next
}

func (w *whatIf) with(pod *v1.Pod) *whatIf {
	switch {
	case w.hasRemoved(pod):
		next := w.clone()
		next.removed = next.removed.Delete(pod.UID)
		return next
	case pod.Spec.NodeName == "":
		next := w.clone()
		next.nominees = append(slices.Clip(next.nominees), pod)
		return next
	}
	return w
}

// view returns who holds what that matters for a node: as it was when the cycle began, with what other pods of the group have on trial, and
// as the pods that were added and removed make it. Without a node it is what matters for all, with no regard to these pods.
func (c *cycle) view(ctx context.Context, node *v1.Node) usage.View {
	view := c.usage
	if c.trial != nil {
		view = c.trial.over(view)
	}
	if c.whatIf == nil || node == nil {
		return view
	}
	return c.whatIf.over(ctx, c, node, view)
}

// over returns the usage as the pods that were added and removed make it for the node. It looks at nothing but the node's pools, so that
// its cost does not depend on how many pods are removed elsewhere.
func (w *whatIf) over(ctx context.Context, c *cycle, node *v1.Node, view usage.View) usage.View {
	if last := w.last.Load(); last != nil && last.base == view.Revision() && last.node == node {
		return last.view
	}
	next := &nodeUsage{base: view.Revision(), node: node, view: c.stakes.withoutPods(view, poolsOf(node, c.inventory), w.removed)}
	if len(w.nominees) > 0 {
		next.view = c.stakes.withNominees(ctx, w.nominees, node, c.inventory, next.view)
	}
	w.last.Store(next)
	return next.view
}

// PreFilterExtensions returns the plugin: what a node has to offer changes with the pods on it and with those that are
// nominated to it.
func (pl *Plugin) PreFilterExtensions() fwk.PreFilterExtensions { return pl }

// RemovePod takes away what the pod holds, in the state alone. A claim is released when the last pod goes that it is for.
func (pl *Plugin) RemovePod(_ context.Context, state fwk.CycleState, _ *v1.Pod, removed fwk.PodInfo, _ fwk.NodeInfo) *fwk.Status {
	if c, err := readCycle(state); err == nil && c != nil {
		c.whatIf = c.whatIf.without(removed.GetPod())
	}
	return nil
}

// AddPod undoes RemovePod, or gives devices to a pod that is nominated to the node and has none yet, in the state
// alone. It never fails: that would end the whole attempt, on all nodes.
func (pl *Plugin) AddPod(_ context.Context, state fwk.CycleState, pod *v1.Pod, added fwk.PodInfo, node fwk.NodeInfo) *fwk.Status {
	c, err := readCycle(state)
	if err != nil || c == nil {
		return nil
	}
	if other := added.GetPod(); other.Spec.NodeName == "" && !c.whatIf.hasRemoved(other) {
		if name := node.Node().Name; !podclaims.UsesDevices(other) || goesBefore(pod, other, name) || !pl.shared.nominations.keep(other, name) {
			return nil
		}
	}
	c.whatIf = c.whatIf.with(added.GetPod())
	return nil
}
