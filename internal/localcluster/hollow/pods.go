// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hollow

import (
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"
)

// podKey tells a pod from a later one with the same name.
type podKey struct {
	types.NamespacedName
	uid types.UID
}

func keyOf(pod *corev1.Pod) podKey {
	return podKey{NamespacedName: types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}, uid: pod.UID}
}

// Seen returns what the containers of a pod see of their devices. It is false for a pod that does not run here, which is also so before the
// pod's status says Running.
func (k *Kubelet) Seen(pod types.UID) (Pod, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	seen, ok := k.seen[pod]
	return seen, ok
}

// syncPod takes the pod one step further: to running, or to its end. Pods are served in parallel, one pod is not.
func (k *Kubelet) syncPod(ctx context.Context, key podKey) error {
	pod, err := k.pods.Pods(key.Namespace).Get(key.Name)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	switch {
	case err != nil || pod.UID != key.uid:
		// Deleted without our doing, or another pod has the name already.
		return k.endPod(ctx, key.uid)
	case pod.DeletionTimestamp != nil:
		return k.deletePod(ctx, pod)
	case pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed:
		return k.endPod(ctx, key.uid)
	}
	return k.runPod(ctx, pod)
}

func (k *Kubelet) runPod(ctx context.Context, pod *corev1.Pod) error {
	if _, runs := k.Seen(pod.UID); !runs {
		if err := k.admit(ctx, pod); err != nil {
			return k.report(ctx, pod, func(pod *corev1.Pod) {
				pod.Status.Phase, pod.Status.Reason = corev1.PodFailed, "UnexpectedAdmissionError"
				pod.Status.Message = fmt.Sprintf("Allocate failed due to %v, which is unexpected", err)
			})
		}
		if err := k.claims.prepare(ctx, pod); err != nil {
			k.recorder.Eventf(pod, corev1.EventTypeWarning, "FailedPrepareDynamicResources", "Failed to prepare dynamic resources: %v", err)
			return err
		}
		seen, err := k.createContainers(ctx, pod)
		if err != nil {
			k.recorder.Eventf(pod, corev1.EventTypeWarning, "Failed", "Error: %v", err)
			return err
		}
		klog.FromContext(ctx).V(2).Info("Pod runs", "pod", klog.KObj(pod), "podUID", pod.UID, "containers", seen.Containers)
		k.mu.Lock()
		k.seen[pod.UID] = seen
		k.mu.Unlock()
	}
	if pod.Status.Phase == corev1.PodRunning {
		return nil
	}
	return k.report(ctx, pod, runningStatus)
}

// admit allocates devices of device plugins, for one pod after the other. Those of pods that have ended are free.
func (k *Kubelet) admit(ctx context.Context, pod *corev1.Pod) error {
	k.admitMu.Lock()
	defer k.admitMu.Unlock()
	pods, err := k.pods.List(labels.Everything())
	if err != nil { // the lister reads memory
		return err
	}
	active := sets.New(pod.UID)
	for _, other := range pods {
		if other.Status.Phase != corev1.PodSucceeded && other.Status.Phase != corev1.PodFailed {
			active.Insert(other.UID)
		}
	}
	k.mu.Lock()
	for uid := range k.seen { // its end is not over
		active.Insert(uid)
	}
	k.mu.Unlock()
	return k.devices.admit(ctx, pod, active)
}

// createContainers does the runtime's part: it resolves the CDI devices of each container.
func (k *Kubelet) createContainers(ctx context.Context, pod *corev1.Pod) (Pod, error) {
	seen := Pod{Namespace: pod.Namespace, Name: pod.Name}
	for _, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		devices, err := k.claims.cdiDevices(pod, &container)
		if err != nil {
			return Pod{}, err
		}
		plugins, env, err := k.devices.start(ctx, pod.UID, container.Name)
		if err != nil {
			return Pod{}, err
		}
		resolved, err := k.resolver.resolve(container.Name, append(devices, plugins...))
		if err != nil {
			return Pod{}, err
		}
		for _, name := range slices.Sorted(maps.Keys(env)) {
			resolved.Env = append(resolved.Env, name+"="+env[name])
		}
		seen.Containers = append(seen.Containers, resolved)
	}
	return seen, nil
}

