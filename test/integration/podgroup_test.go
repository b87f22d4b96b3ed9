// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// addGroup makes a group that is scheduled with at least so many of its pods, or, with 0, with any.
func (w *world) addGroup(name string, atLeast int32, change ...func(*schedulingapi.PodGroupSpec)) *schedulingapi.PodGroup {
	w.t.Helper()
	group := &schedulingapi.PodGroup{ObjectMeta: metav1.ObjectMeta{Name: name}}
	group.Spec.SchedulingPolicy.Basic = &schedulingapi.BasicSchedulingPolicy{}
	if atLeast > 0 {
		group.Spec.SchedulingPolicy = schedulingapi.PodGroupSchedulingPolicy{Gang: &schedulingapi.GangSchedulingPolicy{MinCount: atLeast}}
	}
	for _, c := range change {
		c(&group.Spec)
	}
	group, err := w.client.SchedulingV1beta1().PodGroups(w.name).Create(w.ctx, group, metav1.CreateOptions{})
	w.must(err, "creating pod group %s", name)
	w.t.Cleanup(func() { w.cleanUp(w.client.SchedulingV1beta1().PodGroups(w.name).Delete, name) })
	return group
}

// ofPriority gives a group the priority that its pods must have, too.
func (w *world) ofPriority(priority string) func(*schedulingapi.PodGroupSpec) {
	return func(s *schedulingapi.PodGroupSpec) { s.PriorityClassName = w.name + "-" + priority }
}

func inGroup(name string) podOption {
	return func(p *v1.Pod) { p.Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: &name} }
}

// addMembers adds n pods of a group and returns their names.
func (w *world) addMembers(group string, n int, options ...podOption) []string {
	w.t.Helper()
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("%s-%d", group, i)
		w.addPod(names[i], append(options, inGroup(group))...)
	}
	return names
}

// awaitAllBound returns the nodes of the pods.
func (w *world) awaitAllBound(names []string) []string {
	w.t.Helper()
	var nodes []string
	for _, name := range names {
		nodes = append(nodes, w.awaitBound(name).Spec.NodeName)
	}
	return nodes
}

// users are the names of those that the claim is reserved for, in order.
func users(claim *resourceapi.ResourceClaim) []string {
	var names []string
	for _, ref := range claim.Status.ReservedFor {
		names = append(names, ref.Resource+"/"+ref.Name)
	}
	slices.Sort(names)
	return names
}

func (w *world) awaitUsers(claim string, want ...string) *resourceapi.ResourceClaim {
	w.t.Helper()
	slices.Sort(want)
	return w.awaitClaim(claim, fmt.Sprintf("reserved for %q", want), func(c *resourceapi.ResourceClaim) bool { return slices.Equal(users(c), want) })
}

// The pods of a group share a claim: it is allocated once, and all go where its device is.
func testGroupSharesAClaim(t *testing.T, w *world) {
	for _, suffix := range []string{"a", "b", "c"} {
		w.addNode(suffix, gpus(h100, 2)...)
	}
	for _, tc := range []struct {
		group   string
		atLeast int32
		pods    int
	}{{"gang-of-all", 10, 10}, {"gang-of-some", 2, 5}, {"basic", 0, 5}} {
		w.addClaim(tc.group, spec(w.exactly("gpu", 1)))
		w.addGroup(tc.group, tc.atLeast)
		names := w.addMembers(tc.group, tc.pods, withClaim(tc.group))
		if nodes := slices.Compact(w.awaitAllBound(names)); len(nodes) != 1 {
			t.Errorf("%s: the pods are on nodes %q, want one", tc.group, nodes)
		}
		want := make([]string, len(names))
		for i, name := range names {
			want[i] = "pods/" + name
		}
		claim := w.awaitUsers(tc.group, want...)
		if n := len(devices(claim)); n != 1 {
			t.Errorf("%s: the claim has %d devices", tc.group, n)
		}
	}
}

