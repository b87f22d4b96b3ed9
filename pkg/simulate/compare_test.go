// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate_test

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
		"pods that it keeps away from": {change: func(c *snapshottest.Cluster, pod *v1.Pod, request *resourceapi.ExactDeviceRequest) {
			request.Count = 2
			c.Pods[0].Labels = map[string]string{"app": "x"}
			pod.Spec.Affinity = &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{{
					LabelSelector: &metav1.LabelSelector{MatchLabels: c.Pods[0].Labels}, TopologyKey: v1.LabelHostname,
				}},
			}}
		}},
		"pods beside which it would be too many": {change: func(c *snapshottest.Cluster, pod *v1.Pod, request *resourceapi.ExactDeviceRequest) {
			request.Count = 2
			c.Pods[0].Labels = map[string]string{"app": "x"}
			pod.Labels = c.Pods[0].Labels
			pod.Spec.TopologySpreadConstraints = []v1.TopologySpreadConstraint{{
				MaxSkew: 1, TopologyKey: v1.LabelHostname, WhenUnsatisfiable: v1.DoNotSchedule,
				LabelSelector: &metav1.LabelSelector{MatchLabels: pod.Labels},
			}}
		}},
		"a volume for one pod, which another has": {change: func(c *snapshottest.Cluster, pod *v1.Pod, request *resourceapi.ExactDeviceRequest) {
			request.Count = 2
			claim := &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "disk", UID: "disk"}}
			claim.Annotations = map[string]string{"pv.kubernetes.io/bind-completed": "yes"}
			claim.Spec.AccessModes, claim.Spec.VolumeName = []v1.PersistentVolumeAccessMode{v1.ReadWriteOncePod}, "disk"
			claim.Status.Phase = v1.ClaimBound
			volume := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "disk", UID: "disk-pv"}}
			volume.Spec.ClaimRef = &v1.ObjectReference{Namespace: "a", Name: "disk", UID: "disk"}
			c.PersistentVolumeClaims, c.PersistentVolumes = append(c.PersistentVolumeClaims, claim), append(c.PersistentVolumes, volume)
			for _, user := range []*v1.Pod{c.Pods[0], pod} {
				user.Spec.Volumes = []v1.Volume{{Name: "disk", VolumeSource: v1.VolumeSource{
					PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "disk"},
				}}}
			}
		}},
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
