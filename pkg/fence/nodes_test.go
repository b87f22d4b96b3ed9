// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package fence

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory"
	"stowage.dev/stowage/pkg/tracker"
	"stowage.dev/stowage/pkg/usage"
)

// nodes, fields, labelled and named make node selectors.
func nodes(terms ...v1.NodeSelectorTerm) *v1.NodeSelector {
	return &v1.NodeSelector{NodeSelectorTerms: terms}
}

func fields(all ...v1.NodeSelectorRequirement) v1.NodeSelectorTerm {
	return v1.NodeSelectorTerm{MatchFields: all}
}

func labelled(term v1.NodeSelectorTerm, labels ...v1.NodeSelectorRequirement) v1.NodeSelectorTerm {
	term.MatchExpressions = labels
	return term
}

func named(operator v1.NodeSelectorOperator, names ...string) v1.NodeSelectorRequirement {
	return v1.NodeSelectorRequirement{Key: metav1.ObjectNameField, Operator: operator, Values: names}
}

// TestANamesakeOfANodeMakesNoRoomForADeviceOfMany: a device for more than one node is shared, and a kubelet has one of its name.
func TestANamesakeOfANodeMakesNoRoomForADeviceOfMany(t *testing.T) {
	for _, first := range []string{"a", "z"} {
		of := func(name, memory string) *resourceapi.ResourceSlice {
			s := slice("gpus", shareable("gpu", memory))
			s.Name, s.Spec.Pool.ResourceSliceCount = name, 2
			return s
		}
		many, one := of("many", "15Gi"), of(first, "80Gi")
		many.Spec.NodeName, many.Spec.AllNodes = nil, ptr.To(true)
		one.Spec.NodeName = ptr.To("evil")
		s := newScheduler(many, one)
		s.list(10)
		var none results
		s.watch(claim("theirs", 11, none.share("gpus", "gpu", "s1", "10Gi")))
		ours := claim("ours", 12, none.share("gpus", "gpu", "s2", "10Gi"))
		s.watch(ours)
		s.wantVerdict(t, ours, usage.View{}, tracker.Lost, "theirs")
	}
}

// Two nodes of one pool call a device alike. What the one has that the claim does not get keeps nobody off the other, and makes no room there.
func TestTheDeviceOfTheAllocationsNodeCounts(t *testing.T) {
	of := func(node string, all ...*resourceapi.ResourceSlice) []*resourceapi.ResourceSlice {
		for _, s := range all {
			s.Name, s.Spec.NodeName, s.Spec.Pool.ResourceSliceCount = node+"-"+s.Name, ptr.To(node), int64(len(all))
		}
		return all
	}
	type slicesOf func(node string) []*resourceapi.ResourceSlice
	shares := func(memory string) slicesOf {
		return func(node string) []*resourceapi.ResourceSlice {
			return of(node, slice("gpus", shareable("gpu", memory)))
		}
	}
	parts := func(memory string, groups ...string) slicesOf {
		return func(node string) []*resourceapi.ResourceSlice {
			devices := []resourceapi.Device{partition("one", "10Gi"), partition("two", "10Gi")}
			for i, group := range groups {
				devices[i].ConsumesCounters[0].CompatibilityGroups = []string{group}
			}
			return of(node, withCounters("gpus", map[string]string{"memory": memory}, devices...)...)
		}
	}
	var none results
	share := func(id string) results { return none.share("gpus", "gpu", id, "10Gi") }
	one, two := none.device("gpus", "one"), none.device("gpus", "two")
	tests := map[string]struct {
		own, other   slicesOf
		theirs, ours results
		known        bool // the allocation's node
		lost         bool
	}{
		"capacity":                              {own: shares("80Gi"), other: shares("1"), theirs: share("s1"), ours: share("s2"), known: true},
		"capacity, and the node is not known":   {own: shares("80Gi"), other: shares("1"), theirs: share("s1"), ours: share("s2")},
		"capacity, and the other node has more": {own: shares("15Gi"), other: shares("80Gi"), theirs: share("s1"), ours: share("s2"), known: true, lost: true},
		"capacity that neither has":             {own: shares("15Gi"), other: shares("1"), theirs: share("s1"), ours: share("s2"), lost: true},
		"counters":                              {own: parts("80Gi"), other: parts("1"), theirs: one, ours: two, known: true},
		"counters, and the node is not known":   {own: parts("80Gi"), other: parts("1"), theirs: one, ours: two},
		"counters, and the other node has more": {own: parts("15Gi"), other: parts("80Gi"), theirs: one, ours: two, known: true, lost: true},
		"counters that neither has":             {own: parts("15Gi"), other: parts("1"), theirs: one, ours: two, lost: true},
		"groups":                                {own: parts("80Gi", "red", "red"), other: parts("80Gi", "red", "blue"), theirs: one, ours: two, known: true},
		"groups, and the node is not known":     {own: parts("80Gi", "red", "red"), other: parts("80Gi", "red", "blue"), theirs: one, ours: two},
		"groups that go together on the other node": {
			own: parts("80Gi", "red", "blue"), other: parts("80Gi", "red", "red"), theirs: one, ours: two, known: true, lost: true,
		},
	}
	for name, tc := range tests {
		for own, other := range map[string]string{"n0": "n1", "n1": "n0"} {
			t.Run(fmt.Sprint(name, ", on ", own), func(t *testing.T) {
				s := newScheduler(append(tc.own(own), tc.other(other)...)...)
				s.list(10)
				theirs, ours := claim("theirs", 11, tc.theirs), claim("ours", 12, tc.ours)
				if tc.known {
					ours.Status.Allocation.NodeSelector = nodes(fields(named(v1.NodeSelectorOpIn, own)))
				}
				s.watch(theirs)
				s.watch(ours)
				if tc.lost {
					s.wantVerdict(t, ours, usage.View{}, tracker.Lost, "theirs")
				} else {
					s.wantVerdict(t, ours, usage.View{}, tracker.Fits, "")
				}
			})
		}
	}
}

