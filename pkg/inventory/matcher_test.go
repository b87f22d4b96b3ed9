// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"

	"stowage.dev/stowage/pkg/inventory/bitset"
)

// numbered gives each device an attribute "n": its number, except those listed.
func numbered(except ...int) func(*resourceapi.ResourceSlice) {
	return func(s *resourceapi.ResourceSlice) {
	devices:
		for i := range s.Spec.Devices {
			for _, e := range except {
				if i == e {
					continue devices
				}
			}
			s.Spec.Devices[i].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"n": {IntValue: ptr.To(int64(i))}}
		}
	}
}

func tainted(device int, key string, effect resourceapi.DeviceTaintEffect) func(*resourceapi.ResourceSlice) {
	return func(s *resourceapi.ResourceSlice) {
		s.Spec.Devices[device].Taints = append(s.Spec.Devices[device].Taints, resourceapi.DeviceTaint{Key: key, Effect: effect})
	}
}

func matcher(t *testing.T, view *View, spec MatcherSpec) *Matcher {
	t.Helper()
	m, err := view.Matcher(context.Background(), spec)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func judged(m *Matcher, p *NodePool) *PoolMatch {
	match, _ := m.On(context.Background(), p) // which does not end
	return match
}

func members(s bitset.Set) []int {
	var out []int
	for i := s.Next(0); i >= 0; i = s.Next(i + 1) {
		out = append(out, i)
	}
	return out
}

const (
	isGPU = `device.driver == "gpu.example.com"`
	n     = `device.attributes["gpu.example.com"].n`
)

func TestAMatcherJudgesEveryDevice(t *testing.T) {
	four := devices("d0", "d1", "d2", "d3")
	type result struct {
		Match, Usable, Tainted, Errors []int
		ByClass                        int
		BySelector                     []int
	}
	tests := map[string]struct {
		slice *resourceapi.ResourceSlice
		spec  MatcherSpec
		want  result
	}{
		"no selector": {
			slice: slice("s", "n1", four),
			want:  result{Match: []int{0, 1, 2, 3}, Usable: []int{0, 1, 2, 3}},
		},
		"selectors of class and request": {
			slice: slice("s", "n1", four, numbered()),
			spec:  MatcherSpec{ClassSelectors: []string{n + " != 0"}, Selectors: []string{n + " < 3", n + " > 1"}},
			want:  result{Match: []int{2}, Usable: []int{2}, ByClass: 1, BySelector: []int{1, 1}},
		},
		"a selector that fails": {
			slice: slice("s", "n1", four, numbered(1)),
			spec:  MatcherSpec{Selectors: []string{n + " > 1"}},
			want:  result{Match: []int{2, 3}, Usable: []int{2, 3}, Errors: []int{1}, BySelector: []int{1}},
		},
		"a selector does not see what an earlier one rejected": {
			slice: slice("s", "n1", four, numbered(1)),
			spec:  MatcherSpec{ClassSelectors: []string{`has(` + n + `)`}, Selectors: []string{n + " > 1"}},
			want:  result{Match: []int{2, 3}, Usable: []int{2, 3}, ByClass: 1, BySelector: []int{1}},
		},
		"taints that prevent allocation": {
			slice: slice("s", "n1", four, tainted(0, "a", resourceapi.DeviceTaintEffectNoSchedule), tainted(1, "a", resourceapi.DeviceTaintEffectNoExecute),
				tainted(2, "a", resourceapi.DeviceTaintEffectNone), tainted(3, "a", "Future")),
			want: result{Match: []int{0, 1, 2, 3}, Usable: []int{2, 3}, Tainted: []int{0, 1}},
		},
		"tolerations": {
			slice: slice("s", "n1", four, tainted(0, "a", resourceapi.DeviceTaintEffectNoSchedule), tainted(1, "a", resourceapi.DeviceTaintEffectNoExecute),
				tainted(2, "a", resourceapi.DeviceTaintEffectNoSchedule), tainted(2, "b", resourceapi.DeviceTaintEffectNoSchedule)),
			spec: MatcherSpec{Tolerations: []resourceapi.DeviceToleration{{Key: "a", Operator: resourceapi.DeviceTolerationOpExists, Effect: resourceapi.DeviceTaintEffectNoSchedule}}},
			want: result{Match: []int{0, 1, 2, 3}, Usable: []int{0, 3}, Tainted: []int{1, 2}},
		},
		"taints switched off": {
			slice: slice("s", "n1", four, tainted(0, "a", resourceapi.DeviceTaintEffectNoSchedule)),
			spec:  MatcherSpec{IgnoreTaints: true},
			want:  result{Match: []int{0, 1, 2, 3}, Usable: []int{0, 1, 2, 3}},
		},
		"binding conditions refused": {
			slice: slice("s", "n1", four, func(s *resourceapi.ResourceSlice) { s.Spec.Devices[1].BindingConditions = []string{"x"} }),
			spec:  MatcherSpec{RefuseBindingConditions: true},
			want:  result{Match: []int{0, 2, 3}, Usable: []int{0, 2, 3}},
		},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			store.SetSlice(tc.slice)
			view := store.View()
			m := matcher(t, view, tc.spec)
			p := view.ForNode(node("n1")).Pools[0]
			r := judged(m, p)
			got := result{Match: members(r.Match), Usable: members(r.Usable), Tainted: members(r.Tainted), Errors: members(r.Errors)}
			got.ByClass, got.BySelector, _ = m.Rejections(context.Background(), p)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Error(diff)
			}
			for _, i := range got.Errors {
				text, ofClass, err, _ := m.Error(context.Background(), p, i)
				if text != n+" > 1" || ofClass || err == nil || !strings.Contains(err.Error(), "no such key: n") {
					t.Errorf("error of device %d: %q, %v, %v", i, text, ofClass, err)
				}
			}
		})
	}
}

