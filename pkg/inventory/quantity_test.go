// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package inventory

import (
	"context"
	"fmt"
	"strings"
	"testing"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/utils/ptr"
)

// neverEnding is read and stored by the API server. Nothing that compares, adds or rounds it ends.
const neverEnding = "1e2147483647"

// TestAPoolWithAVersionThatCELCannotReadIsInvalid: the API takes versions whose numbers have more than 64 bits. Every selector fails on a device
// that has one, so other drivers' devices on the node, and for all nodes on every node, could not be had any more.
func TestAPoolWithAVersionThatCELCannotReadIsInvalid(t *testing.T) {
	for name, attribute := range map[string]resourceapi.DeviceAttribute{
		"one":       {VersionValue: ptr.To("18446744073709551616.0.0")},
		"of a list": {VersionValues: []string{"1.0.0", "1.0.18446744073709551616"}},
	} {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			store.SetSlice(slice("beside", "n1", pool("beside", 1, 1)))
			store.SetSlice(slice("s", "n1", func(s *resourceapi.ResourceSlice) {
				s.Spec.Devices[0].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{"b": attribute, "a": attribute, "c": {VersionValue: ptr.To("1.2.3")}}
			}))
			devices := store.View().ForNode(node("n1"))
			if len(devices.Pools) != 1 || devices.Pools[0].Pool.ID.Pool != "beside" {
				t.Errorf("the pools are %v, want the one beside", devices.Pools)
			}
			if len(devices.Problems) != 1 || devices.Problems[0].Kind != Invalid || !strings.Contains(devices.Problems[0].Detail, "device s-device, attribute a: version ") {
				t.Errorf("the problems are %v, want one that names the attribute", devices.Problems)
			}
		})
	}
}

// TestAPoolWithAQuantityOutOfBoundsIsInvalid puts one quantity on which arithmetic does not end into each field of a slice that
// has one. The pool of the same driver beside it stays as it is.
func TestAPoolWithAQuantityOutOfBoundsIsInvalid(t *testing.T) {
	huge := resource.MustParse(neverEnding)
	small := resource.MustParse("1500m")
	withPolicy := func(set func(*resourceapi.CapacityRequestPolicy)) func(*resourceapi.ResourceSlice) {
		return func(s *resourceapi.ResourceSlice) {
			policy := &resourceapi.CapacityRequestPolicy{Default: ptr.To(small)}
			set(policy)
			s.Spec.Devices[0].AllowMultipleAllocations = ptr.To(true)
			s.Spec.Devices[0].Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: small, RequestPolicy: policy}}
		}
	}
	withRange := func(set func(*resourceapi.CapacityRequestPolicyRange)) func(*resourceapi.ResourceSlice) {
		return withPolicy(func(p *resourceapi.CapacityRequestPolicy) {
			p.ValidRange = &resourceapi.CapacityRequestPolicyRange{Min: ptr.To(small), Max: ptr.To(small), Step: ptr.To(small)}
			set(p.ValidRange)
		})
	}
	tests := map[string]struct {
		change func(*resourceapi.ResourceSlice)
		field  string
	}{
		"capacity": {field: "device s-device, capacity memory: ", change: func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices[0].Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: huge}}
		}},
		"default": {field: "requestPolicy.default: ", change: withPolicy(func(p *resourceapi.CapacityRequestPolicy) { p.Default = ptr.To(huge) })},
		"valid value": {field: "requestPolicy.validValues[1]: ", change: withPolicy(func(p *resourceapi.CapacityRequestPolicy) {
			p.ValidValues = []resource.Quantity{small, huge}
		})},
		"min":  {field: "requestPolicy.validRange.min: ", change: withRange(func(r *resourceapi.CapacityRequestPolicyRange) { r.Min = ptr.To(huge) })},
		"max":  {field: "requestPolicy.validRange.max: ", change: withRange(func(r *resourceapi.CapacityRequestPolicyRange) { r.Max = ptr.To(huge) })},
		"step": {field: "requestPolicy.validRange.step: ", change: withRange(func(r *resourceapi.CapacityRequestPolicyRange) { r.Step = ptr.To(huge) })},
		"shared counter": {field: "counter set set, counter memory: ", change: func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices = nil
			s.Spec.SharedCounters = []resourceapi.CounterSet{{Name: "set", Counters: map[string]resourceapi.Counter{"memory": {Value: huge}}}}
		}},
		"consumed counter": {field: "device s-device, consumption of counter set set, counter memory: ", change: func(s *resourceapi.ResourceSlice) {
			s.Spec.Devices[0].ConsumesCounters = []resourceapi.DeviceCounterConsumption{{
				CounterSet: "set", Counters: map[string]resourceapi.Counter{"memory": {Value: huge}},
			}}
		}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			store.SetSlice(slice("beside", "n1", pool("beside", 1, 1)))
			hostile := slice("s", "n1", test.change)
			store.SetSlice(hostile)
			// Again, as after a list; then with other quantities, and as it was, which compares each with its predecessor.
			store.SetSlice(hostile.DeepCopy())
			other := slice("s", "n1", test.change)
			if len(other.Spec.Devices) > 0 && other.Spec.Devices[0].Capacity != nil {
				other.Spec.Devices[0].Capacity["memory"] = resourceapi.DeviceCapacity{Value: small}
			}
			store.SetSlice(other)
			store.SetSlice(hostile)

			view := store.View()
			got := view.ForNode(node("n1"))
			if len(got.Pools) != 1 || got.Pools[0].ID().Pool != "beside" || len(got.Problems) != 1 {
				t.Fatalf("the node reaches %q", describe(got))
			}
			problem := got.Problems[0]
			if problem.Kind != Invalid || !strings.Contains(problem.Detail, "slice s: ") || !strings.Contains(problem.Detail, test.field+neverEnding) {
				t.Errorf("the pool is %s", problem)
			}
			view.Pool(PoolID{driver, "n1"}).Devices("s-device") // for those who audit
		})
	}
}

