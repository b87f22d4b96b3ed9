// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// Informers have all objects, the very same, and a list of all claims is the one that the fake API server would answer.
func TestInformersHaveTheObjects(t *testing.T) {
	c := snapshottest.Full(3)
	c.Pod("team-0", "waits", 2, 0)
	client, _, err := newClient(&c.Objects)
	if err != nil {
		t.Fatal(err)
	}
	factory := newFactory(client, &c.Objects)
	core := factory.Core().V1()
	pods, nodes, devices := core.Pods().Lister(), core.Nodes().Lister(), factory.Resource().V1().ResourceSlices().Lister()
	factory.Start(t.Context().Done())
	factory.WaitForCacheSync(t.Context().Done())
	same(t, "pods", c.Pods, pods.List)
	same(t, "nodes", c.Nodes, nodes.List)
	same(t, "slices", c.ResourceSlices, devices.List)

	for _, namespace := range []string{metav1.NamespaceAll, "team-1"} {
		got, err := client.ResourceV1().ResourceClaims(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		want, err := client.(direct).Clientset.ResourceV1().ResourceClaims(namespace).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(want.Items) == 0 {
			t.Fatal("there are no claims")
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("claims of namespace %q: %s", namespace, diff)
		}
	}
}

// same compares pointers.
func same[T comparable](t *testing.T, kind string, want []T, list func(labels.Selector) ([]T, error)) {
	t.Helper()
	got, err := list(labels.Everything())
	if err != nil {
		t.Fatal(err)
	}
	for _, object := range want {
		if !slices.Contains(got, object) {
			t.Errorf("of %d %s one is not there, or a copy", len(want), kind)
			return
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d %s, want %d", len(got), kind, len(want))
	}
}