// The allocation's node is the one that the only term of its selector names alone. Where it is not known, it is enough
// that the larger one of two nodes has room.
func TestTheNodeOfAnAllocationIsNamedByItsSelector(t *testing.T) {
	elsewhere := named(v1.NodeSelectorOpNotIn, "elsewhere")
	small, large := named(v1.NodeSelectorOpIn, "small"), named(v1.NodeSelectorOpIn, "large")
	zone := v1.NodeSelectorRequirement{Key: "zone", Operator: v1.NodeSelectorOpIn, Values: []string{"a"}}
	other := small
	other.Key = "metadata.namespace"
	var none results
	for name, tc := range map[string]struct {
		selector *v1.NodeSelector
		want     tracker.Outcome
	}{
		"the small node": {nodes(fields(small)), tracker.Lost},
		"the small node, after another requirement": {nodes(fields(elsewhere, small)), tracker.Lost},
		"the small node, with a label":              {nodes(labelled(fields(small), zone)), tracker.Lost},
		"the large node":                            {nodes(fields(large)), tracker.Fits},
		"no selector":                               {nil, tracker.Fits},
		"a selector without terms":                  {nodes(), tracker.Fits},
		"a term without requirements":               {nodes(fields()), tracker.Fits},
		"any node but the small one":                {nodes(fields(named(v1.NodeSelectorOpNotIn, "small"))), tracker.Fits},
		"one of the two":                            {nodes(fields(named(v1.NodeSelectorOpIn, "small", "large"))), tracker.Fits},
		"one of the two, by two terms":              {nodes(fields(small), fields(large)), tracker.Fits},
		"no name":                                   {nodes(fields(named(v1.NodeSelectorOpIn))), tracker.Fits},
		"another field":                             {nodes(fields(other)), tracker.Fits},
		"a label that is called like the field":     {nodes(labelled(fields(), small)), tracker.Fits},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScheduler()
			for node, memory := range map[string]string{"small": "15Gi", "large": "80Gi"} {
				of := slice("gpus", shareable("gpu", memory))
				of.Name, of.Spec.NodeName, of.Spec.Pool.ResourceSliceCount = node, ptr.To(node), 2
				s.store.SetSlice(of)
			}
			s.list(10)
			theirs, ours := claim("theirs", 11, none.share("gpus", "gpu", "s1", "10Gi")), claim("ours", 12, none.share("gpus", "gpu", "s2", "10Gi"))
			ours.Status.Allocation.NodeSelector = tc.selector
			s.watch(theirs)
			s.watch(ours)
			other := ""
			if tc.want == tracker.Lost {
				other = "theirs"
			}
			s.wantVerdict(t, ours, usage.View{}, tc.want, other)
		})
	}
}

// The same where the other node counts generations for itself, and is ahead: what there is of the claim's device is not known then, and what the other
// has is no reason to give way for ever.
func TestTheDeviceOfANodeThatIsAheadIsNotTheClaims(t *testing.T) {
	var none results
	share := func(id string) results { return none.share("gpus", "gpu", id, "10Gi") }
	shares := func(memory string) []*resourceapi.ResourceSlice {
		return []*resourceapi.ResourceSlice{slice("gpus", shareable("gpu", memory))}
	}
	parts := func(memory string) []*resourceapi.ResourceSlice {
		return withCounters("gpus", map[string]string{"memory": memory}, partition("one", "10Gi"), partition("two", "10Gi"))
	}
	for name, tc := range map[string]struct {
		own, other   []*resourceapi.ResourceSlice
		theirs, ours results
	}{
		"capacity": {own: shares("80Gi"), other: shares("1"), theirs: share("s1"), ours: share("s2")},
		"counters": {own: parts("80Gi"), other: parts("1"), theirs: none.device("gpus", "one"), ours: none.device("gpus", "two")},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScheduler()
			for generation, of := range map[int64][]*resourceapi.ResourceSlice{1: tc.own, 2: tc.other} {
				for _, slice := range of {
					node := fmt.Sprint("n", generation)
					slice.Name, slice.Spec.NodeName, slice.Spec.Pool.Generation = node+"-"+slice.Name, &node, generation
					s.store.SetSlice(slice)
				}
			}
			if pool := s.store.View().Pool(inventory.PoolID{Driver: driver, Pool: "gpus"}); pool.Problem != nil || pool.Generation != 2 {
				t.Fatalf("generation %d: %v", pool.Generation, pool.Problem)
			}
			s.list(10)
			theirs, ours := claim("theirs", 11, tc.theirs), claim("ours", 12, tc.ours)
			ours.Status.Allocation.NodeSelector = nodes(fields(named(v1.NodeSelectorOpIn, "n1")))
			s.watch(theirs)
			decidedOn := s.tracker.Snapshot().Usage
			s.watch(ours)
			s.wantVerdict(t, ours, usage.View{}, tracker.Undecided, "theirs")
			s.wantVerdict(t, ours, decidedOn, tracker.Fits, "")
		})
	}
}
