// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package node_test

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/internal/localcluster/contract"
	"stowage.dev/stowage/internal/localcluster/image"
	"stowage.dev/stowage/internal/localcluster/image/report"
	"stowage.dev/stowage/internal/localcluster/node"
)

// TestContract is what the hollow kubelet passes in package hollow.
func TestContract(t *testing.T) {
	n := startNode(t, node.Agent{})
	client := cluster.AdminClient()
	contract.Test(t, &contract.Kubelet{
		Client: client, Node: nodeName, Root: n.KubeletDir(), CDIRoot: n.CDIDir(), Image: image.Probe,
		Bind: func(ctx context.Context, pod *corev1.Pod) error {
			return client.CoreV1().Pods(namespace).Bind(ctx, &corev1.Binding{
				ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: pod.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: nodeName},
			}, metav1.CreateOptions{})
		},
		Delete: func(ctx context.Context, pod string) error {
			return client.CoreV1().Pods(namespace).Delete(ctx, pod, metav1.DeleteOptions{})
		},
		Env: func(ctx context.Context, pod *corev1.Pod, container string) (map[string]string, error) {
			log, err := n.PodLogs(ctx, namespace, pod.Name, container)
			if err != nil {
				return nil, err
			}
			printed, err := report.Last(strings.NewReader(log))
			if err != nil {
				return nil, err
			}
			return printed.Env, nil
		},
		Restart: n.RestartKubelet,
	})
}
