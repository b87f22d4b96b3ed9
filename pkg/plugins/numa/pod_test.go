// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package numa

import (
	"context"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func requests(pairs ...string) v1.ResourceRequirements {
	list := v1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		list[v1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return v1.ResourceRequirements{Requests: list, Limits: list}
}

func TestWithout(t *testing.T) {
	claimed := func(name v1.ResourceName) bool { return name == "nvidia.com/gpu" }
	pod := func(main, init v1.ResourceRequirements) *v1.Pod {
		return &v1.Pod{Spec: v1.PodSpec{
			Containers:     []v1.Container{{Name: "main", Resources: main}},
			InitContainers: []v1.Container{{Name: "init", Resources: init}},
		}}
	}
	tests := map[string]struct {
		pod, want *v1.Pod
		same      bool
	}{
		"none of it": {
			pod:  pod(requests("cpu", "2"), requests("example.com/nic", "1")),
			want: pod(requests("cpu", "2"), requests("example.com/nic", "1")),
			same: true,
		},
		"in an app container": {
			pod: pod(requests("cpu", "2", "nvidia.com/gpu", "1"), requests("cpu", "1")),
			want: pod(v1.ResourceRequirements{Requests: requests("cpu", "2").Requests, Limits: requests("cpu", "2", "nvidia.com/gpu", "1").Limits},
				requests("cpu", "1")),
		},
		"in an init container": {
			pod:  pod(requests("cpu", "1"), requests("nvidia.com/gpu", "1")),
			want: pod(requests("cpu", "1"), v1.ResourceRequirements{Requests: v1.ResourceList{}, Limits: requests("nvidia.com/gpu", "1").Limits}),
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			before := tc.pod.DeepCopy()
			got := without(tc.pod, claimed)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("pod (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(before, tc.pod); diff != "" {
				t.Errorf("the pod itself was changed (-before +after):\n%s", diff)
			}
			if same := got == tc.pod; same != tc.same {
				t.Errorf("the very same pod: %v, want %v", same, tc.same)
			}
		})
	}
}

// Pods are scheduled one by one if each takes from a NUMA node what the next one would get.
func TestSignPod(t *testing.T) {
	tests := map[string]struct {
		resources v1.ResourceRequirements
		signed    bool
	}{
		"guaranteed":                        {resources: requests("cpu", "2", "memory", "1Gi")},
		"burstable":                         {resources: v1.ResourceRequirements{Requests: requests("cpu", "2").Requests}},
		"best effort with a device":         {resources: requests("example.com/nic", "1")},
		"best effort, which is not aligned": {signed: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			pod := &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{{Name: "main", Resources: tc.resources}}}}
			fragments, status := (&Plugin{}).SignPod(context.Background(), pod)
			if status.IsSuccess() != tc.signed || len(fragments) > 0 {
				t.Errorf("fragments %v, status %v", fragments, status)
			}
		})
	}
}