// A group that does not fit as a whole gets nothing, and nothing is written for it. It is placed when there are enough devices.
func testGroupGetsAllOrNothing(t *testing.T, w *world) {
	w.addNode("a", gpus(h100, 2)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	w.addGroup("gang", 3)
	names := w.addMembers("gang", 3, withTemplate("one"))
	for _, name := range names {
		if message := scheduledCondition(w.awaitUnschedulable(name)).Message; strings.Contains(message, "reemption") {
			t.Errorf("pod %s is told of preemption, though nobody can be evicted: %s", name, message)
		}
	}
	await(w, "an explanation of why the group waits", cache.NewListWatchFromClient(w.client.CoreV1().RESTClient(), "events", w.name, fields.Everything()),
		func(e *v1.Event) bool { return hasAll(e.Message, []string{"waiting", "2 of 2", "held"}) })
	claims, err := w.client.ResourceV1().ResourceClaims(w.name).List(w.ctx, metav1.ListOptions{})
	w.must(err, "listing claims")
	for i := range claims.Items {
		if claim := &claims.Items[i]; claim.Status.Allocation != nil || len(claim.Finalizers) > 0 {
			t.Errorf("a claim was written: %s", describe(claim))
		}
	}
	w.addNode("b", gpus(h100, 1)...)
	w.awaitAllBound(names)
	group, err := w.client.SchedulingV1beta1().PodGroups(w.name).Get(w.ctx, "gang", metav1.GetOptions{})
	w.must(err, "getting pod group gang")
	if len(group.Status.Conditions) == 0 {
		t.Error("the group's status says nothing of it")
	}

	// One pod must be where the other one cannot be.
	w.addClaim("common", spec(w.exactly("gpu", 1)))
	w.addGroup("torn", 2)
	w.addNode("c", gpus(h100, 1)...)
	w.addNode("d", gpus(h100, 1)...)
	w.addPod("here", withClaim("common"), w.onNode("c"), inGroup("torn"))
	w.addPod("there", withClaim("common"), w.onNode("d"), inGroup("torn"))
	w.awaitUnschedulable("here", "minCount (2) cannot be satisfied")
	w.awaitUnschedulable("there")
	if claim := w.claim("common"); claim.Status.Allocation != nil || len(claim.Finalizers) > 0 {
		t.Errorf("the claim was written: %s", describe(claim))
	}
}

// Claims of a group, by name or made from a template, are reserved for the group and not for its pods, until the group is gone.
func testClaimsOfAGroup(t *testing.T, w *world) {
	w.addNode("a", gpus(h100, 4)...)
	w.addClaim("named", spec(w.exactly("gpu", 1)))
	w.addTemplate("made", spec(w.exactly("gpu", 1)))
	w.addClaim("own", spec(w.exactly("gpu", 1)))
	w.addGroup("group", 2, func(s *schedulingapi.PodGroupSpec) {
		s.ResourceClaims = []schedulingapi.PodGroupResourceClaim{
			{Name: "named", ResourceClaimName: ptr.To("named")}, {Name: "made", ResourceClaimTemplateName: ptr.To("made")},
		}
	})
	names := w.addMembers("group", 2, withClaim("named"), withTemplate("made"), withClaim("own"))
	w.awaitAllBound(names)
	made := claimName(w.awaitBound(names[0]), "made")
	if other := claimName(w.awaitBound(names[1]), "made"); other != made {
		t.Errorf("the pods have claims %s and %s from the group's template, want one", made, other)
	}
	for _, claim := range []string{"named", made} {
		w.awaitUsers(claim, "podgroups/group")
	}
	w.awaitUsers("own", "pods/group-0", "pods/group-1")

	w.deletePod(names[0])
	w.awaitUsers("own", "pods/group-1")
	w.addPod("late", withClaim("named"), withTemplate("made"), withClaim("own"), inGroup("group"))
	w.awaitBound("late")
	w.awaitUsers("own", "pods/group-1", "pods/late")
	for _, name := range []string{names[1], "late"} {
		w.deletePod(name)
	}
	w.awaitUsers("own")
	for _, claim := range []string{"named", made} {
		if got := users(w.claim(claim)); !cmp.Equal(got, []string{"podgroups/group"}) {
			t.Errorf("without pods, claim %s is reserved for %q, want the group", claim, got)
		}
	}
	w.must(w.client.SchedulingV1beta1().PodGroups(w.name).Delete(w.ctx, "group", metav1.DeleteOptions{}), "deleting the group")
	w.awaitUsers("named")
	w.awaitClaimGone(made)
}

// An allocation keeps one pod of a group where the other one must be. It is given up, and the group is placed. The framework tries the
// pods of a gang only up to the first that does not fit, so it is that one's.
func testGroupGivesUpAnAllocation(t *testing.T, w *world) {
	w.addNode("a", gpus(h100, 1)...)
	w.addNode("b", gpus(h100, 2)...)
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	w.allocate(w.addClaim("mine", spec(w.exactly("gpu", 1))), "a", "gpu-0")
	w.addGroup("gang", 2)
	w.addPod("large", withTemplate("one"), withClaim("mine"), inGroup("gang"))
	w.addPod("small", withTemplate("one"), w.onNode("a"), inGroup("gang"))
	w.awaitBoundTo("small", "a")
	w.awaitBoundTo("large", "b")
	if got := w.claim("mine").Status.Allocation.Devices.Results[0].Pool; got != w.nodeName("b") {
		t.Errorf("the claim has a device of %s, want of %s", got, w.nodeName("b"))
	}
}

// A group evicts as many pods as its own need devices, and those of the lowest priority.
func testGroupPreempts(t *testing.T, w *world) {
	w.addPriorities()
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	w.addTemplate("two", spec(w.exactly("gpu", 2)))
	w.addNode("a", gpus(h100, 4)...)
	w.run("go-0", low, "a", withTemplate("one"))
	w.run("keep", middle, "a", withTemplate("one"))
	w.run("go-1", low, "a", withTemplate("two"))
	w.addGroup("gang", 3, w.ofPriority(high))
	names := w.addMembers("gang", 3, withTemplate("one"), w.withPriority(high))
	w.awaitAllBound(names)
	if diff := cmp.Diff(append(names, "keep"), w.podNames()); diff != "" {
		t.Errorf("pods that are left (-want +got):\n%s", diff)
	}

	// Pods of equal priority are not evicted, and nobody is if that is not enough.
	w.addGroup("equal", 2, w.ofPriority(high))
	equal := w.addMembers("equal", 2, withTemplate("one"), w.withPriority(high))
	for _, name := range equal {
		w.awaitUnschedulable(name)
	}
	if left := w.podNames(); !slices.Contains(left, "keep") {
		t.Errorf("a pod was evicted in vain, left are %q", left)
	}
}

// The same for pods with extended resources, on both sides: their claims are made for them, and go with them.
func testGroupPreemptsForExtendedResources(t *testing.T, w *world) {
	w.addPriorities()
	extended := w.standsFor(w.class, "gpu")
	w.addTemplate("one", spec(w.exactly("gpu", 1)))
	w.addNode("a", gpus(h100, 4)...)
	w.run("go-0", low, "a", asks(extended, "main=1"))
	w.run("keep", middle, "a", asks(extended, "main=1"))
	w.run("go-1", low, "a", withTemplate("one"))
	w.addGroup("gang", 3, w.ofPriority(high))
	names := w.addMembers("gang", 3, asks(extended, "main=1"), w.withPriority(high))
	for _, name := range names {
		w.extendedClaim(w.awaitBoundTo(name, "a"))
	}
	if diff := cmp.Diff(append(names, "keep"), w.podNames()); diff != "" {
		t.Errorf("pods that are left (-want +got):\n%s", diff)
	}
}

// A group that is only disrupted as a whole goes as a whole, and what its pods share counts as free then.
func testGroupIsEvictedAsAWhole(t *testing.T, w *world) {
	w.addPriorities()
	w.addTemplate("one", w.partition("gpu"))
	whole := func(s *schedulingapi.PodGroupSpec) {
		s.DisruptionMode = &schedulingapi.DisruptionMode{All: &schedulingapi.AllDisruptionMode{}}
	}
	w.addNode("a", gpus(h100, 1)...)
	w.addNode("b", gpus(h100, 1)...)
	w.addFabric(resourceapi.Device{Name: "nic-0", Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"type": text("nic")}})

	w.addGroup("whole", 2, w.ofPriority(low), whole)
	w.awaitAllBound(w.addMembers("whole", 2, withTemplate("one"), w.withPriority(low)))
	w.addPod("preemptor", withTemplate("one"), w.withPriority(high))
	w.awaitBound("preemptor")
	if diff := cmp.Diff([]string{"preemptor"}, w.podNames()); diff != "" {
		t.Errorf("pods that are left (-want +got):\n%s", diff)
	}
	w.deletePod("preemptor")

	// One device for two pods on two nodes.
	ofFabric := w.partition("nic")
	w.addClaim("common", ofFabric)
	w.addGroup("sharing", 2, w.ofPriority(low), whole)
	w.addPod("on-a", withClaim("common"), w.withPriority(low), inGroup("sharing"), w.onNode("a"))
	w.addPod("on-b", withClaim("common"), w.withPriority(low), inGroup("sharing"), w.onNode("b"))
	w.awaitAllBound([]string{"on-a", "on-b"})
	w.addClaim("wanted", ofFabric)
	w.addPod("preemptor", withClaim("wanted"), w.withPriority(high))
	w.awaitBound("preemptor")
	if diff := cmp.Diff([]string{"preemptor"}, w.podNames()); diff != "" {
		t.Errorf("pods that are left (-want +got):\n%s", diff)
	}
}
