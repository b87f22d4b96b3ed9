package deviceclaims

import (
	"context"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
)

// PreEnqueue keeps a pod out of the queue until all its claims exist, are its own where they were made from a
// template, and are not being deleted. Nothing of that would be seen on the pod, so an event says it. A pod that has a node, see PreFilter,
// has got them.
func (pl *Plugin) PreEnqueue(ctx context.Context, pod *v1.Pod) *fwk.Status {
	if len(pod.Spec.ResourceClaims) == 0 || pod.Spec.NodeName != "" {
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
	if _, err := pl.unusableClaim(pod, names); err == nil {
		return nil
	}
	// Looked at again after the pod has been noted as waiting: a change in between would wake nobody.
	pl.shared.waiting.Note(pod, namespacedNames(names), pl)
	name, err := pl.unusableClaim(pod, names)
	pl.shared.waiting.Judged(pod.UID, pl.question(&asked{}, nil, err), pl.shared.seenNow())
	if err != nil {
		pl.reportUnusable(ctx, pod, name, err)
		return fwk.NewStatus(fwk.UnschedulableAndUnresolvable, err.Error())
	}
	return nil
}

// unusableClaim returns the first claim that the pod cannot use, and why.
func (pl *Plugin) unusableClaim(pod *v1.Pod, names []claimName) (claimName, error) {
	for _, name := range names {
		if _, err := pl.shared.claimOf(pod, name); err != nil {
			return name, err
		}
	}
	return claimName{}, nil
}

// reportUnusable tells the pod's user why it is not tried, once for each reason. A generated claim that is not there is no news: either
// the tracker has not seen it yet, or the controller is about to make it again.
func (pl *Plugin) reportUnusable(ctx context.Context, pod *v1.Pod, name claimName, reason error) {
	if name.generated {
		if _, err := pl.shared.tracker.Get(name.Namespace, name.Name); apierrors.IsNotFound(err) {
			return
		}
	}
	if !pl.shared.waiting.IsNews(pod.UID, reason.Error()) {
		return
	}
	pl.handle.EventRecorder().WithLogger(klog.FromContext(ctx)).Eventf(pod, nil, v1.EventTypeWarning, "FailedScheduling", "Scheduling",
		"waiting: %v", reason)
}
