// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contract

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// resources are what a pod's first container has, as the kubelet lists it.
type resources struct {
	// Claims are names with the devices after a colon.
	Claims []string
	// Devices are IDs of the device plugin's.
	Devices []string
}

// wantResources waits until the kubelet lists that of the pod; nothing is also for a pod that it does not list.
func (k *Kubelet) wantResources(t *testing.T, pod string, want resources) {
	t.Helper()
	eventually(t, func() error {
		answer, err := k.list(t.Context())
		if err != nil {
			return err
		}
		var got resources
		for _, listed := range answer.GetPodResources() {
			if listed.GetNamespace() != namespace || listed.GetName() != pod || len(listed.GetContainers()) == 0 {
				continue
			}
			container := listed.GetContainers()[0]
			for _, claim := range container.GetDynamicResources() {
				var devices []string
				for _, device := range claim.GetClaimResources() {
					devices = append(devices, device.GetDeviceName())
				}
				got.Claims = append(got.Claims, claim.GetClaimName()+": "+strings.Join(slices.Sorted(slices.Values(devices)), " "))
			}
			for _, devices := range container.GetDevices() {
				if devices.GetResourceName() == resourceName {
					got.Devices = append(got.Devices, devices.GetDeviceIds()...)
				}
			}
		}
		slices.Sort(got.Devices)
		if diff := cmp.Diff(want, got); diff != "" {
			return fmt.Errorf("the kubelet lists of pod %s (-want +got):\n%s", pod, diff)
		}
		return nil
	})
}

func (k *Kubelet) list(ctx context.Context) (*podresourcesapi.ListPodResourcesResponse, error) {
	socket := filepath.Join(k.Root, "pod-resources", "kubelet.sock")
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	return podresourcesapi.NewPodResourcesListerClient(conn).List(ctx, &podresourcesapi.ListPodResourcesRequest{})
}
