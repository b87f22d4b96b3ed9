// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"stowage.dev/stowage/internal/localcluster"
)

const (
	pollInterval = 100 * time.Millisecond
	// slicesTimeout is for an agent that finds the GPUs of its node, on a busy machine.
	slicesTimeout = 3 * time.Minute
)

// Options say where the project's own files are.
type Options struct {
	// Root is the project's folder, with manifests below it. Required.
	Root string
	// Scheduler and Agent are the paths of the two binaries. Required.
	Scheduler, Agent string
	// Library is what make nvml-library builds, through which the agents of real nodes ask their simulated GPUs, as they ask real
	// ones. Without it they are simulated within the agents.
	Library string
	// Progress gets a line for each step that takes long.
	Progress io.Writer
}

// Lab is a running cluster with Stowage's permissions and device classes in it.
type Lab struct {
	*localcluster.Cluster
	options Options
	client  kubernetes.Interface
	// scheduler is ours, once it is started.
	scheduler *localcluster.Scheduler
	nodes     map[string]*labNode
	// known caches what discovery says, by node.
	known map[string]inventory
}

// Start starts the control plane and applies the manifests that grant rights and
// define device classes.
func Start(ctx context.Context, options Options) (*Lab, error) {
	cluster, err := localcluster.Start(ctx, localcluster.Options{Progress: options.Progress})
	if err != nil {
		return nil, err
	}
	l := &Lab{
		Cluster: cluster,
		options: options,
		client:  cluster.AdminClient(),
		nodes:   map[string]*labNode{},
		known:   map[string]inventory{},
	}
	if err := l.Apply(ctx, l.Manifest("base", "access")); err != nil {
		return nil, errors.Join(err, cluster.Stop())
	}
	return l, nil
}

// Manifest is the path of a file or folder of manifests.
func (l *Lab) Manifest(elem ...string) string {
	return filepath.Join(append([]string{l.options.Root, "manifests"}, elem...)...)
}

// StartStowage starts our scheduler beside no other, with the configuration that
// a user would install.
func (l *Lab) StartStowage(ctx context.Context) (*localcluster.Scheduler, error) {
	var err error
	l.scheduler, err = l.StartScheduler(ctx, localcluster.SchedulerOptions{
		Binary:      l.options.Scheduler,
		Config:      l.Manifest("scheduler-config", "second-scheduler.yaml"),
		LeaderElect: true, // by its lease doctor knows that it is there
	})
	return l.scheduler, err
}

// WaitForPods waits until each of the namespace's pods with the names meets the
// condition. An error of the condition ends the wait, and so does a pod that is
// not there; what could not be read for another reason is read again.
func (l *Lab) WaitForPods(ctx context.Context, namespace string, names []string, what string, timeout time.Duration,
	condition func(*corev1.Pod) (bool, error),
) ([]*corev1.Pod, error) {
	pods := make([]*corev1.Pod, len(names))
	var waiting string
	var unread error
	err := wait.PollUntilContextTimeout(ctx, pollInterval, timeout, true, func(ctx context.Context) (bool, error) {
		for i, name := range names {
			var pod *corev1.Pod
			if pod, unread = l.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{}); apierrors.IsNotFound(unread) {
				return false, unread
			} else if unread != nil {
				return false, nil
			}
			done, err := condition(pod)
			if err != nil {
				return false, err
			}
			if !done {
				waiting = Describe(pod)
				return false, nil
			}
			pods[i] = pod
		}
		return true, nil
	})
	if err != nil {
		return nil, fmt.Errorf("waiting for pods to be %s: %w; still waiting for %s%s", what, both(err, unread), waiting,
			l.eventsOf(namespace, waiting))
	}
	return pods, nil
}

// both is the error that ended a wait, with the one that it met last.
func both(err, last error) error {
	if last == nil || errors.Is(err, last) {
		return err
	}
	return fmt.Errorf("%w: %w", err, last)
}

// Running is the condition that a pod's containers run.
func Running(pod *corev1.Pod) (bool, error) {
	if pod.Status.Phase == corev1.PodFailed || pod.Status.Phase == corev1.PodSucceeded {
		return false, fmt.Errorf("pod %s has ended: %s", pod.Name, Describe(pod))
	}
	return pod.Status.Phase == corev1.PodRunning && podCondition(pod, corev1.PodReady) == corev1.ConditionTrue, nil
}

// Unschedulable is the condition that the scheduler has said why a pod waits.
func Unschedulable(pod *corev1.Pod) (bool, error) {
	if pod.Spec.NodeName != "" {
		return false, fmt.Errorf("pod %s should not fit anywhere, but is on node %s", pod.Name, pod.Spec.NodeName)
	}
	return SchedulingMessage(pod) != "", nil
}

// SchedulingMessage is what the scheduler says about a pod that does not fit.
func SchedulingMessage(pod *corev1.Pod) string {
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
			return c.Message
		}
	}
	return ""
}

// Describe is one line about a pod.
func Describe(pod *corev1.Pod) string {
	text := fmt.Sprintf("pod %s/%s: phase %s, node %q", pod.Namespace, pod.Name, pod.Status.Phase, pod.Spec.NodeName)
	for _, c := range pod.Status.Conditions {
		if c.Status != corev1.ConditionTrue && c.Message != "" {
			text += fmt.Sprintf(", %s: %s", c.Type, c.Message)
		}
	}
	for _, s := range pod.Status.ContainerStatuses {
		if s.State.Waiting != nil {
			text += fmt.Sprintf(", container %s: %s %s", s.Name, s.State.Waiting.Reason, s.State.Waiting.Message)
		}
		if s.State.Terminated != nil {
			text += fmt.Sprintf(", container %s: exit code %d %s", s.Name, s.State.Terminated.ExitCode, s.State.Terminated.Message)
		}
	}
	return text
}

func podCondition(pod *corev1.Pod, kind corev1.PodConditionType) corev1.ConditionStatus {
	for _, c := range pod.Status.Conditions {
		if c.Type == kind {
			return c.Status
		}
	}
	return corev1.ConditionUnknown
}

// eventsOf returns the warnings of a namespace, for the error of a wait in vain.
func (l *Lab) eventsOf(namespace, waiting string) string {
	if waiting == "" {
		return ""
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	events, err := l.client.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "type=" + corev1.EventTypeWarning})
	if err != nil || len(events.Items) == 0 {
		return ""
	}
	text := "; events:"
	for _, event := range events.Items[max(0, len(events.Items)-5):] {
		text += fmt.Sprintf("\n  %s %s: %s: %s", event.InvolvedObject.Kind, event.InvolvedObject.Name, event.Reason, event.Message)
	}
	return text
}

// WaitForSlices waits until the node's agent has published count devices, in
// complete pools.
func (l *Lab) WaitForSlices(ctx context.Context, node string, count int) error {
	published := 0
	var unread error
	err := wait.PollUntilContextTimeout(ctx, pollInterval, slicesTimeout, true, func(ctx context.Context) (bool, error) {
		var slices *resourceapi.ResourceSliceList
		if slices, unread = l.client.ResourceV1().ResourceSlices().
			List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node}); unread != nil {
			return false, nil
		}
		published = 0
		for _, slice := range slices.Items {
			if slice.Spec.Driver != DriverName {
				continue
			}
			if int64(len(slices.Items)) != slice.Spec.Pool.ResourceSliceCount {
				return false, nil
			}
			published += len(slice.Spec.Devices)
		}
		return published == count, nil
	})
	if err != nil {
		return fmt.Errorf("waiting for the %d GPUs of node %s, %d are published: %w", count, node, published, both(err, unread))
	}
	return nil
}