func TestASelectorIsEvaluatedOncePerSlice(t *testing.T) {
	store := newStore()
	store.SetSlice(slice("s", "n1", devices("d0", "d1"), numbered()))
	store.SetSlice(slice("other", "n1", pool("other", 1, 1)))
	kept := func(m *Matcher) bool {
		return m.expressions[0].keptOn(store.View().Pool(PoolID{driver, "n1"}).slices[0]) != nil
	}
	spec := MatcherSpec{Selectors: []string{n + ` > 0`}, ClassSelectors: nil}
	m := matcher(t, store.View(), spec)
	if kept(m) {
		t.Fatal("a result is kept before the selector was evaluated")
	}
	for _, p := range store.View().ForNode(node("n1")).Pools {
		judged(m, p)
	}
	if !kept(m) {
		t.Fatal("no result is kept")
	}
	// Another request with the same selector, another slice, and then taints on the slice itself.
	if !kept(matcher(t, store.View(), MatcherSpec{ClassSelectors: []string{n + ` > 0`}, Selectors: []string{"true"}})) {
		t.Error("not kept for another matcher")
	}
	store.SetSlice(slice("other", "n1", pool("other", 2, 1)))
	store.SetSlice(slice("s", "n1", devices("d0", "d1"), numbered(), tainted(1, "lost", resourceapi.DeviceTaintEffectNoSchedule)))
	if !kept(m) {
		t.Error("not kept after a taint")
	}
	store.SetSlice(slice("s", "n1", devices("d0", "d1"), numbered(0)))
	if kept(m) {
		t.Error("kept after an attribute changed")
	}
}

func TestCachesAreBoundedAndStayRight(t *testing.T) {
	store := NewStore(Options{Features: DefaultFeatures(), MaxSelectors: 3, MaxMatchers: 2})
	store.SetSlice(slice("s", "n1", devices("d0", "d1", "d2", "d3", "d4", "d5", "d6", "d7"), numbered()))
	view := store.View()
	p := view.ForNode(node("n1")).Pools[0]
	kept := matcher(t, view, MatcherSpec{Selectors: []string{n + " == 0"}})
	for round := range 3 {
		for i := range 8 {
			m := matcher(t, view, MatcherSpec{Selectors: []string{fmt.Sprintf("%s == %d", n, i)}})
			if diff := cmp.Diff([]int{i}, members(judged(m, p).Match)); diff != "" {
				t.Errorf("round %d, selector %d: %s", round, i, diff)
			}
			if diff := cmp.Diff([]int{0}, members(judged(kept, p).Match)); diff != "" {
				t.Errorf("round %d: the matcher that was kept: %s", round, diff)
			}
		}
	}
	stats := store.Stats()
	if stats.Selectors.Entries != 3 || stats.Matchers.Entries != 2 || stats.Matchers.Evicted == 0 {
		t.Errorf("caches: %+v", stats)
	}
}

