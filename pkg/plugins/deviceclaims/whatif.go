package deviceclaims

import (
	"context"
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	fwk "k8s.io/kube-scheduler/framework"

	"stowage.dev/stowage/pkg/usage"
)

// whatIf is how a node would be without some of its pods and with some that are nominated to it. It is never changed;
// each pod added or removed makes a new one, so that clones of a cycle state can share it. Nil stands for the node as
// it is.
type whatIf struct {
	// removed are the pods that have been taken away. Read only.
	removed map[types.UID]*v1.Pod
	// nominees are the pods that have been added, for the node. Read only.
	nominees []*v1.Pod
	node     *v1.Node
	// dryRun tells that pods were taken away at some time: somebody tries which of them have to go.
	dryRun bool

	// view is what over made of the view with the revision base, if known.
	mutex sync.Mutex
	known bool
	base  uint64
	view  usage.View
}

func (w *whatIf) isDryRun() bool { return w != nil && w.dryRun }

func (w *whatIf) clone() *whatIf {
	if w == nil {
		return &whatIf{}
	}
	return &whatIf{removed: w.removed, nominees: w.nominees, node: w.node, dryRun: w.dryRun}
}

func (w *whatIf) without(pod *v1.Pod) *whatIf {
	next := w.clone()
	next.removed = maps.Clone(next.removed)
	if next.removed == nil {
		next.removed = map[types.UID]*v1.Pod{}
	}
	next.removed[pod.UID] = pod
	next.dryRun = true
	return next
}

func (w *whatIf) with(pod *v1.Pod, node *v1.Node) *whatIf {
	next := w.clone()
	switch {
	case next.removed[pod.UID] != nil:
		next.removed = maps.Clone(next.removed)
		delete(next.removed, pod.UID)
	case pod.Spec.NodeName == "":
		next.nominees = append(slices.Clip(next.nominees), pod)
		next.node = node
	}
	return next
}

// view returns who holds what: as it was when the cycle began, with what other pods of the group have on trial, and as the pods that
// were added and removed make it.
func (c *cycle) view(ctx context.Context) usage.View {
	view := c.usage
	if c.trial != nil {
		view = c.trial.over(view)
	}
	if c.whatIf == nil {
		return view
	}
	return c.whatIf.over(ctx, c, view)
}

// over returns the usage as the pods that were added and removed make it.
func (w *whatIf) over(ctx context.Context, c *cycle, view usage.View) usage.View {
	w.mutex.Lock()
	defer w.mutex.Unlock()
	if !w.known || w.base != view.Revision() {
		w.known, w.base = true, view.Revision()
		w.view = without(view, c.stakes.releasedWith(w.removed))
		if len(w.nominees) > 0 {
			w.view = c.stakes.withNominees(ctx, w.nominees, w.node, c.inventory, w.view)
		}
	}
	return w.view
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
func (pl *Plugin) AddPod(_ context.Context, state fwk.CycleState, _ *v1.Pod, added fwk.PodInfo, node fwk.NodeInfo) *fwk.Status {
	if c, err := readCycle(state); err == nil && c != nil {
		c.whatIf = c.whatIf.with(added.GetPod(), node.Node())
	}
	return nil
}
