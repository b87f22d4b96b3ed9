package reconcile

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"stowage.dev/stowage/pkg/agent/cdi"
	"stowage.dev/stowage/pkg/agent/ledger"
)

// PodsOf returns the source of a node's pods. They are read from the API server itself: its cache may be older than the last reading.
func PodsOf(client kubernetes.Interface, node string) func(context.Context) ([]corev1.Pod, error) {
	return func(ctx context.Context) ([]corev1.Pod, error) {
		list, err := client.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("spec.nodeName", node).String()})
		if err != nil {
			return nil, err
		}
		return list.Items, nil
	}
}

// KubeletAt returns the source of what the kubelet runs, by its PodResources service (v1) at a socket.
func KubeletAt(socket string) func(context.Context) ([]KubeletPod, error) {
	return func(ctx context.Context) (pods []KubeletPod, err error) {
		conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return nil, fmt.Errorf("connect to %s: %w", socket, err)
		}
		defer func() { err = errors.Join(err, conn.Close()) }()
		list, err := podresources.NewPodResourcesListerClient(conn).List(ctx, &podresources.ListPodResourcesRequest{})
		if err != nil {
			return nil, fmt.Errorf("list at %s: %w", socket, err)
		}
		for _, pod := range list.GetPodResources() {
			p := KubeletPod{Namespace: pod.GetNamespace(), Name: pod.GetName()}
			for _, container := range pod.GetContainers() {
				for _, devices := range container.GetDevices() {
					for _, id := range devices.GetDeviceIds() {
						p.Devices = append(p.Devices, ledger.PluginDevice{Resource: devices.GetResourceName(), ID: id})
					}
				}
				for _, claim := range container.GetDynamicResources() {
					p.Claims = append(p.Claims, claim.GetClaimName())
					for _, resource := range claim.GetClaimResources() {
						for _, device := range resource.GetCdiDevices() {
							if uid, ok := cdi.ClaimOfDevice(device.GetName()); ok && !slices.Contains(p.CDIClaims, uid) {
								p.CDIClaims = append(p.CDIClaims, uid)
							}
						}
					}
				}
			}
			pods = append(pods, p)
		}
		return pods, nil
	}
}
