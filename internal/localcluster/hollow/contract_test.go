// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hollow

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"stowage.dev/stowage/internal/localcluster/contract"
)

// TestContract is what the real kubelet passes in package node.
func TestContract(t *testing.T) {
	w := newWorld(t)
	contract.Test(t, &contract.Kubelet{
		Client: w.client, Node: "node", Root: w.options.Root, CDIRoot: w.options.CDIRoot,
		Bind: func(ctx context.Context, pod *corev1.Pod) error {
			pod.Spec.NodeName = "node"
			_, err := w.client.CoreV1().Pods("default").Update(ctx, pod, metav1.UpdateOptions{})
			return err
		},
		Delete: func(_ context.Context, pod string) error {
			w.delete(pod)
			return nil
		},
		Env: func(_ context.Context, pod *corev1.Pod, container string) (map[string]string, error) {
			seen, ok := w.kubelet.Seen(pod.UID)
			if !ok {
				return nil, fmt.Errorf("pod %s does not run", pod.Name)
			}
			env := map[string]string{}
			for _, c := range seen.Containers {
				for _, variable := range c.Env {
					if name, value, _ := strings.Cut(variable, "="); c.Name == container {
						env[name] = value
					}
				}
			}
			return env, nil
		},
		Restart: func(context.Context) error {
			if err := w.kubelet.Stop(); err != nil {
				return err
			}
			var err error
			w.kubelet, err = start(w.ctx, w.client, w.options)
			return err
		},
	})
}
