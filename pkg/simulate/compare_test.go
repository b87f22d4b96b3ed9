// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// Where no release helps, it is told what else than devices keeps the pod off nodes that have some, and off those that lack them even if
// nobody were there.
func TestWhatElseIsMissing(t *testing.T) {
	for name, tc := range map[string]struct {
		change            func(c *snapshottest.Cluster, pod *v1.Pod, request *resourceapi.ExactDeviceRequest)
		others, evenEmpty []simulate.Refusal
	}{
		"nothing": {change: func(_ *snapshottest.Cluster, _ *v1.Pod, request *resourceapi.ExactDeviceRequest) { request.Count = 2 }},
		"more CPU than any node has": {
			change: func(_ *snapshottest.Cluster, pod *v1.Pod, _ *resourceapi.ExactDeviceRequest) {
				pod.Spec.Containers[0].Resources.Requests[v1.ResourceCPU] = resource.MustParse("193")
			},
			others:    []simulate.Refusal{{Reason: "Insufficient cpu", Nodes: []string{"worker-1"}}},
			evenEmpty: []simulate.Refusal{{Reason: "Insufficient cpu", Nodes: []string{"worker-0"}}},
		},
		"a taint, of a node without devices, too": {
			change: func(c *snapshottest.Cluster, _ *v1.Pod, request *resourceapi.ExactDeviceRequest) {
				request.Count = 2
				c.Nodes[1].Spec.Taints = []v1.Taint{{Key: "dedicated", Effect: v1.TaintEffectNoSchedule}}
				bare := c.Nodes[1].DeepCopy()
				bare.Name, bare.UID = "bare", "bare"
				c.Nodes = append(c.Nodes, bare)
			},
			others: []simulate.Refusal{{Reason: "node(s) had untolerated taint(s)", Nodes: []string{"worker-1"}}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := snapshottest.New(2, 1)
			c.Run("a", "holder", 0, 0, 0)
			pod, claim := c.Pod("a", "waits", 1, 0)
			tc.change(c, pod, claim.Spec.Devices.Requests[0].Exactly)
			why, err := simulate.Explain(t.Context(), &c.Objects, "a", "waits", simulate.Options{})
			if err != nil {
				t.Fatal(err)
			}
			got := [][]simulate.Refusal{why.Outcome.Others, why.Outcome.EvenEmpty}
			if diff := cmp.Diff([][]simulate.Refusal{tc.others, tc.evenEmpty}, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}
