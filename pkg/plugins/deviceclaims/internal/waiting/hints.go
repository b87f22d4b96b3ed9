// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package waiting

import (
	"maps"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/klog/v2"
	fwk "k8s.io/kube-scheduler/framework"
	"k8s.io/kubernetes/pkg/scheduler/util"

	"stowage.dev/stowage/pkg/inventory/amount"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/contention"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/extended"
	"stowage.dev/stowage/pkg/plugins/deviceclaims/internal/podclaims"
)

// Hints say whether an event of the framework's own informers may help a pod that waits. What the waiting room can find
// out, it is told, and the pod stays where it is until the room wakes it. The error is that an event has an object of an
// unexpected type; the pod is tried then.
type Hints struct {
	Pods     *Pods
	Extended *extended.Resources
}

// AfterPodUpdate queues a pod once the names of all claims made for it are known. Whether they exist is
// checked by PreEnqueue.
func (h *Hints) AfterPodUpdate(logger klog.Logger, _ *v1.Pod, _, newObj any) (fwk.QueueingHint, error) {
	_, updated, err := util.As[*v1.Pod](nil, newObj)
	if err != nil {
		return fwk.Queue, err
	}
	if _, err := podclaims.NamesOf(updated); err != nil {
		logger.V(5).Info("Pod still waits for its claims", "pod", klog.KObj(updated), "reason", err.Error())
		return fwk.QueueSkip, nil
	}
	return fwk.Queue, nil
}

// AfterNewToleration has the waiting room look at the pod again. It leaves out nodes that the pod does not tolerate, and
// the plugin that refuses them may never have been asked.
func (h *Hints) AfterNewToleration(_ klog.Logger, pod *v1.Pod, _, _ any) (fwk.QueueingHint, error) {
	return queueUnless(!h.Extended.NeedsDevices(pod) || h.Pods.PodChanged(pod.UID)), nil
}

// queueUnless queues a pod unless the waiting room looks at it, or has nothing to look at.
func queueUnless(skip bool) fwk.QueueingHint {
	if skip {
		return fwk.QueueSkip
	}
	return fwk.Queue
}

// AfterNomination has the waiting room look at a pod again when the API shows that it is nominated to another node, or to none
// any more. It may go before others now, see contention.Rivals.MakesWay, or have others evicted elsewhere. Our own informer may tell of
// that before the scheduling queue knows of it: the attempt would have the pod as the queue had it, and fail as before. So the queue tells,
// when it has the new pod. If the pod is being tried, the queue asks after that attempt, and then also about updates of other pods. Of a
// group that is being tried it does not ask: its pods are tried again by and by, as PodGroupPostFilter has it.
func (h *Hints) AfterNomination(_ klog.Logger, pod *v1.Pod, oldObj, newObj any) (fwk.QueueingHint, error) {
	before, after, err := util.As[*v1.Pod](oldObj, newObj)
	if err != nil {
		return fwk.Queue, err
	}
	if before == nil || after == nil || after.UID != pod.UID || before.Status.NominatedNodeName == after.Status.NominatedNodeName {
		return fwk.QueueSkip, nil
	}
	if after.Status.NominatedNodeName == "" {
		h.Pods.NominationLost(pod.UID)
	}
	return queueUnless(h.Pods.PodChanged(pod.UID)), nil
}

// AfterNodeChange has the waiting room look at the node, which wakes the pod if it may fit. That the scheduler knows the node by then
// is certain, because it is asked only after that. A node whose slices come later is an event of the inventory. Only a node that
// came to have an extended resource that the pod asks for queues the pod directly.
func (h *Hints) AfterNodeChange(_ klog.Logger, pod *v1.Pod, oldObj, newObj any) (fwk.QueueingHint, error) {
	before, after, err := util.As[*v1.Node](oldObj, newObj)
	if err != nil {
		return fwk.Queue, err
	}
	if after == nil {
		return fwk.QueueSkip, nil
	}
	for _, name := range extended.ResourcesOf(pod) {
		now, was := after.Status.Allocatable[name], resource.Quantity{}
		if before != nil {
			was = before.Status.Allocatable[name]
		}
		// More of it; or the device plugin has gone, and the node's devices are for claims.
		if amount.Of(was).Less(amount.Of(now)) || now.IsZero() && !was.IsZero() {
			return fwk.Queue, nil
		}
	}
	h.Pods.NodeRelieved(pod.UID, after.Name)
	if before != nil && hasFewer(before, after) {
		h.Pods.NodeChanged(pod.UID, after.Name) // claims may get what the device plugin had
	}
	if !h.Extended.NeedsDevices(pod) || before != nil && maps.Equal(before.Labels, after.Labels) &&
		slices.Equal(before.Status.DeclaredFeatures, after.Status.DeclaredFeatures) &&
		before.Spec.Unschedulable == after.Spec.Unschedulable && apiequality.Semantic.DeepEqual(before.Spec.Taints, after.Spec.Taints) {
		return fwk.QueueSkip, nil
	}
	return queueUnless(h.Pods.NodeChanged(pod.UID, after.Name) ||
		len(h.Pods.store.View().ForNode(after).Pools) == 0 && !h.hasAllocatedClaim(pod)), nil
}

