// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package hollow

import (
	"context"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"

	"google.golang.org/grpc"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"k8s.io/utils/ptr"
)

// podResources tells what the pods of the node have, as the kubelet's service does (pkg/kubelet/apis/podresources): List alone.
type podResources struct {
	podresourcesapi.UnimplementedPodResourcesListerServer
	kubelet *Kubelet
}

// servePodResources serves until the function is called that it returns.
func (k *Kubelet) servePodResources() (stop func(), err error) {
	path := filepath.Join(k.options.Root, "pod-resources", "kubelet.sock")
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, err
	}
	_ = os.Remove(path) // of a kubelet before
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("listening for questions of what pods have: %w", err)
	}
	server := grpc.NewServer()
	podresourcesapi.RegisterPodResourcesListerServer(server, &podResources{kubelet: k})
	k.done.Go(func() { _ = server.Serve(listener) })
	return server.Stop, nil
}

// List implements the kubelet's service.
func (p *podResources) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	pods, err := p.kubelet.pods.List(labels.Everything())
	if err != nil {
		return nil, err
	}
	answer := &podresourcesapi.ListPodResourcesResponse{}
	for _, pod := range pods {
		if pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		listed := &podresourcesapi.PodResources{Namespace: pod.Namespace, Name: pod.Name}
		containers := slices.DeleteFunc(slices.Clone(pod.Spec.InitContainers), func(c corev1.Container) bool {
			return ptr.Deref(c.RestartPolicy, "") != corev1.ContainerRestartPolicyAlways
		})
		for _, container := range append(containers, pod.Spec.Containers...) {
			has := &podresourcesapi.ContainerResources{Name: container.Name, DynamicResources: p.kubelet.claims.resourcesOf(pod, &container)}
			for _, a := range p.kubelet.devices.of(pod.UID) {
				if a.ContainerName == container.Name {
					has.Devices = append(has.Devices, &podresourcesapi.ContainerDevices{ResourceName: a.ResourceName, DeviceIds: a.ids()})
				}
			}
			listed.Containers = append(listed.Containers, has)
		}
		answer.PodResources = append(answer.PodResources, listed)
	}
	return answer, nil
}

// resourcesOf are the claims to which the container refers, with all of their devices.
func (m *claimManager) resourcesOf(pod *corev1.Pod, container *corev1.Container) (all []*podresourcesapi.DynamicResource) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, used := range container.Resources.Claims {
		i := slices.IndexFunc(pod.Spec.ResourceClaims, func(c corev1.PodResourceClaim) bool { return c.Name == used.Name })
		if i < 0 {
			continue
		}
		name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i])
		if err != nil || name == nil {
			continue
		}
		h := m.held[types.NamespacedName{Namespace: pod.Namespace, Name: *name}]
		if h == nil || !h.pods.Has(pod.UID) {
			continue
		}
		claim := &podresourcesapi.DynamicResource{ClaimNamespace: pod.Namespace, ClaimName: *name}
		for _, driver := range slices.Sorted(maps.Keys(h.devices)) {
			for _, device := range h.devices[driver] {
				resource := &podresourcesapi.ClaimResource{DriverName: driver, PoolName: device.PoolName, DeviceName: device.DeviceName}
				for _, id := range device.CdiDeviceIds {
					resource.CdiDevices = append(resource.CdiDevices, &podresourcesapi.CDIDevice{Name: id})
				}
				claim.ClaimResources = append(claim.ClaimResources, resource)
			}
		}
		all = append(all, claim)
	}
	return all
}
