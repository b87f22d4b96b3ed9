// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
)

// healthy is a state with two pods that share a claim, one with a claim of its own, one that waits, and a claim that nobody uses.
func healthy() (state, expectation) {
	s := state{
		pods: map[types.NamespacedName]*corev1.Pod{}, claims: map[types.NamespacedName]*resourceapi.ResourceClaim{},
		slices: newSlices(0, 1),
	}
	want := expectation{alive: map[types.NamespacedName]int{}, free: map[types.NamespacedName]bool{{Namespace: "ns", Name: "free"}: true}}
	for _, h := range []holding{
		{namespace: "ns", name: "shared", gpus: []int{0, 1}, count: 2, pods: []string{"a", "b"}},
		{namespace: "ns", name: "own", gpus: []int{2}, count: 1, pods: []string{"c"}},
		{namespace: "ns", name: "free", count: 1},
		{namespace: "ns", name: "wanted", count: 1, pods: []string{"waits"}},
	} {
		claim := newClaim(&h)
		if h.allocated() {
			claim.Status.Allocation = newAllocation(&h)
		}
		for _, name := range h.pods {
			pod := newPod(h.namespace, name, corev1.PodResourceClaim{ResourceClaimName: &claim.Name})
			pod.UID = types.UID("uid-" + name)
			key := types.NamespacedName{Namespace: h.namespace, Name: name}
			s.pods[key] = pod
			if !h.allocated() {
				want.waiting = append(want.waiting, key)
				continue
			}
			pod.Spec.NodeName = nodeName(h.node)
			claim.Status.ReservedFor = append(claim.Status.ReservedFor, consumer(name, pod.UID))
			want.alive[key] = h.count
		}
		s.claims[types.NamespacedName{Namespace: h.namespace, Name: h.name}] = claim
	}
	return s, want
}

func TestTheCountFindsWhatIsWrong(t *testing.T) {
	key := func(name string) types.NamespacedName { return types.NamespacedName{Namespace: "ns", Name: name} }
	tests := map[string]struct {
		change func(*state)
		want   []string
	}{
		"all is well": {change: func(*state) {}},
		"a device is allocated twice": {
			change: func(s *state) { s.claims[key("own")].Status.Allocation.Devices.Results[0].Device = gpuName(0) },
			want:   []string{"gpu.nvidia.com/node-0000/gpu-0000-10-00-0 is over-used by the claims ns/own, ns/shared"},
		},
		"a pod is not bound": {
			change: func(s *state) { s.pods[key("c")].Spec.NodeName = "" },
			want:   []string{"pod ns/c: is not bound"},
		},
		"a pod is where its devices are not": {
			change: func(s *state) { s.pods[key("c")].Spec.NodeName = "node-0001" },
			want:   []string{"pod ns/c: is on node node-0001, and claim ns/own has a device of pool node-0000"},
		},
		"a pod is lost": {
			change: func(s *state) { delete(s.pods, key("b")) },
			want:   []string{"claim ns/shared is reserved for pod b (UID uid-b), which does not use it", "pod ns/b is not there"},
		},
		"a pod that has ended is still there": {
			change: func(s *state) { s.pods[key("d")] = newPod("ns", "d", corev1.PodResourceClaim{}) },
			want:   []string{"pod ns/d is there and should not be"},
		},
		"a claim was released while it is used": {
			change: func(s *state) { s.claims[key("own")].Status = resourceapi.ResourceClaimStatus{} },
			want:   []string{"pod ns/c: claim ns/own is not reserved for it"},
		},
		"a claim has too few devices": {
			change: func(s *state) {
				a := s.claims[key("shared")].Status.Allocation
				a.Devices.Results = a.Devices.Results[:1]
			},
			want: []string{
				"pod ns/a: claim ns/shared has 1 devices, not the 2 that it asks for",
				"pod ns/b: claim ns/shared has 1 devices, not the 2 that it asks for",
			},
		},
		"a claim is held for nobody": {
			change: func(s *state) {
				s.claims[key("free")].Status.Allocation = newAllocation(&holding{gpus: []int{5}})
			},
			want: []string{"claim ns/free is allocated and reserved for nobody"},
		},
		"a claim is left of a pod that has ended": {
			change: func(s *state) { s.claims[key("left")] = newClaim(&holding{namespace: "ns", name: "left", count: 1}) },
			want:   []string{"claim ns/left is used by no pod and should not be there"},
		},
		"claims are lost": {
			change: func(s *state) { delete(s.claims, key("free")); delete(s.claims, key("own")) },
			want:   []string{"claim ns/free is not there", "pod ns/c: its claim ns/own is not there"},
		},
		"a pod that fits nowhere is bound": {
			change: func(s *state) { s.pods[key("waits")].Spec.NodeName = "node-0000" },
			want:   []string{"pod ns/waits, which fits on no node, is bound to node-0000"},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			s, want := healthy()
			test.change(&s)
			if diff := cmp.Diff(test.want, s.wrong(want)); diff != "" {
				t.Errorf("wrong (-want +got):\n%s", diff)
			}
		})
	}
}