// hasFewer tells whether device plugins of the node have fewer devices than before.
func hasFewer(before, after *v1.Node) bool {
	for name, was := range before.Status.Allocatable {
		if util.IsDRAExtendedResourceName(name) && amount.Of(after.Status.Allocatable[name]).Less(amount.Of(was)) {
			return true
		}
	}
	return false
}

// AfterPodAssigned has the waiting room look at a node on which a pod is seen for the first time that the waiting one may have evicted. Its
// claims may have been allocated before, by another scheduler or before a restart, when nobody could be evicted. And at a node for which
// the waiting one is nominated: it may wait there in vain, if the other one has got what it waits for and cannot be evicted.
func (h *Hints) AfterPodAssigned(_ klog.Logger, pod *v1.Pod, _, newObj any) (fwk.QueueingHint, error) {
	_, added, err := util.As[*v1.Pod](nil, newObj)
	if err != nil {
		return fwk.Queue, err
	}
	if !podclaims.UsesDevices(added) {
		return fwk.QueueSkip, nil
	}
	node := added.Spec.NodeName
	if contention.MayPreempt(pod) && corev1helpers.PodPriority(added) < corev1helpers.PodPriority(pod) ||
		pod.Status.NominatedNodeName == node || h.Pods.IsNominated(pod.UID, node) {
		h.Pods.NodeChanged(pod.UID, node)
	}
	return fwk.QueueSkip, nil
}

// AfterPodDeletion queues a pod if the deleted one had an extended resource of the pod from a device plugin, which
// may have been the last one of a device plugin that has gone. And it has the waiting room look at a pod if one goes that was
// nominated to a node, or is not nominated any more: devices were kept for it. The framework reports that as the deletion of a
// pod that has no node. Claims of pods that had one come through the tracker; but those that could not be evicted may have had more than
// devices, which no other plugin waits for if it was not asked about the node. And as long as the framework has a pod that was evicted from
// the node that the waiting one is nominated to, it lets that one evict nobody else (PodEligibleToPreemptOthers).
func (h *Hints) AfterPodDeletion(_ klog.Logger, pod *v1.Pod, oldObj, _ any) (fwk.QueueingHint, error) {
	deleted, _, err := util.As[*v1.Pod](oldObj, nil)
	if err != nil {
		return fwk.Queue, err
	}
	if deleted.Spec.NodeName != "" && podclaims.AsksForExtended(deleted) {
		if slices.ContainsFunc(extended.ResourcesOf(pod), func(name v1.ResourceName) bool { return extended.HoldsFromPlugin(deleted, name) }) {
			return fwk.Queue, nil
		}
		h.Pods.NodeChanged(pod.UID, deleted.Spec.NodeName) // claims may get what it had from a device plugin
	}
	if node := deleted.Spec.NodeName; node != "" &&
		(corev1helpers.PodPriority(deleted) >= corev1helpers.PodPriority(pod) || pod.Status.NominatedNodeName == node) {
		h.Pods.NodeRelieved(pod.UID, node)
	}
	return queueUnless(deleted.Spec.NodeName != "" || deleted.Status.NominatedNodeName == "" || !podclaims.UsesDevices(deleted) ||
		deleted.UID == pod.UID || h.Pods.PodChanged(pod.UID)), nil
}

// AfterClassChange queues a pod for changes of which class stands for an extended resource. All other
// changes of classes come through the inventory.
func (h *Hints) AfterClassChange(_ klog.Logger, pod *v1.Pod, oldObj, newObj any) (fwk.QueueingHint, error) {
	before, after, err := util.As[*resourceapi.DeviceClass](oldObj, newObj)
	if err != nil {
		return fwk.Queue, err
	}
	wanted := extended.ResourcesOf(pod)
	for _, class := range []*resourceapi.DeviceClass{before, after} {
		if class == nil {
			continue
		}
		explicit := class.Spec.ExtendedResourceName
		implicit := v1.ResourceName(resourceapi.ResourceDeviceClassPrefix + class.Name)
		if slices.Contains(wanted, implicit) || explicit != nil && slices.Contains(wanted, v1.ResourceName(*explicit)) {
			return fwk.Queue, nil
		}
	}
	return fwk.QueueSkip, nil
}

func (h *Hints) hasAllocatedClaim(pod *v1.Pod) bool {
	names, err := podclaims.NamesOf(pod)
	if err != nil {
		return false
	}
	return slices.ContainsFunc(names, func(name podclaims.Name) bool {
		claim, err := podclaims.Get(h.Pods.tracker, pod, name)
		return err == nil && claim.Status.Allocation != nil
	})
}
