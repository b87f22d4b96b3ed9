// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package contention

import (
	"slices"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/allocator"
)

func nominated(name string) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team-a", Name: name, UID: types.UID(name)}}
}

func holding(name string) *v1.Pod {
	p := nominated(name)
	p.Spec.NodeName = "node-a"
	p.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To(name)}}
	return p
}

// Clones of a cycle state share one: what is made from it must not show in it.
func TestWhatIfIsNeverChanged(t *testing.T) {
	first, second := holding("first"), holding("second")
	var none *WhatIf
	one := none.Without(first)
	two := one.Without(second)
	back := two.With(first)
	for name, tc := range map[string]struct {
		got  *WhatIf
		want []*v1.Pod
	}{
		"one removed":  {one, []*v1.Pod{first}},
		"two removed":  {two, []*v1.Pod{first, second}},
		"one put back": {back, []*v1.Pod{second}},
	} {
		if tc.got.removed.Len() != len(tc.want) {
			t.Errorf("%s: %d pods are removed, want %d", name, tc.got.removed.Len(), len(tc.want))
		}
		for _, pod := range tc.want {
			if !tc.got.HasRemoved(pod) {
				t.Errorf("%s: pod %s is not removed", name, pod.Name)
			}
		}
	}

	a, b, c := nominated("a"), nominated("b"), nominated("c")
	base := none.With(a)
	withB, withC := base.With(b), base.With(c)
	if !slices.Equal(withB.nominees, []*v1.Pod{a, b}) || !slices.Equal(withC.nominees, []*v1.Pod{a, c}) || len(base.nominees) != 1 {
		t.Error("nominated pods of one appear in another")
	}
}

// manyTimes begins another time for each pod that asks.
type manyTimes struct{ Time }

type oneTime struct {
	allocator.Attempt
	pod string
}

func (manyTimes) Attempt(pod *v1.Pod) allocator.Attempt { return &oneTime{pod: pod.Name} }

// What nominated pods are going to get is looked for in the time of their namespace, of all its pods together, and of no other.
func TestNomineesOfANamespaceShareItsTime(t *testing.T) {
	h := (&Rivals{Search: Search{Time: manyTimes{}}}).NewHolders()
	first, second, other := nominated("a"), nominated("b"), nominated("c")
	other.Namespace = "team-b"
	if h.timeFor(first) != h.timeFor(second) {
		t.Error("two pods of a namespace have different times")
	}
	if h.timeFor(first) == h.timeFor(other) {
		t.Error("a pod of another namespace has the same time")
	}
}
