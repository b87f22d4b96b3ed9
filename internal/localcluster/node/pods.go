// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
)

// RestartKubelet ends the kubelet, starts it anew and waits until it reports the node Ready. Pods run on meanwhile.
func (n *Node) RestartKubelet(ctx context.Context) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	begin := time.Now()
	if err := n.kubelet.Stop(); err != nil {
		return fmt.Errorf("restarting the kubelet of node %s: %w", n.name, err)
	}
	if err := n.startKubelet(ctx); err != nil {
		return fmt.Errorf("restarting the kubelet of node %s: %w", n.name, err)
	}
	return n.waitReady(ctx, begin)
}

// SignalKubelet sends the kubelet a signal, for instance SIGSTOP to make it hang.
func (n *Node) SignalKubelet(signal syscall.Signal) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.kubelet.Signal(signal)
}

// KubeletMetrics returns the kubelet's metrics. It is asked directly, because the API server does not proxy to loopback addresses.
func (n *Node) KubeletMetrics(ctx context.Context) ([]byte, error) {
	config := n.cluster.AdminConfig()
	config.TLSClientConfig.CAData, config.TLSClientConfig.CAFile = nil, n.cluster.ServersCAFile()
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, err
	}
	defer client.CloseIdleConnections()
	text, err := get(ctx, client, fmt.Sprintf("https://127.0.0.1:%d/metrics", n.network.kubeletPort))
	if err != nil {
		return nil, fmt.Errorf("reading the metrics of the kubelet of node %s: %w", n.name, err)
	}
	return text, nil
}

// PodLogs returns the log of a container as the API server gets it from the kubelet.
func (n *Node) PodLogs(ctx context.Context, namespace, pod, container string) (string, error) {
	log, err := n.cluster.AdminClient().CoreV1().Pods(namespace).GetLogs(pod, &corev1.PodLogOptions{Container: container}).DoRaw(ctx)
	if err != nil {
		return "", fmt.Errorf("reading the log of container %s of pod %s/%s: %w", container, namespace, pod, err)
	}
	return string(log), nil
}

// KillContainer kills a running container of a pod as the kernel's OOM killer would, behind the back of the kubelet.
func (n *Node) KillContainer(ctx context.Context, namespace, pod, container string) error {
	return n.SignalContainer(ctx, namespace, pod, container, "SIGKILL")
}

// SignalContainer sends a signal, for instance "SIGUSR1", to the first process of a running container.
func (n *Node) SignalContainer(ctx context.Context, namespace, pod, container, signal string) error {
	object, err := n.cluster.AdminClient().CoreV1().Pods(namespace).Get(ctx, pod, metav1.GetOptions{})
	if err != nil {
		return err
	}
	i := slices.IndexFunc(object.Status.ContainerStatuses, func(s corev1.ContainerStatus) bool { return s.Name == container })
	if i < 0 || object.Status.ContainerStatuses[i].State.Running == nil {
		return fmt.Errorf("container %s of pod %s/%s is not running", container, namespace, pod)
	}
	id := strings.TrimPrefix(object.Status.ContainerStatuses[i].ContainerID, "containerd://")
	if _, err := n.ctr(ctx, "tasks", "kill", "--signal", signal, id); err != nil {
		return fmt.Errorf("sending %s to container %s of pod %s/%s: %w", signal, container, namespace, pod, err)
	}
	return nil
}
