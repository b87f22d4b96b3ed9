package deviceclaims

import (
	"context"

	v1 "k8s.io/api/core/v1"
	fwk "k8s.io/kube-scheduler/framework"
)

// PreEnqueue keeps a pod out of the queue until all its claims exist, are its own where they were made from a
// template, and are not being deleted.
func (pl *Plugin) PreEnqueue(_ context.Context, pod *v1.Pod) *fwk.Status {
	if len(pod.Spec.ResourceClaims) == 0 {
		return nil
	}
	names, err := claimNames(pod)
	if err != nil {
		// The update of the pod's status that brings the name is an event for the pod itself.
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
	}
	if !pl.shared.tracker.HasSynced() {
		return nil // PreFilter waits and looks
	}
	if pl.claimsUsable(pod, names) == nil {
		return nil
	}
	// Looked at again after the pod has been noted as waiting: a change in between would wake nobody.
	pl.shared.waiting.addForClaims(pl.handle, pod, namespacedNames(names))
	if err := pl.claimsUsable(pod, names); err != nil {
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
	}
	return nil
}

func (pl *Plugin) claimsUsable(pod *v1.Pod, names []claimName) error {
	for _, name := range names {
		if _, err := pl.shared.claimOf(pod, name); err != nil {
			return err
		}
	}
	return nil
}
