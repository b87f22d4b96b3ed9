// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/ledger"
	"stowage.dev/stowage/pkg/agent/podresources"
)

// PodsOf returns the source of a node's pods. They are read from the API server itself: its cache may be older than the last reading.
func PodsOf(client kubernetes.Interface, node string) func(context.Context) ([]corev1.Pod, error) {
	return func(ctx context.Context) ([]corev1.Pod, error) {
		list, err := client.CoreV1().Pods(metav1.NamespaceAll).
			List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String()})
		if err != nil {
			return nil, err
		}
		return list.Items, nil
	}
}

// KubeletAt returns the source of what the kubelet runs, by its PodResources service (v1) at a socket.
func KubeletAt(socket string) func(context.Context) ([]KubeletPod, error) {
	kubelet := podresources.New(socket)
	return func(ctx context.Context) (pods []KubeletPod, err error) {
		listed, err := kubelet.List(ctx)
		if err != nil {
			return nil, err
		}
		for _, pod := range listed {
			p := KubeletPod{Namespace: pod.Namespace, Name: pod.Name}
			for _, container := range pod.Containers {
				for _, devices := range container.Devices {
					for _, id := range devices.IDs {
						p.Devices = append(p.Devices, ledger.PluginDevice{Resource: devices.Resource, ID: id})
					}
				}
				for _, claim := range container.Claims {
					p.Claims = append(p.Claims, claim.Name)
					for _, device := range claim.CDI {
						if uid, ok := cdi.ClaimOfDevice(device); ok && !slices.Contains(p.CDIClaims, uid) {
							p.CDIClaims = append(p.CDIClaims, uid)
						}
					}
				}
			}
			pods = append(pods, p)
		}
		return pods, nil
	}
}
