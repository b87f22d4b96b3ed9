// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package simulate_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot/snapshottest"
)

// sharing adds pods that wait and name one claim.
func sharing(c *snapshottest.Cluster, names ...string) (pods []*v1.Pod) {
	first, _ := c.Pod("a", names[0], 1, 0)
	pods = append(pods, first)
	for _, name := range names[1:] {
		pod := first.DeepCopy()
		pod.Name, pod.UID = name, types.UID(name)
		c.Pods = append(c.Pods, pod)
		pods = append(pods, pod)
	}
	return pods
}

// Pods that share a claim get a place with its devices, one after the other.
func TestPodsThatShareAClaimArePlaced(t *testing.T) {
	c := snapshottest.New(2, 1)
	pods := sharing(c, "one", "two", "three")
	other, _ := c.Pod("a", "zero", 1, 0)
	outcomes, err := simulate.Place(t.Context(), simulate.NewChange(&c.Objects), append(pods, other), simulate.Options{})
	if err != nil {
		t.Fatal(err)
	}
	on := map[string]string{}
	for _, out := range outcomes {
		on[out.Pod] = out.Node
	}
	if on["one"] == "" || on["two"] != on["one"] || on["three"] != on["one"] || on["zero"] == "" || on["zero"] == on["one"] {
		t.Errorf("places: %v", on)
	}
}

// Pods that share a claim keep it over an eviction, in whatever order they are entered.
func TestASharedClaimStaysOverAnEviction(t *testing.T) {
	c := snapshottest.New(1, 3)
	c.Run("a", "victim", 0, 0, 2)
	var pods []*v1.Pod
	for i := range 2 {
		for _, pod := range sharing(c, fmt.Sprintf("%d-one", i), fmt.Sprintf("%d-two", i), fmt.Sprintf("%d-three", i)) {
			pod.Spec.Priority = ptr.To[int32](200)
			pods = append(pods, pod)
		}
	}
	last, _ := c.Pod("a", "last", 1, 100)
	change := simulate.NewChange(&c.Objects)
	outcomes, err := simulate.Place(t.Context(), change, append(pods, last), simulate.Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, out := range outcomes {
		if out.Node == "" {
			t.Errorf("%s has no place: %s", out.Pod, out.Reason)
		}
	}
	for _, claim := range change.ResourceClaims {
		if claim.Name != "last" && claim.Name != "victim" && len(claim.Status.ReservedFor) != 3 {
			t.Errorf("claim %s is reserved for %v", claim.Name, claim.Status.ReservedFor)
		}
	}
}

// Members of a group that share a claim are no obstacle to each other.
func TestMembersThatShareAClaimHaveAPlace(t *testing.T) {
	c := snapshottest.New(2, 1)
	for _, pod := range sharing(c, "one", "two") {
		pod.Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: ptr.To("group")}
	}
	why, err := simulate.Explain(t.Context(), &c.Objects, "a", "two", simulate.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if why.Obstacle != nil && strings.Contains(why.Obstacle.Reason, "is being allocated") {
		t.Errorf("obstacle %+v", why.Obstacle)
	}
}

// No scheduler gives a node to a pod that is being deleted.
func TestAPodThatIsBeingDeletedGetsNoNode(t *testing.T) {
	c := snapshottest.New(1, 1)
	pod, _ := c.Pod("a", "one", 1, 0)
	pod.DeletionTimestamp = &snapshottest.Now
	why, err := simulate.Explain(t.Context(), &c.Objects, "a", "one", simulate.Options{})
	if err != nil || why.State != simulate.Deleting || why.Outcome != nil {
		t.Errorf("%+v, error %v", why, err)
	}
}

// A ReplicaSet makes another pod when one begins to go, and not again when its node is drained.
func TestADrainBringsBackNoPodThatIsReplaced(t *testing.T) {
	for kind, want := range map[string]int{"ReplicaSet": 0, "StatefulSet": 1} {
		c := snapshottest.New(1, 1)
		pod, _ := c.Run("a", "one", 0, 0, 0)
		pod.DeletionTimestamp = &snapshottest.Now
		pod.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: "x", Controller: ptr.To(true)}}
		if back, err := simulate.NewChange(&c.Objects).Drain("worker-0"); err != nil || len(back) != want {
			t.Errorf("%s: %d pods come back, want %d, error %v", kind, len(back), want, err)
		}
	}
}

// Nodes that are added in two steps are different ones.
func TestNodesAreAddedTwice(t *testing.T) {
	c := snapshottest.New(1, 1)
	change := simulate.NewChange(&c.Objects)
	for range 2 {
		if err := change.AddNodes("worker-0", 2); err != nil {
			t.Fatal(err)
		}
	}
	if names := slices.Compact(slices.Sorted(slices.Values(change.Added))); len(names) != 4 {
		t.Errorf("added %v", change.Added)
	}
}

// A claim of the name that one from a template would get keeps no manifest off.
func TestAClaimFromATemplateGetsAFreeName(t *testing.T) {
	c := snapshottest.New(1, 2)
	c.Pod("default", "web-gpu", 1, 0)
	change := simulate.NewChange(&c.Objects)
	pods, err := change.Apply(strings.NewReader(fmt.Sprintf(`
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: one}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: %s}}]}}}
---
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  resourceClaims: [{name: gpu, resourceClaimTemplateName: one}]
  containers: [{name: c, image: i}]
`, snapshottest.Class)), "default")
	if err != nil {
		t.Fatal(err)
	}
	outcomes, err := simulate.Place(t.Context(), change, pods, simulate.Options{})
	if err != nil || len(outcomes) != 1 || outcomes[0].Node == "" {
		t.Errorf("%+v, error %v", outcomes, err)
	}
}