func TestASelectorThatDoesNotCompileIsNamed(t *testing.T) {
	_, err := newStore().View().Matcher(context.Background(), MatcherSpec{ClassSelectors: []string{isGPU}, Selectors: []string{"device.nonsense"}})
	var compileError *CompileError
	if !errors.As(err, &compileError) || compileError.Expression != "device.nonsense" {
		t.Errorf("got %v", err)
	}
}

func TestDifferentSpecsHaveDifferentMatchers(t *testing.T) {
	view := newStore().View()
	toleration := resourceapi.DeviceToleration{Key: "a", Operator: resourceapi.DeviceTolerationOpExists}
	specs := []MatcherSpec{
		{},
		{Selectors: []string{"true"}},
		{ClassSelectors: []string{"true"}},
		{Selectors: []string{"true", "true"}},
		{Tolerations: []resourceapi.DeviceToleration{toleration}},
		{IgnoreTaints: true},
		{RefuseBindingConditions: true},
	}
	seen := map[*Matcher]int{}
	for i, spec := range specs {
		m := matcher(t, view, spec)
		if j, ok := seen[m]; ok {
			t.Errorf("specs %d and %d have one matcher", i, j)
		}
		seen[m] = i
		if matcher(t, view, spec) != m {
			t.Errorf("spec %d has two matchers", i)
		}
	}
}

func TestAttributesAreFoundByTheirFullName(t *testing.T) {
	store := newStore()
	store.SetSlice(slice("s", "n1", devices("d0", "d1", "d2"), func(s *resourceapi.ResourceSlice) {
		s.Spec.Devices[0].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"a": {StringValue: ptr.To("short")}, "other.com/a": {IntValue: ptr.To(int64(7))},
		}
		s.Spec.Devices[1].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			driver + "/a": {BoolValue: ptr.To(true)}, "other.com/a": {VersionValue: ptr.To("1.0.0")},
		}
		s.Spec.Devices[2].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"a": {}}
	}))
	p := store.View().ForNode(node("n1")).Pools[0]
	column := func(name resourceapi.FullyQualifiedName) [][]AttributeValue { return p.Attribute(name).values }
	if diff := cmp.Diff([][]AttributeValue{{{Kind: StringKind, String: "short"}}, {{Kind: BoolKind, Int: 1}}, {{Kind: UnknownKind}}}, column(driver+"/a")); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([][]AttributeValue{{{Kind: IntKind, Int: 7}}, {{Kind: VersionKind, String: "1.0.0"}}, nil}, column("other.com/a")); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(make([][]AttributeValue, 3), column("another.com/a")); diff != "" {
		t.Error(diff)
	}
}

func TestListsAreValuesOnlyWithTheirFeature(t *testing.T) {
	lists := slice("s", "n1", devices("d0", "d1", "d2", "d3"), func(s *resourceapi.ResourceSlice) {
		for i, attribute := range []resourceapi.DeviceAttribute{
			{StringValues: []string{"x", "y", "x"}}, {StringValue: ptr.To("y")}, {IntValues: []int64{1}}, {StringValues: []string{}},
		} {
			s.Spec.Devices[i].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"a": attribute}
		}
	})
	x, y := AttributeValue{Kind: StringKind, String: "x"}, AttributeValue{Kind: StringKind, String: "y"}
	unknown := []AttributeValue{{Kind: UnknownKind}}
	for name, tc := range map[string]struct {
		features Features
		values   [][]AttributeValue
		groups   []Group
	}{
		"on": {
			features: Features{ListTypeAttributes: true},
			values:   [][]AttributeValue{{x, y}, {y}, {{Kind: IntKind, Int: 1}}, nil},
			groups:   []Group{{x, bitset.Set{1}}, {y, bitset.Set{3}}, {AttributeValue{Kind: IntKind, Int: 1}, bitset.Set{4}}},
		},
		"off": {values: [][]AttributeValue{unknown, {y}, unknown, unknown}, groups: []Group{{y, bitset.Set{2}}}},
	} {
		t.Run(name, func(t *testing.T) {
			store := NewStore(Options{Features: tc.features})
			store.SetSlice(lists)
			column := store.View().ForNode(node("n1")).Pools[0].Attribute(driver + "/a")
			if diff := cmp.Diff(tc.values, column.values); diff != "" {
				t.Errorf("values (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tc.groups, column.Groups()); diff != "" {
				t.Errorf("groups (-want +got):\n%s", diff)
			}
		})
	}
}