// TestSelectorsWithQuantitiesThatNeverEnd makes selectors compare with quantities on which arithmetic, or even reading, does not end.
func TestSelectorsWithQuantitiesThatNeverEnd(t *testing.T) {
	memory := func(s *resourceapi.ResourceSlice) {
		for i := range s.Spec.Devices {
			s.Spec.Devices[i].Capacity = map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{"memory": {Value: resource.MustParse("1500m")}}
			s.Spec.Devices[i].Attributes = map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"huge": {StringValue: ptr.To(neverEnding)}, "one": {StringValue: ptr.To("1")}, "exponent": {StringValue: ptr.To("e2147483647")},
			}
		}
	}
	const capacity, attributes = `device.capacity["gpu.example.com"].memory`, `device.attributes["gpu.example.com"]`
	tests := map[string]struct {
		selector string
		fails    bool
		matches  bool
	}{
		"a literal":                {selector: capacity + `.compareTo(quantity("1e2147483647")) < 0`, fails: true},
		"a nested literal":         {selector: capacity + `.isLessThan(quantity("1").add(quantity("1e2147483647")))`, fails: true},
		"a macro's literal":        {selector: `["1e2147483647"].exists(t, ` + capacity + `.isLessThan(quantity(t)))`, fails: true},
		"an attribute":             {selector: capacity + `.isLessThan(quantity(` + attributes + `.huge))`, fails: true},
		"attributes put together":  {selector: capacity + `.isLessThan(quantity(` + attributes + `.one + ` + attributes + `.exponent))`, fails: true},
		"equality":                 {selector: capacity + ` == quantity("1e2147483647")`, fails: true},
		"reading does not end":     {selector: `sign(quantity("1e-2147483647")) == 1`, fails: true},
		"asking does not end":      {selector: `!isQuantity("1e-2147483647") && !isQuantity("1e2147483647")`, matches: true},
		"within the bounds":        {selector: capacity + `.isLessThan(quantity("99E")) && isQuantity("1Gi") && !isQuantity("one")`, matches: true},
		"sums within the bounds":   {selector: capacity + `.add(quantity("99E")).sub(quantity("99E")).compareTo(quantity("1.5")) == 0`, matches: true},
		"no quantity":              {selector: capacity + `.isLessThan(quantity("one"))`, fails: true},
		"not known when compiled":  {selector: `sign(quantity(dyn(` + attributes + `.huge))) == 1`, fails: true},
		"the function by its name": {selector: `!isQuantity(string(` + attributes + `.huge))`, matches: true},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			store := newStore()
			store.SetSlice(slice("s", "n1", devices("d0", "d1"), memory))
			view := store.View()
			p := view.ForNode(node("n1")).Pools[0]
			match := judged(matcher(t, view, MatcherSpec{Selectors: []string{test.selector}}), p)
			if got := match.Errors.Count() == 2; got != test.fails {
				_, _, err, _ := matcher(t, view, MatcherSpec{Selectors: []string{test.selector}}).Error(context.Background(), p, 0)
				t.Errorf("fails: %t, want %t: %v", got, test.fails, err)
			}
			if got := match.Match.Count() == 2; got != test.matches {
				t.Errorf("matches: %t, want %t", got, test.matches)
			}
		})
	}
}

// TestDerivedAttributesWithQuantitiesThatNeverEnd does the same with the expression of a derived attribute.
func TestDerivedAttributesWithQuantitiesThatNeverEnd(t *testing.T) {
	features := DefaultFeatures()
	features.DerivedAttributes = true
	store := NewStore(Options{Features: features})
	store.SetSlice(slice("s", "n1", devices("d0", "d1")))
	view := store.View()
	for expression, fails := range map[string]bool{
		`quantity("1").compareTo(quantity("1e2147483647"))`: true,
		`sign(quantity("1e-2147483647"))`:                   true,
		`quantity("1").compareTo(quantity("1500m"))`:        false,
	} {
		d, err := view.Derivation(context.Background(), "ns", expression)
		if err != nil {
			t.Fatal(err)
		}
		column, err := view.ForNode(node("n1")).Pools[0].Derived(context.Background(), d)
		if err != nil {
			t.Fatal(err)
		}
		if got := column.Errors().Count() == 2; got != fails {
			t.Errorf("%s: fails: %t, want %t: %v", expression, got, fails, fmt.Sprint(column.Err(0)))
		}
	}
}
