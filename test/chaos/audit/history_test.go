// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	schedulingapi "k8s.io/api/scheduling/v1beta1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// pod uses the claims of the given names; node may be empty.
func pod(name, node string, claims ...string) *v1.Pod {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)}, Spec: v1.PodSpec{NodeName: node}}
	for _, c := range claims {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, v1.PodResourceClaim{Name: c, ResourceClaimName: &c})
	}
	return p
}

func ended(p *v1.Pod) *v1.Pod {
	p.Status.Phase = v1.PodSucceeded
	return p
}

// claimOf is allocated on node n if there are devices, and reserved for the pods.
func claimOf(name string, devices []string, pods ...string) *resourceapi.ResourceClaim {
	c := &resourceapi.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID(name)}}
	for _, p := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourceapi.ResourceClaimConsumerReference{Resource: "pods", Name: p, UID: types.UID(p)})
	}
	if len(devices) == 0 {
		return c
	}
	c.Status.Allocation = &resourceapi.AllocationResult{NodeSelector: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
		MatchFields: []v1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: v1.NodeSelectorOpIn, Values: []string{"n"}}},
	}}}}
	for _, d := range devices {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, result(d))
	}
	return c
}

func gpu(name string, pods ...string) *resourceapi.ResourceClaim {
	return claimOf(name, []string{"gpu"}, pods...)
}

