// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate_test

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

const extended = "example.com/gpu"

// asking adds a pod that asks for GPUs by the name of the class's extended resource.
func asking(c *snapshottest.Cluster, name string, gpus, priority int) *v1.Pod {
	pod, _ := c.Pod("a", name, gpus, int32(priority))
	byExtendedResource(c, pod)
	return pod
}

// byExtendedResource has the last pod ask for its GPUs by the name of the class's extended resource, in place of the claim.
func byExtendedResource(c *snapshottest.Cluster, pod *v1.Pod) {
	c.DeviceClasses[0].Spec.ExtendedResourceName = ptr.To(extended)
	last := len(c.ResourceClaims) - 1
	amount := *resource.NewQuantity(c.ResourceClaims[last].Spec.Devices.Requests[0].Exactly.Count, resource.DecimalSI)
	c.ResourceClaims = c.ResourceClaims[:last]
	container := &pod.Spec.Containers[0]
	pod.Spec.ResourceClaims, container.Resources.Claims = nil, nil
	container.Resources.Requests[extended] = amount
	container.Resources.Limits = v1.ResourceList{extended: amount}
}

// Pods that ask for a class's extended resource get devices, which nobody else gets, also when pods are evicted afterwards.
func TestExtendedResourcesHaveDevices(t *testing.T) {
	c := snapshottest.New(1, 4)
	c.Run("a", "victim", 0, 0, 0)
	pods := []*v1.Pod{asking(c, "two", 2, 300), asking(c, "one", 1, 300), asking(c, "late", 1, 0)}
	claiming, _ := c.Pod("a", "claiming", 1, 100)
	outcomes, err := simulate.Place(t.Context(), simulate.NewChange(&c.Objects), append(pods, claiming), simulate.Options{})
	if err != nil {
		t.Fatal(err)
	}
	holder := map[string]string{}
	for _, out := range outcomes {
		if placed := out.Node != ""; placed != (out.Pod != "late") {
			t.Errorf("pod %s: node %q, %s", out.Pod, out.Node, out.Reason)
		}
		for _, d := range out.Devices {
			if first := holder[d.Device]; first != "" {
				t.Errorf("%s and %s both get %s", first, out.Pod, d.Device)
			}
			holder[d.Device] = out.Pod
		}
	}
	if len(holder) != 4 {
		t.Errorf("devices: %v", holder)
	}
}

// A pod that asks for more of an extended resource than is free waits for devices, and is told so.
func TestWhyOfAnExtendedResource(t *testing.T) {
	c := snapshottest.New(1, 2)
	c.Run("a", "holder", 0, 0, 0)
	asking(c, "waits", 2, 0)
	why, err := simulate.Explain(t.Context(), &c.Objects, "a", "waits", simulate.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if e := why.Outcome.Explanation; e == nil || len(e.Holders) != 1 || e.Holders[0].Release[0].Claim != "holder" {
		t.Errorf("%+v", why.Outcome)
	}
}

// A configuration may score nodes by an extended resource that devices stand for.
func TestScoresOfExtendedResources(t *testing.T) {
	for strategy, want := range map[string]string{"MostAllocated": "worker-1", "LeastAllocated": "worker-0"} {
		c := snapshottest.New(2, 4)
		c.Run("a", "holder", 0, 1, 0, 1)
		asking(c, "waits", 1, 0)
		why, err := simulate.Explain(t.Context(), &c.Objects, "a", "waits", simulate.Options{Configuration: fmt.Appendf(nil, `
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
profiles:
- schedulerName: stowage
  plugins:
    multiPoint:
      enabled: [{name: DeviceClaims}]
      disabled: [{name: DynamicResources}]
    score:
      disabled: [{name: "*"}]
      enabled: [{name: NodeResourcesFit}]
  pluginConfig:
  - name: NodeResourcesFit
    args:
      scoringStrategy: {type: %s, resources: [{name: %s, weight: 1}]}
`, strategy, extended)})
		if err != nil {
			t.Fatal(err)
		}
		if out := why.Outcome; out.Node != want {
			t.Errorf("%s: node %q, want %s: %s", strategy, out.Node, want, out.Reason)
		}
	}
}