func TestDerivedAttributesAreEvaluatedOncePerSlice(t *testing.T) {
	store := NewStore(Options{Features: Features{DerivedAttributes: true}})
	withModel := func(taints ...resourceapi.DeviceTaint) *resourceapi.ResourceSlice {
		return slice("s", "n1", devices("d0", "d1"), func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices[0].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"model": {StringValue: ptr.To("x")}}
			s.Spec.Devices[1].Taints = taints
		})
	}
	store.SetSlice(withModel())
	d, err := store.View().Derivation(context.Background(), "ns", `device.attributes["`+driver+`"].model + "!"`)
	if err != nil {
		t.Fatal(err)
	}
	before := store.View().ForNode(node("n1")).Pools[0]
	column, err := before.Derived(context.Background(), d)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([][]AttributeValue{{{Kind: StringKind, String: "x!"}}, nil}, column.values); diff != "" {
		t.Error(diff)
	}
	if !column.Errors().Has(1) || column.Errors().Has(0) || column.Err(1) == nil {
		t.Errorf("errors: %v, %v", column.Errors(), column.Err(1))
	}
	store.SetSlice(withModel(resourceapi.DeviceTaint{Key: "broken", Effect: resourceapi.DeviceTaintEffectNoSchedule}))
	after := store.View().ForNode(node("n1")).Pools[0]
	derived := func(s *Slice) *derivedResult {
		r, _ := d.on(context.Background(), s) // which does not end
		return r
	}
	if before.Slices[0] == after.Slices[0] || derived(before.Slices[0]) != derived(after.Slices[0]) {
		t.Error("a taint made the attribute be derived again")
	}
	if _, err := store.View().Derivation(context.Background(), "ns", "nonsense"); err == nil {
		t.Error("nonsense compiles")
	}
	if got := store.Stats().Derivations.Entries; got != 1 {
		t.Errorf("%d derivations are kept", got)
	}
}

// TestDevicesThatSkipNodeOperations: they are for nodes that declare the feature, whether the pool is for one node or
// for many; where no allocator of upstream's minds, for all.
func TestDevicesThatSkipNodeOperations(t *testing.T) {
	able := node("n1")
	able.Status.DeclaredFeatures = []string{"DRAOptionalNodeOperations"}
	for name, tc := range map[string]struct {
		features     Features
		able, unable bool
	}{
		"on":                             {Features{OptionalNodeOperations: true}, true, false},
		"off":                            {Features{}, true, true},
		"off, with other alpha features": {Features{DerivedAttributes: true}, false, false},
	} {
		for where, change := range map[string]func(*resourceapi.ResourceSlice){
			"local":  func(*resourceapi.ResourceSlice) {},
			"shared": func(s *resourceapi.ResourceSlice) { s.Spec.NodeName, s.Spec.AllNodes = nil, ptr.To(true) },
		} {
			t.Run(name+", "+where, func(t *testing.T) {
				store := NewStore(Options{Features: tc.features})
				store.SetSlice(slice("s", "n1", devices("d0", "d1"), func(s *resourceapi.ResourceSlice) {
					s.Spec.SkipNodeOperations = []resourceapi.SkipNodeOperation{"*"}
				}, change))
				usable := func(n *v1.Node) bool { return store.View().ForNode(n).Pools[0].Unsupported().Count() == 0 }
				if usable(able) != tc.able || usable(node("n1")) != tc.unable {
					t.Errorf("usable by the node that can skip operations: %v, by the other: %v, want %v and %v", usable(able), usable(node("n1")), tc.able, tc.unable)
				}
				store.DeleteSlice("s")
				if n := len(store.View().ForNode(able).Pools); n > 0 {
					t.Errorf("%d pools are left", n)
				}
			})
		}
	}
}