func TestHistory(t *testing.T) {
	type step struct {
		changes []Change
		want    []string
	}
	set := func(objects ...any) (all []Change) {
		for _, o := range objects {
			switch o := o.(type) {
			case *v1.Pod:
				all = append(all, Change{Pod: o})
			case *resourceapi.ResourceClaim:
				all = append(all, Change{Claim: o})
			case *schedulingapi.PodGroup:
				all = append(all, Change{Group: o})
			}
		}
		return all
	}
	group := &schedulingapi.PodGroup{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "g"}}
	ofGroup := func(p *v1.Pod) *v1.Pod {
		p.Spec.SchedulingGroup = &v1.PodSchedulingGroup{PodGroupName: &group.Name}
		return p
	}
	gone := func(objects ...any) []Change {
		all := set(objects...)
		for i := range all {
			all[i].Deleted = true
		}
		return all
	}
	tests := map[string]struct {
		steps []step
		want  Counts
	}{
		"one after the other": {
			steps: []step{
				{changes: set(pod("p", "", "a"), claimOf("a", nil))},
				{changes: set(gpu("a", "p"))},
				{changes: set(pod("p", "n", "a"))},
				{changes: set(ended(pod("p", "n", "a")), claimOf("a", nil))},
				{changes: set(pod("q", "", "b"), gpu("b", "q"))},
				{changes: set(pod("q", "n", "b"))},
				{changes: gone(pod("q", "n", "b"))},
				{changes: gone(gpu("b", "q"))},
			},
			want: Counts{Claims: 2, Bound: 2, LongestWait: 2 * time.Second, Slowest: Key{Namespace: "ns", Name: "p"}},
		},
		"two bound pods with one device": {
			steps: []step{
				{changes: set(pod("p", "n", "a"), gpu("a", "p"))},
				{changes: set(pod("q", "", "b"), gpu("b", "q"))},
				{changes: set(pod("q", "n", "b")), want: []string{"d.example.com/p/gpu is over-used by the claims ns/a, ns/b"}},
				{changes: set(pod("r", "", "c"), claimOf("c", nil))}, // told once
				{changes: gone(pod("p", "n", "a"))},
			},
			want: Counts{Claims: 3, Bound: 2, Conflicts: 1, Violations: 1, LongestWait: time.Second, Slowest: Key{Namespace: "ns", Name: "q"}},
		},
		"a conflict that is rolled back, and its retry": {
			steps: []step{
				{changes: set(pod("p", "n", "a"), gpu("a", "p"))},
				{changes: set(pod("q", "", "b"), claimOf("b", nil))},
				{changes: set(gpu("b", "q"))},
				{changes: set(claimOf("b", nil))},
				{changes: set(claimOf("b", []string{"half-0"}, "q"))},
				{changes: set(pod("q", "n", "b"))},
			},
			want: Counts{Claims: 2, Bound: 2, Conflicts: 1, RolledBack: 1, Retries: 1, LongestWait: 4 * time.Second, Slowest: Key{Namespace: "ns", Name: "q"}},
		},
		"a claim shared by two pods": {
			steps: []step{
				{changes: set(pod("p", "n", "a"), pod("q", "n", "a"), gpu("a", "p", "q"))},
				{changes: gone(pod("p", "n", "a"))},
			},
			want: Counts{Claims: 1, Bound: 2},
		},
		"a pod that has ended uses nothing": {
			steps: []step{
				{changes: set(ended(pod("p", "n", "a")), gpu("a", "p"), pod("q", "n", "b"), gpu("b", "q"))},
			},
			want: Counts{Claims: 2, Bound: 2, Conflicts: 1},
		},
		"a release after the pod has ended is no rollback": {
			steps: []step{
				{changes: set(ended(pod("p", "n", "a")), gpu("a", "p"))},
				{changes: set(claimOf("a", nil))},
			},
			want: Counts{Claims: 1, Bound: 1},
		},
		"a pod that is bound without its claim": {
			steps: []step{{changes: set(pod("p", "n", "a")), want: []string{"pod ns/p is bound and its claim a does not exist"}}},
			want:  Counts{Bound: 1, Violations: 1},
		},
		"a pod that is bound without devices": {
			steps: []step{{changes: set(pod("p", "n", "a"), claimOf("a", nil, "p")), want: []string{"pod ns/p is bound and its claim a has no devices"}}},
			want:  Counts{Claims: 1, Bound: 1, Violations: 1},
		},
		"a pod of a group that is bound without devices": {
			steps: []step{{
				changes: set(group, ofGroup(pod("p", "n", "a")), claimOf("a", nil, "p")), want: []string{"pod ns/p is bound and its claim a has no devices"},
			}},
			want: Counts{Claims: 1, Bound: 1, Violations: 1},
		},
		"a pod that loses its devices because its group has gone": {
			steps: []step{
				{changes: set(group, ofGroup(pod("p", "", "a")), gpu("a", "p"))},
				{changes: gone(group)},
				{changes: set(ofGroup(pod("p", "n", "a")))},
				{changes: set(claimOf("a", nil))},
			},
			want: Counts{Claims: 1, Bound: 1, LongestWait: 2 * time.Second, Slowest: Key{Namespace: "ns", Name: "p"}},
		},
		"two pods that use one device, of which one has lost its group": {
			steps: []step{
				{changes: set(group, ofGroup(pod("p", "n", "a")), gpu("a", "p"))},
				{changes: gone(group)},
				{changes: set(pod("q", "n", "b"), gpu("b", "q")), want: []string{"d.example.com/p/gpu is over-used by the claims ns/a, ns/b"}},
			},
			want: Counts{Claims: 2, Bound: 2, Conflicts: 1, Violations: 1},
		},
		"a pod that is bound with another's claim": {
			steps: []step{{changes: set(pod("p", "n", "a"), gpu("a", "q")), want: []string{"pod ns/p is bound and its claim a is not reserved for it"}}},
			want:  Counts{Claims: 1, Bound: 1, Violations: 1},
		},
		"a pod that is bound to another node": {
			steps: []step{{changes: set(pod("p", "m", "a"), gpu("a", "p")), want: []string{"pod ns/p is bound to node m, which the devices of its claim a are not for"}}},
			want:  Counts{Claims: 1, Bound: 1, Violations: 1},
		},
		"a claim made again under its name begins anew": {
			steps: []step{
				{changes: set(pod("p", "", "a"), gpu("a", "p"))},
				{changes: set(func() *resourceapi.ResourceClaim {
					c := claimOf("a", nil)
					c.UID = "again"
					return c
				}())},
			},
			want: Counts{Claims: 2},
		},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			h := NewHistory(inventory())
			begin := time.Unix(0, 0)
			for i, step := range test.steps {
				var got []string
				for _, v := range h.Apply(int64(i), begin.Add(time.Duration(i)*time.Second), step.changes...) {
					if v.Revision != int64(i) {
						t.Errorf("step %d: violation of revision %d", i, v.Revision)
					}
					got = append(got, v.What)
				}
				if diff := cmp.Diff(step.want, got); diff != "" {
					t.Errorf("step %d: violations (-want +got):\n%s", i, diff)
				}
			}
			if diff := cmp.Diff(test.want, h.Counts()); diff != "" {
				t.Errorf("counts (-want +got):\n%s", diff)
			}
		})
	}
}
