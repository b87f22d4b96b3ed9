// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate

import (
	"slices"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// Informers, and who lists claims, have all objects, the very same.
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

	listed, err := cache.ToListerWithContext(listWatch(client, c.ResourceClaims)).ListWithContext(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	claims, err := meta.ExtractListWithAlloc(listed) // as a reflector does
	if err != nil {
		t.Fatal(err)
	}
	same(t, "claims", c.ResourceClaims, func(labels.Selector) (all []*resourceapi.ResourceClaim, _ error) {
		for _, claim := range claims {
			all = append(all, claim.(*resourceapi.ResourceClaim))
		}
		return all, nil
	})
	want, err := client.ResourceV1().ResourceClaims(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if got := listed.(metav1.ListInterface).GetResourceVersion(); got != want.ResourceVersion {
		t.Errorf("the list of claims is of version %s, want %s as the client says", got, want.ResourceVersion)
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