// deletePod ends a pod that somebody has deleted, and then removes it from the API server, which waits for that.
func (k *Kubelet) deletePod(ctx context.Context, pod *corev1.Pod) error {
	if err := k.endPod(ctx, pod.UID); err != nil {
		return err
	}
	if pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed {
		if err := k.report(ctx, pod, endedStatus); err != nil {
			return err
		}
	}
	err := k.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To[int64](0),
		Preconditions:      metav1.NewUIDPreconditions(string(pod.UID)),
	})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("removing the ended pod: %w", err)
	}
	return nil
}

// endPod stops the pod's containers, of which there are none, and ends its use of claims.
func (k *Kubelet) endPod(ctx context.Context, pod types.UID) error {
	if err := k.claims.unprepare(ctx, pod); err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	delete(k.seen, pod)
	return nil
}

// report writes a pod's status. A pod that was changed meanwhile comes again with the change.
func (k *Kubelet) report(ctx context.Context, pod *corev1.Pod, change func(*corev1.Pod)) error {
	pod = pod.DeepCopy()
	change(pod)
	_, err := k.client.CoreV1().Pods(pod.Namespace).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("writing the pod's status: %w", err)
	}
	return nil
}

func runningStatus(pod *corev1.Pod) {
	now := metav1.Now()
	pod.Status.Phase = corev1.PodRunning
	pod.Status.StartTime = &now
	for _, kind := range []corev1.PodConditionType{
		corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.ContainersReady, corev1.PodReady,
	} {
		setCondition(pod, kind, corev1.ConditionTrue, "")
	}
	ended := func(container corev1.Container) corev1.ContainerState {
		return corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
			Reason: "Completed", StartedAt: now, FinishedAt: now, ContainerID: containerID(pod, container),
		}}
	}
	running := func(corev1.Container) corev1.ContainerState {
		return corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}
	}
	pod.Status.InitContainerStatuses = nil
	for _, container := range pod.Spec.InitContainers {
		state := ended
		if ptr.Deref(container.RestartPolicy, "") == corev1.ContainerRestartPolicyAlways {
			state = running
		}
		pod.Status.InitContainerStatuses = append(pod.Status.InitContainerStatuses, containerStatus(pod, container, state(container)))
	}
	pod.Status.ContainerStatuses = nil
	for _, container := range pod.Spec.Containers {
		pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, containerStatus(pod, container, running(container)))
	}
}

// endedStatus is what the kubelet reports of a deleted pod whose containers ended well when they were asked to.
func endedStatus(pod *corev1.Pod) {
	now := metav1.Now()
	pod.Status.Phase = corev1.PodSucceeded
	for _, kind := range []corev1.PodConditionType{corev1.PodReadyToStartContainers, corev1.ContainersReady, corev1.PodReady} {
		setCondition(pod, kind, corev1.ConditionFalse, "PodCompleted")
	}
	for _, statuses := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for i := range statuses {
			s := &statuses[i]
			if s.State.Terminated != nil {
				continue
			}
			started := now
			if s.State.Running != nil {
				started = s.State.Running.StartedAt
			}
			s.State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
				Reason: "Completed", StartedAt: started, FinishedAt: now, ContainerID: s.ContainerID,
			}}
			s.Ready, s.Started = false, ptr.To(false)
		}
	}
}

func containerStatus(pod *corev1.Pod, container corev1.Container, state corev1.ContainerState) corev1.ContainerStatus {
	return corev1.ContainerStatus{
		Name: container.Name, State: state, Image: container.Image, ImageID: "hollow://" + container.Image,
		ContainerID: containerID(pod, container), Ready: true, Started: ptr.To(state.Running != nil),
	}
}

func containerID(pod *corev1.Pod, container corev1.Container) string {
	return fmt.Sprintf("hollow://%s/%s", pod.UID, container.Name)
}

func setCondition(pod *corev1.Pod, kind corev1.PodConditionType, status corev1.ConditionStatus, reason string) {
	now := metav1.Now()
	i := slices.IndexFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == kind })
	if i < 0 {
		pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: kind})
		i = len(pod.Status.Conditions) - 1
	}
	c := &pod.Status.Conditions[i]
	if c.Status != status {
		c.LastTransitionTime = now
	}
	c.Status, c.Reason, c.ObservedGeneration = status, reason, pod.Generation
}
