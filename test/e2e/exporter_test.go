// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/internal/localcluster/node"
	"stowage.dev/stowage/test/lab"
)

// series are the labels of one of the exporter's series, as far as they say which device it is, and whose.
type series struct{ UUID, Device, Namespace, Pod, Container, Claim string }

// What a Prometheus reads from a node, while pods have its GPUs in each of the four ways, and when they are gone: whose each
// device is. Judged by what the containers see.
func TestTheExporterNamesThePodOfEachDevice(t *testing.T) {
	const (
		name           = "metered"
		shared, plugin = "0000:d1:00.0", "0000:df:00.0"
	)
	namespace := newNamespace(t) // which goes after the node
	metered, err := cluster.StartRealNode(t.Context(), name, profile,
		"--partitions=dynamic", "--share-gpus="+shared, "--advertise=dra,"+plugin+"=device-plugin", "--gpu-metrics-interval=1s")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := metered.Stop(); err != nil {
			t.Error(err)
		}
	})
	waitGPUs(t, name, 1, 1)

	onNode := map[string]string{corev1.LabelHostname: name}
	templates := map[string]resourceapi.ExactDeviceRequest{
		"whole":     requestOf("gpu.nvidia.com", `!device.allowMultipleAllocations`),
		"partition": requestOf("mig.nvidia.com", `device.attributes["gpu.nvidia.com"].profile == "1g.10gb"`),
		"share":     requestOf("gpu.nvidia.com", `device.allowMultipleAllocations`),
	}
	share := templates["share"]
	share.Capacity = &resourceapi.CapacityRequirements{
		Requests: map[resourceapi.QualifiedName]resource.Quantity{"memory": resource.MustParse("20Gi")},
	}
	templates["share"] = share
	var pods []pod
	for _, way := range slices.Sorted(maps.Keys(templates)) {
		if _, err := cluster.AdminClient().ResourceV1().ResourceClaimTemplates(namespace).Create(t.Context(), &resourceapi.ResourceClaimTemplate{
			ObjectMeta: metav1.ObjectMeta{Name: way},
			Spec: resourceapi.ResourceClaimTemplateSpec{Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
				Requests: []resourceapi.DeviceRequest{{Name: "gpu", Exactly: ptr.To(templates[way])}},
			}}},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		// Two in each of the ways: the shares are of one GPU.
		for i := range 2 {
			object := podWithClaim(fmt.Sprintf("%s-%d", way, i), way)
			object.Spec.NodeSelector = onNode
			create(t, namespace, object)
			pods = append(pods, pod{t: t, namespace: namespace, name: object.Name})
		}
	}
	pods = append(pods, (&pluginNode{Node: metered, namespace: namespace}).create(t, "plugin-0", 1))

	var want []series
	for _, p := range pods {
		object := p.waitRunning()
		of := series{Namespace: namespace, Pod: p.name, Container: "main"}
		for uuid := range uuidsOf(p.report(metered, "main")) {
			of.UUID = uuid
		}
		for _, claimed := range object.Status.ResourceClaimStatuses {
			of.Claim = *claimed.ResourceClaimName
			claim, err := cluster.AdminClient().ResourceV1().ResourceClaims(namespace).Get(t.Context(), of.Claim, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			of.Device = claim.Status.Allocation.Devices.Results[0].Device
		}
		if len(object.Status.ResourceClaimStatuses) == 0 {
			of.Device = "gpu-0000-df-00-0"
		}
		want = append(want, of)
	}
	for i := range want {
		if isMIG := strings.HasPrefix(want[i].UUID, "MIG-"); isMIG != strings.HasPrefix(want[i].Pod, "partition-") {
			t.Errorf("pod %s sees %s", want[i].Pod, want[i].UUID)
		}
		if want[i].Pod == "share-1" && want[i].UUID != want[i-1].UUID {
			t.Errorf("the shares are of %s and %s, want one GPU", want[i-1].UUID, want[i].UUID)
		}
	}
	waitSeries(t, metered, want)

	// Those of who is gone are gone, of others they stay.
	for i := 0; i < len(pods); i += 2 {
		pods[i].delete()
	}
	var left []series
	for i := 1; i < len(want); i += 2 {
		left = append(left, want[i])
	}
	waitSeries(t, metered, left)
	for i := 1; i < len(pods); i += 2 {
		pods[i].delete()
	}
	waitSeries(t, metered, nil)
}

func requestOf(class, expression string) resourceapi.ExactDeviceRequest {
	return resourceapi.ExactDeviceRequest{
		DeviceClassName: class,
		Selectors:       []resourceapi.DeviceSelector{{CEL: &resourceapi.CELDeviceSelector{Expression: expression}}},
	}
}

// waitSeries waits until these, and no others, have a holder, and each of them a value.
func waitSeries(t *testing.T, n *node.Node, want []series) {
	t.Helper()
	want = slices.SortedFunc(slices.Values(want), func(a, b series) int { return strings.Compare(a.Pod, b.Pod) })
	poll(t, fmt.Sprintf("%d series have a holder", len(want)), func(ctx context.Context) error {
		text, err := n.Agent().Get(ctx, "/metrics/gpus")
		if err != nil {
			return err
		}
		scraped, err := lab.ParseMetrics(text)
		if err != nil {
			return err
		}
		for _, metric := range []string{"stowage_gpu_info", "stowage_gpu_memory_used_bytes", "stowage_gpu_memory_total_bytes"} {
			var got []series
			for _, sample := range scraped[metric].GetMetric() {
				labels := map[string]string{}
				for _, pair := range sample.GetLabel() {
					labels[pair.GetName()] = pair.GetValue()
				}
				if labels["hostname"] != n.Name() {
					return fmt.Errorf("%s has the labels %v, want host %s", metric, labels, n.Name())
				}
				if labels["pod"]+labels["claim"]+labels["namespace"]+labels["container"] != "" {
					got = append(got, series{labels["uuid"], labels["device"], labels["namespace"], labels["pod"], labels["container"], labels["claim"]})
				}
			}
			slices.SortFunc(got, func(a, b series) int { return strings.Compare(a.Pod, b.Pod) })
			if diff := cmp.Diff(want, got); diff != "" {
				return fmt.Errorf("%s (-want +got):\n%s", metric, diff)
			}
		}
		return nil
	})
}
